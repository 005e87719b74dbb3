"""`bench engine --stated` compares engines on one link within rounds, and says what a liar costs the honest."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from bench.beds.processes import BaselineError
from bench.core.lines import from_line, to_line
from bench.core.show import as_text
from bench.experiments.engine import paced
from bench.experiments.engine.bed import Bed
from bench.experiments.engine.paced import LIE, Condition, Ttfts, factors, judged, link_bytes_per_s, measure_stated
from bench.experiments.engine.run import result_of, show
from bench.experiments.engine.ways import Answer, Case, Command, EngineSettings, Way, transfer_config
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.transports.transport import Transport
from objectcache.calibration.servers import LocalServer
from objectcache.cli.config import Config
from tests.bench.test_engine import settings

COSTS = {"token_us": 100.0, "token_pair_us": 0.01, "request_us": 1000.0}
TOKENS = (5, 6, 7, 8)
TTFTS: Ttfts = {
    Condition.NO_LIMIT: ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0)),
    Condition.EQUAL: ((2.0, 3.0, 4.0), (2.0, 3.0, 4.0)),
    Condition.PROFILE: ((2.0, 2.0, 4.0), (2.0, 3.0, 4.0)),
    Condition.STATED: ((1.5, 2.0, 3.5), (1.0, 2.5, 3.5)),
    Condition.LIAR: ((1.2, 3.0, 4.4), (1.1, 3.9, 4.0)),
}


def text_of(ttfts_s: Ttfts) -> str:
    """What is shown of them."""
    head = {"engines": 3, "cases": ["4K, 0.875", "4K, 0.5", "4K, 0.5"], "link_bytes_per_s": 1e7}
    result = result_of(settings(), {}, None, stated_compute=[{**head, **judged(ttfts_s)}])
    return as_text(result, show(result))


def spread_of(median: float, least: float, greatest: float) -> dict[str, float]:
    """As it is published."""
    return {"median": median, "min": least, "max": greatest}


class TestResults:
    def test_added_time_is_that_over_a_link_without_a_limit_in_the_same_round(self) -> None:
        found = judged(TTFTS)
        assert found["added_ttft_s"]["equal"] == spread_of(3.0, 3.0, 3.0)
        assert found["added_ttft_profile_over_stated"] == spread_of(2.5, 2.0, 3.0)
        assert found["added_ttft_equal_over_stated"] == spread_of(3.0, 3.0, 3.0)

    def test_nothing_added_has_no_ratio(self) -> None:
        free = {**TTFTS, Condition.STATED: TTFTS[Condition.NO_LIMIT]}
        assert judged(free)["added_ttft_profile_over_stated"] is None
        assert text_of(free).count("not measured") == 2

    def test_the_bound_is_of_the_honest_engine_that_is_worst_in_its_round(self) -> None:
        """A mean over the honest would hide the one that pays."""
        found = judged(TTFTS)
        assert found["honest_ttft_over_equal"] == spread_of((1.1 + 1.3) / 2, 1.1, 1.3)
        assert found["is_bound_kept"]
        assert "at most 1.25  1.20 (1.10 to 1.30)  met" in text_of(TTFTS)
        worse = {**TTFTS, Condition.LIAR: ((1.2, 3.9, 4.0), (1.1, 3.9, 4.0))}
        assert not judged(worse)["is_bound_kept"]
        assert "missed" in text_of(worse)

    def test_the_liar_is_compared_with_its_own_honest_self(self) -> None:
        assert judged(TTFTS)["liar_ttft_over_stated"] == pytest.approx(spread_of(0.95, 0.8, 1.1))

    def test_the_link_carries_a_share_of_what_would_hide_every_load(self) -> None:
        assert link_bytes_per_s([100, 300], [1.0, 2.0]) == 125.0

    def test_one_lies_or_none_says_anything(self) -> None:
        assert factors(Condition.LIAR, 3) == [LIE, 1.0, 1.0]
        assert factors(Condition.PROFILE, 2) == [0.0, 0.0]
        assert factors(Condition.STATED, 2) == [1.0, 1.0]


def test_the_engines_load_all_and_store_nothing(tmp_path: Path) -> None:
    """If an engine stored part of its prompt, the next condition would find a longer prefix."""
    transfer = transfer_config(Way.STATED, settings(), "http://127.0.0.1:1", tmp_path)
    assert transfer is not None
    options = VllmOptions.of(cast("Mapping[str, object]", transfer["kv_connector_extra_config"]))
    assert (options.store, options.load.value, options.delivery.value) == (False, "all", "layer-major")
    assert transfer["kv_connector_module_path"] == "bench.experiments.engine.connectors"


class Played:
    """Engines that answer at once, by the rules that hold when they are asked."""

    def __init__(self, bed: PlayedBed, index: int) -> None:
        self.bed, self.index = bed, index
        self.answers: list[Answer] = []

    def tell(self, line: str) -> None:
        command = from_line(Command, line)
        assert command.case is not None
        self.bed.asked.append((self.index, command, self.bed.policy))
        self.answers.append(
            Answer(
                ttft_s=1.0 + self.index,
                cached_tokens=command.case.prefix_tokens,
                tokens=self.bed.tokens,
                counters={"loaded_tokens": float(command.case.prefix_tokens)},
                layer_compute_us=self.bed.layer_compute_us,
                costs=COSTS,
            )
        )

    def answer(self, timeout_s: float) -> str:
        assert timeout_s > 0
        return to_line(self.answers.pop(0))


class PlayedBed(Bed):
    """Takes the place of the running bed, its server and the server's rules."""

    tokens = TOKENS
    layer_compute_us = 700

    def __init__(self, given: EngineSettings) -> None:
        super().__init__(given, Path("nowhere"), cast("LocalServer", self), ExitStack())
        self.policy = "slack"
        self.asked: list[tuple[int, Command, str]] = []
        self.stored: list[int] = []

    def __enter__(self) -> PlayedBed:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def client(self, _: Transport) -> PlayedBed:
        return self

    def store(self, way: Way, round_index: int) -> None:
        assert way is Way.LAYERWISE
        self.stored.append(round_index)

    def measure(self, way: Way, _: Case, __: int) -> Answer:
        assert way is Way.RECOMPUTE
        return Answer(tokens=TOKENS)


@pytest.fixture
def beds(monkeypatch: pytest.MonkeyPatch) -> list[PlayedBed]:
    """Every bed that is made."""
    made: list[PlayedBed] = []

    def running(given: EngineSettings) -> PlayedBed:
        made.append(PlayedBed(given))
        return made[-1]

    def go_by(served: PlayedBed, other_tables: str, rules: Any) -> None:
        Config.model_validate(tomllib.loads(other_tables + rules.table()))
        served.policy = f"{rules.variant.name} {rules.link_bytes_per_s:.3g}"

    def start(bed: PlayedBed, count: int) -> Mapping[str, Played]:
        return {f"engine {index}": Played(bed, index) for index in range(count)}

    monkeypatch.setattr(paced, "running_bed", running)
    monkeypatch.setattr(paced, "ConfiguredServer", lambda server, *_: server)
    monkeypatch.setattr(paced, "go_by", go_by)
    monkeypatch.setattr(paced, "_start", start)
    return made


class TestMeasuring:
    def test_every_condition_is_asked_in_every_round_with_its_rules(self, beds: list[PlayedBed]) -> None:
        given = settings("--contexts 4K --runs 2")
        found = measure_stated(given, (2,))
        assert [shared["problem"] for shared in found] == [None]
        assert found[0]["cases"] == ["4K, 0.875", "4K, 0.5"]
        assert beds[0].stored == [0, 1, 2]
        rate = f"{found[0]['link_bytes_per_s']:.3g}"
        seen = [(policy, command.stated) for index, command, policy in beds[0].asked if index == 0]
        counted = [
            ("slack 1e+12", 1.0),
            (f"equal/work-conserving {rate}", 1.0),
            (f"slack {rate}", 0.0),
            (f"slack {rate}", 1.0),
            (f"slack {rate}", LIE),
        ]
        assert sorted(seen[3:]) == sorted(2 * counted)
        assert all(len(rounds) == 2 for rounds in found[0]["ttfts_s"].values())

    def test_other_tokens_are_the_runs_problem_and_end_it(
        self, beds: list[PlayedBed], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(PlayedBed, "tokens", (1, 2, 3, 4))
        found = measure_stated(settings("--contexts 4K --runs 1"), (2, 4))
        assert len(found) == len(beds) == 1
        assert "tokens [1, 2, 3, 4]" in str(found[0]["problem"])

    def test_engines_that_never_learn_their_costs_are_an_error(
        self, beds: list[PlayedBed], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They would state nothing, and the bench would compare the profile with itself."""
        monkeypatch.setattr(PlayedBed, "layer_compute_us", 0)
        with pytest.raises(BaselineError, match="what its steps cost"):
            measure_stated(settings("--contexts 4K --runs 1"), (2,))
        assert len(beds[0].asked) == 2 * paced.WARM_UPS_MAX
