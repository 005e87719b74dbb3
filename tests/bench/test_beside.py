"""`bench engine --beside` compares decoders within a turn, and counts only turns whose tokens are right."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.beds.processes import BaselineError
from bench.core.lines import from_line, to_line
from bench.core.show import as_text
from bench.experiments.engine import beside
from bench.experiments.engine.bed import Bed
from bench.experiments.engine.beside import TURNS, judged, late, measure_beside, steps_of
from bench.experiments.engine.run import result_of, show
from bench.experiments.engine.ways import BESIDE, DECODERS, Answer, Case, Command, EngineSettings, Way, engine_options
from objectcache.calibration.servers import LocalServer
from tests.bench.test_engine import FakeEngine, settings

CASE = Case(1024, 0.875)
TOKENS = (5, 6, 7, 8)
DECODED = tuple((index, 2, 3) for index in range(DECODERS))
STEPS_S: Mapping[Way, tuple[float, ...]] = {
    Way.RECOMPUTE: (0.5,),
    Way.OWN_BLOCKS: (0.01, 0.05),
    Way.TIER: (0.01, 0.01, 0.01, 0.05),
    Way.FS_TIER: (0.01, 0.02, 0.03, 0.05),
    Way.LAYERWISE: (0.1,),
    Way.AHEAD: (0.01, 0.0112, 0.05),
}


def answer(way: Way, **changes: Any) -> Answer:
    """A right one."""
    stored = 0 if way is Way.RECOMPUTE else CASE.prefix_tokens
    counters = {"loaded_tokens": float(stored)} if way in (Way.LAYERWISE, Way.AHEAD) else {}
    found = Answer(
        ttft_s=0.1, cached_tokens=stored, tokens=TOKENS, counters=counters,
        alone_s=(0.01, 0.01, 0.012), beside_s=STEPS_S[way], decoded=DECODED,
    )  # fmt: skip
    return replace(found, **changes)


SESSION = {way: answer(way) for way in BESIDE}


class TestFigures:
    def test_steps_as_they_are_without_a_load_are_not_late(self) -> None:
        floor = SESSION[Way.OWN_BLOCKS]
        assert late(floor, floor) == 1.0
        assert late(SESSION[Way.TIER], floor) == pytest.approx(1.0)

    @pytest.mark.parametrize(("way", "ratio"), [(Way.FS_TIER, 0.11 / 0.08), (Way.LAYERWISE, 2.0)])
    def test_what_steps_take_longer_counts_whether_they_are_many_or_one(self, way: Way, ratio: float) -> None:
        assert late(SESSION[way], SESSION[Way.OWN_BLOCKS]) == pytest.approx(ratio)

    def test_targets_are_judged_by_the_median_of_the_turns(self) -> None:
        slow = {**SESSION, Way.TIER: answer(Way.TIER, beside_s=(0.02, 0.02, 0.02, 0.05))}
        for sessions, is_met in (([SESSION, SESSION, slow], True), ([SESSION, slow, slow], False)):
            tier, ahead = judged(CASE, sessions)["targets"]
            assert (tier["is_met"], ahead["is_met"]) == (is_met, True)

    def test_steps_are_told_with_their_count(self) -> None:
        found = steps_of([0.01] * 99 + [1.0])
        assert (found["median"]["median"], found["max"], found["count"]) == (0.01, 1.0, 100)
        assert 0.01 < found["p99"] < 1.0


class TestRun:
    def test_engines_have_room_for_all_and_steps_that_overlap_but_for_the_layerwise(self) -> None:
        asked = settings("--beside --smoke")
        assert asked.ways == tuple(way for way in Way if way in BESIDE)
        for way in BESIDE:
            options = engine_options(asked, way)
            assert (options["max_num_seqs"], options["async_scheduling"]) == (DECODERS + 1, way is not Way.LAYERWISE)
        with pytest.raises(ValueError, match="ask one"):
            settings("--beside --tier")

    def measured(
        self, monkeypatch: pytest.MonkeyPatch, changed: Mapping[Way, Answer] | None = None, runs: int = 2
    ) -> tuple[EngineSettings, dict[str, Any], dict[Way, FakeEngine]]:
        """The result of engines that answer so; the prefix of each round decides the tokens."""
        asked = replace(settings("--beside --smoke"), runs=runs)
        engines: dict[Way, FakeEngine] = {}
        for way in BESIDE:
            found = {**SESSION, **(changed or {})}[way]
            engines[way] = FakeEngine([])
            for index in range(runs + 1):
                tokens = (index, *found.tokens[1:])
                engines[way].answers += [Answer()] * (way is not Way.RECOMPUTE)
                engines[way].answers += [replace(found, tokens=tokens)] * TURNS

        @contextmanager
        def running_bed(found: EngineSettings) -> Any:
            server = cast("LocalServer", None)
            yield Bed(found, Path("/nowhere"), server, ExitStack(), engines=cast("dict[Way, Any]", engines))

        monkeypatch.setattr(beside, "running_bed", running_bed)
        return asked, measure_beside(asked), engines

    def test_every_engine_is_asked_in_every_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, found, engines = self.measured(monkeypatch)
        assert found["problem"] is None
        assert found["beside"]["turns"] == 2 * TURNS
        told = [command for command in engines[Way.TIER].told if command.case is not None]
        assert [(command.round_index, command.suffix) for command in told] == [
            (i, t) for i in range(3) for t in range(3)
        ]
        assert {command.decoders for command in told} == {DECODERS}
        result = result_of(asked, {}, **found)
        text = as_text(result, show(result))
        assert "met" in text
        assert "ObjectCache tier" in text

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"tokens": (0, 0, 0, 1)}, "recomputed"),
            ({"cached_tokens": 0}, "were not computed"),
            ({"decoded": (*DECODED[:-1], (6, 2, 4))}, "decoder 6 has other tokens"),
            ({"decoded": DECODED[:-1]}, "decoder 6 has other tokens"),
        ],
    )
    def test_a_wrong_answer_is_a_problem(
        self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str
    ) -> None:
        _, found, _ = self.measured(monkeypatch, {Way.TIER: answer(Way.TIER, **changes)})
        assert problem in found["problem"]

    def test_decoders_are_compared_as_far_as_both_have_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        longer = answer(Way.TIER, decoded=tuple((*tokens, 9) for tokens in DECODED))
        assert self.measured(monkeypatch, {Way.TIER: longer})[1]["problem"] is None

    def test_an_engine_that_does_not_start_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def running_bed(found: EngineSettings) -> Any:
            server = cast("LocalServer", None)
            yield Bed(found, Path("/nowhere"), server, ExitStack(), missing={Way.FS_TIER: "no room"})

        monkeypatch.setattr(beside, "running_bed", running_bed)
        with pytest.raises(BaselineError, match="no room"):
            measure_beside(settings("--beside --smoke"))

    def test_it_travels_as_text(self) -> None:
        command = Command(1, case=CASE, suffix=2, decoders=7)
        assert from_line(Command, to_line(command)) == command
        assert from_line(Answer, to_line(answer(Way.TIER))) == answer(Way.TIER)
