"""`bench engine` counts only runs whose tokens are right and whose prefix was loaded, and compares within rounds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from bench.arguments import number
from bench.child import BaselineError
from bench.engine import advised, lmcache_server, run
from bench.engine import command as engine_command
from bench.engine.advised import Advised, Link, advised_json, advised_lines, measure_advised
from bench.engine.bed import Bed, last_words
from bench.engine.cases import BLOCK_TOKENS, Case, Prompts, make_cases
from bench.engine.command import add_engine, settings_of
from bench.engine.lmcache_server import LmcacheServer
from bench.engine.model import shape_from_text, shape_to_text
from bench.engine.report import tables, to_json
from bench.engine.results import Cell, best_of_ours, find, insensitive, loading, ratio, targets, wrong
from bench.engine.run import Engines, measure_engines
from bench.engine.settings import EngineSettings
from bench.engine.shapes import Dtype, Shape
from bench.engine.ways import NOTES, Place, Way, grain_tokens, transfer_config
from bench.engine.work import (
    Answer,
    Command,
    EngineWork,
    Ready,
    Verb,
    engine_options,
    kv_tokens,
)
from bench.samples import Spread
from nixl_client.connectors.vllm.options import LoadPolicy, Options
from nixl_client.transport import Transport

CASE = Case(16384, 0.875)
HALF = Case(16384, 0.5)
TOKENS = (5, 6, 7, 8)
SHAPE = Shape()


def settings(text: str = "") -> EngineSettings:
    """As the command line gives them."""
    parser = argparse.ArgumentParser()
    add_engine(parser.add_subparsers())
    return settings_of(parser.parse_args(["engine", *text.split()]))


def place(tmp_path: Path) -> Place:
    """Where everything would be."""
    return Place("http://127.0.0.1:1", "b", tmp_path, Transport.SHM, 64, (1024, 14336), 1 << 29, 15555)


def answer(ttft_s: float, **counters: float) -> Answer:
    """A right one of the longest prefix."""
    loaded = {"loaded_tokens": 14336.0, "lookup_s": 0.01, "load_wait_s": 0.02, "load_copy_s": 0.03}
    return Answer(ttft_s=ttft_s, cached_tokens=14336, tokens=TOKENS, counters={**loaded, **counters})


def cell(way: Way, *ttfts_s: float, case: Case = CASE) -> Cell:
    """One of which only the TTFTs matter."""
    return Cell(case, way, tuple(answer(ttft_s) for ttft_s in ttfts_s))


CELLS = [
    cell(Way.RECOMPUTE, 20.0, 22.0, 30.0),
    cell(Way.OWN_BLOCKS, 3.0, 3.0, 3.5),
    cell(Way.LAYERWISE, 4.0, 4.0, 4.0),
    cell(Way.CHUNKWISE, 3.5, 5.0, 5.0),
    cell(Way.EXAMPLE_TOLD, 4.4, 3.6, 4.0),
]


class TestCases:
    def test_a_prefix_of_part_of_a_block_is_refused(self) -> None:
        """vLLM counts hits in whole blocks: the rate that was asked for would not be the one that is measured."""
        with pytest.raises(ValueError, match="whole blocks"):
            make_cases((2048, 1056), (0.875,))
        with pytest.raises(ValueError, match="whole blocks"):
            Case(1024, 1.0)

    def test_a_prompt_begins_with_what_its_round_stores_and_ends_alike_in_all_rounds(self) -> None:
        """That outputs differ between rounds shows, then, that they hang on the prefix."""
        prompts = Prompts(1, 1024)
        case = Case(256, 0.5)
        one, other = (prompts.prompt(case, index) for index in (1, 2))
        assert len(one) == 256
        assert one[:128] == prompts.base(1, 1000)[:128] == prompts.storing(1, 128)[:128]
        assert one[:128] != other[:128]
        assert one[128:] == other[128:]
        assert prompts.prompt(case, 1) == one
        assert Prompts(2, 1024).prompt(case, 1) != one

    def test_the_base_is_never_gone_on_with_as_it_was_stored(self) -> None:
        """A hit of more than the prefix would be measured in its place."""
        prompts = Prompts(1, 1024)
        for case in make_cases((512, 1024), (0.5, 0.875)):
            prompt, base = prompts.prompt(case, 1), prompts.base(1, 1024)
            shared = next(index for index, token in enumerate(prompt) if token != base[index])
            assert shared // BLOCK_TOKENS == case.prefix_tokens // BLOCK_TOKENS


class TestShape:
    def test_bytes_of_a_token(self) -> None:
        assert SHAPE.token_bytes == 4 * 2 * 4 * 64 * 4
        assert replace(SHAPE, dtype=Dtype.BFLOAT16).token_bytes == SHAPE.token_bytes // 2
        assert CASE.prefix_tokens * SHAPE.token_bytes == 112 << 20

    def test_heads_must_share_keys_evenly(self) -> None:
        with pytest.raises(ValueError, match="evenly"):
            Shape(heads=6, kv_heads=4)

    def test_it_travels_as_text(self) -> None:
        shape = Shape(dtype=Dtype.BFLOAT16, hidden=64)
        assert shape_from_text(shape_to_text(shape)) == shape


class TestWork:
    def test_values_travel_as_json(self) -> None:
        work = EngineWork(Way.EXAMPLE, "m", {"a": [1]}, {"k": "v"}, Prompts(1, 2), 64)
        assert EngineWork.from_json(work.to_json()) == work
        for command in (Command(Verb.STORE, 3, tokens=64), Command(Verb.MEASURE, 1, case=CASE)):
            assert Command.from_line(command.to_line()) == command
        assert Answer.from_line(answer(1.0).to_line()) == answer(1.0)
        ready = Ready(1.0, "0.32", "2.13", 2)
        assert Ready.from_line(ready.to_line()) == ready

    def test_engines_differ_in_their_own_prefix_cache_alone(self) -> None:
        """Every other difference would be measured as one of the connectors."""
        options = {way: engine_options(SHAPE, 16384, way) for way in Way}
        own = options.pop(Way.OWN_BLOCKS)
        assert len({json.dumps(each) for each in options.values()}) == 1
        differing = {name for name, value in own.items() if value != options[Way.RECOMPUTE][name]}
        assert differing == {"enable_prefix_caching", "num_gpu_blocks_override"}

    def test_a_prompt_is_one_step_and_fits_the_blocks(self) -> None:
        """The ExampleConnector stores what the first step computes."""
        options = engine_options(SHAPE, 16384, Way.EXAMPLE_TOLD)
        assert options["max_num_batched_tokens"] == options["max_model_len"]
        assert kv_tokens(16384, Way.EXAMPLE_TOLD) > 16384 + 4

    def test_own_blocks_hold_a_round(self) -> None:
        cases = settings().cases
        held = max(case.prefix_tokens for case in cases) + sum(case.suffix_tokens + BLOCK_TOKENS for case in cases)
        assert kv_tokens(max(case.context_tokens for case in cases), Way.OWN_BLOCKS) > held


class TestWays:
    def test_our_connector_takes_the_options(self, tmp_path: Path) -> None:
        """A name it does not know would stop the engine."""
        deliveries = []
        for way in (Way.LAYERWISE, Way.CHUNKWISE):
            transfer = transfer_config(way, place(tmp_path))
            assert transfer is not None
            extra = transfer["kv_connector_extra_config"]
            assert isinstance(extra, dict)
            options = Options.of(extra)
            assert options.staging_bytes >= 1 << 29
            assert options.chunk_tokens == 64
            assert options.load is LoadPolicy.ALL
            deliveries.append(options.delivery.value)
        assert deliveries == ["layer-major", "chunk-major"]

    def test_what_is_advised_is_the_connector_as_it_comes(self, tmp_path: Path) -> None:
        transfer = transfer_config(Way.ADVISED, place(tmp_path))
        assert transfer is not None
        extra = transfer["kv_connector_extra_config"]
        assert isinstance(extra, dict)
        assert Options.of(extra).load is LoadPolicy.ADVISED

    def test_only_ways_that_load_have_a_connector(self, tmp_path: Path) -> None:
        without = [way for way in Way if transfer_config(way, place(tmp_path)) is None]
        assert without == [Way.RECOMPUTE, Way.OWN_BLOCKS]
        assert set(NOTES) == set(Way)

    def test_hits_are_whole_chunks(self) -> None:
        assert [grain_tokens(way, 64) for way in (Way.RECOMPUTE, Way.CHUNKWISE, Way.EXAMPLE_TOLD, Way.LMCACHE_S3)] == [
            1,
            64,
            1,
            256,
        ]


class TestRightness:
    def test_another_token_than_recomputed_fails(self) -> None:
        problem = wrong(Way.EXAMPLE_TOLD, CASE, answer(1.0), (5, 6, 7, 9), 1)
        assert problem is not None
        assert "recomputed [5, 6, 7, 9]" in problem

    def test_a_prefix_that_was_computed_fails(self) -> None:
        """The time of a miss must not pass for one of a load."""
        problem = wrong(Way.EXAMPLE_TOLD, CASE, replace(answer(1.0), cached_tokens=0), TOKENS, 1)
        assert problem is not None
        assert "14336 expected" in problem

    @pytest.mark.parametrize("way", [Way.RECOMPUTE, Way.EXAMPLE])
    def test_what_recomputes_must_load_nothing(self, way: Way) -> None:
        assert wrong(way, CASE, replace(answer(1.0), cached_tokens=0), TOKENS, 1) is None
        assert wrong(way, CASE, answer(1.0), TOKENS, 1) is not None

    @pytest.mark.parametrize("counters", [{"loaded_tokens": 14304.0}, {"load_failures": 1.0}])
    def test_our_connector_must_have_counted_the_load(self, counters: dict[str, float]) -> None:
        """What vLLM was offered may have failed to come and been computed after all."""
        assert wrong(Way.LAYERWISE, CASE, answer(1.0), TOKENS, 32) is None
        assert wrong(Way.LAYERWISE, CASE, answer(1.0, **counters), TOKENS, 32) is not None

    @pytest.mark.parametrize("cached_tokens", [0, 96, 14336])
    def test_the_advised_engine_may_load_any_part_but_not_more_than_is_stored(self, cached_tokens: int) -> None:
        assert wrong(Way.ADVISED, CASE, replace(answer(1.0), cached_tokens=cached_tokens), TOKENS, 32) is None
        assert wrong(Way.ADVISED, CASE, replace(answer(1.0), cached_tokens=15000), TOKENS, 32) is not None
        assert wrong(Way.ADVISED, CASE, answer(1.0), (1, 2, 3, 4), 32) is not None

    def test_a_prefix_is_stored_as_far_as_chunks_are_whole(self) -> None:
        odd = Case(1024, 0.875)
        assert wrong(Way.LMCACHE_CPU, odd, Answer(1.0, cached_tokens=768, tokens=TOKENS), TOKENS, 256) is None

    def test_tokens_that_no_prefix_changes_fail(self) -> None:
        """With them a wrong prefix would pass for a right one."""
        assert insensitive({CASE: [(1, 2), (1, 3)], HALF: [(1, 2)]}) is None
        problem = insensitive({CASE: [(1, 2), (1, 3)], HALF: [(1, 2), (1, 2)]})
        assert problem is not None
        assert problem.startswith("16K, 0.5")


class TestResults:
    def test_ratios_are_within_a_round(self) -> None:
        """Rounds may differ in speed as a whole."""
        assert ratio(CELLS[0], CELLS[3]) == Spread(20.0 / 3.5, 22 / 5, 6.0)

    def test_ratios_of_other_rounds_are_refused(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            ratio(cell(Way.RECOMPUTE, 1.0), cell(Way.LAYERWISE, 1.0, 2.0))

    def test_loading_is_what_is_added_to_own_blocks(self) -> None:
        found = loading(CELLS[2], CELLS[1], SHAPE.token_bytes)
        assert found.added_s == Spread(1.0, 0.5, 1.0)
        assert (found.nbytes, found.rate_bytes_per_s) == (112 << 20, 112 << 20)

    def test_nothing_added_has_no_rate(self) -> None:
        assert loading(cell(Way.EXAMPLE_TOLD, 3.0), cell(Way.OWN_BLOCKS, 3.0), 1).rate_bytes_per_s is None

    def test_the_lower_median_stands_for_ours(self) -> None:
        best = best_of_ours(CELLS, CASE)
        assert best is not None
        assert best.way is Way.LAYERWISE
        assert best_of_ours(CELLS, HALF) is None
        assert find(CELLS, HALF, Way.RECOMPUTE) is None

    def test_targets_take_the_worst_length_at_the_high_hit_rate(self) -> None:
        short = Case(2048, 0.875)
        cells = [
            *CELLS,
            cell(Way.RECOMPUTE, 3.0, 3.0, 3.0, case=short),
            cell(Way.LAYERWISE, 1.0, 1.0, 1.0, case=short),
            cell(Way.RECOMPUTE, 1.0, 1.0, 1.0, case=HALF),
            cell(Way.LAYERWISE, 1.0, 1.0, 1.0, case=HALF),
        ]
        recompute, _, example, s3 = targets(cells, {Way.LMCACHE_S3: "not installed"})
        assert (recompute.case, recompute.is_met, example.case, example.is_met) == (short, False, CASE, False)
        assert example.value == Spread(1.0, 0.9, 1.1)
        assert (s3.is_met, s3.reason) == (None, "not installed")

    def test_the_limit_is_enough_of_recomputing_and_not_of_peers(self) -> None:
        cells = [cell(Way.RECOMPUTE, 4.0), cell(Way.LAYERWISE, 1.0), cell(Way.EXAMPLE_TOLD, 1.0)]
        assert [target.is_met for target in targets(cells, {})] == [True, None, False, None]


class TestAdvised:
    def link(self, factor: float, load_s: float, advised_s: float, problem: str | None = None) -> Link:
        """Recomputing takes 10 s."""
        cells = (
            cell(Way.RECOMPUTE, 10.0, 10.0),
            cell(Way.LAYERWISE, load_s, load_s),
            cell(Way.ADVISED, advised_s, 9.0),
        )
        return Link(factor, factor * 1e6, cells, problem)

    def test_advised_is_compared_with_the_better_of_both(self) -> None:
        assert self.link(4, 2.0, 2.1).advised_over_best(CASE) == Spread((2.1 / 2 + 9 / 2) / 2, 2.1 / 2, 9 / 2)
        found = self.link(0.25, 40.0, 10.5).advised_over_best(CASE)
        assert found is not None
        assert found.max == pytest.approx(1.05)

    def test_it_is_met_where_it_is_at_every_rate(self) -> None:
        good, bad = self.link(0.25, 40.0, 10.5), self.link(4, 2.0, 2.1)
        assert Advised(CASE, 1e6, (good, good)).is_met
        assert not Advised(CASE, 1e6, (good, bad)).is_met
        nothing = Link(1, 1e6, (), "no engine")
        found = Advised(CASE, 1e6, (good, nothing))
        assert (found.is_met, found.problem) == (False, "no engine")
        assert "MISSED" in "\n".join(advised_lines(Advised(CASE, 1e6, (good, bad))))
        assert json.loads(json.dumps(advised_json(found)))["links"][1]["advised_over_best"] is None

    def test_links_are_paced_to_factors_of_the_break_even(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """14,336 tokens that take 17 seconds to compute."""
        asked: list[tuple[tuple[Way, ...], str]] = []

        def measured(given: EngineSettings) -> Engines:
            config = given.serve_options[-1] if given.serve_options else ""
            asked.append((given.ways, Path(config).read_text() if config else ""))
            return Engines([one for one in CELLS if one.way in given.ways])

        monkeypatch.setattr(advised, "measure_engines", measured)
        found = measure_advised(settings("--lengths 16K --hits 87.5"), (2.0,))
        assert found.break_even_bytes_per_s == pytest.approx(14336 * SHAPE.token_bytes / 19.0)
        assert asked[0] == ((Way.RECOMPUTE, Way.OWN_BLOCKS), "")
        assert asked[1][0] == (Way.RECOMPUTE, Way.LAYERWISE, Way.ADVISED)
        assert f"link_bytes_per_s = {2 * found.break_even_bytes_per_s}" in asked[1][1]


class TestReport:
    def found(self, problem: str | None = None) -> Engines:
        """One of five ways, and one that could not run."""
        return Engines(
            cells=CELLS,
            ready={Way.RECOMPUTE: Ready(4.0, "0.32.0", "2.13.0", 2)},
            missing={Way.LMCACHE_S3: "No module named 'lmcache'"},
            outputs={CASE: [TOKENS, (1, 2, 3, 4)]},
            problem=problem,
        )

    def test_every_way_has_a_line_and_what_was_not_run_its_reason(self) -> None:
        text = tables(settings(), self.found())
        assert "112 MiB of KV" in text
        assert "lmcache s3: not run: No module named 'lmcache'" in text
        assert "recompute over ObjectCache (objectcache layerwise), worst at 16K, 0.875: 5.50 (5.00 to 7.50)" in text
        assert "more than 1: MISSED" in text
        assert "FAILED" not in text

    def test_a_failure_is_said(self) -> None:
        assert "FAILED: other tokens" in tables(settings(), self.found("other tokens"))

    def test_json_has_the_raw_samples(self) -> None:
        found = json.loads(json.dumps(to_json(settings(), self.found(), {"commit": "c"})))
        assert found["not_run"] == {"lmcache_s3": "not run: No module named 'lmcache'"}
        layerwise = found["measurements"][2]
        assert layerwise["recompute_over_it"] == {"median": 5.5, "min": 5.0, "max": 7.5}
        assert layerwise["over_own_blocks"]["nbytes"] == 112 << 20
        assert [sample["ttft_s"] for sample in layerwise["samples"]] == [4.0, 4.0, 4.0]
        assert found["settings"]["shape"]["dtype"] == "float32"
        assert found["distinct_outputs"] == {CASE.title: 2}

    def test_a_chart_is_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        from bench.engine.plots import plot_engines

        plot_engines([*CELLS, cell(Way.RECOMPUTE, 1.0, case=HALF)], tmp_path / "a.png")
        assert (tmp_path / "a.png").stat().st_size > 0


class TestCommandLine:
    def test_defaults_are_the_issues(self) -> None:
        found = settings()
        assert (found.contexts, found.hit_rates) == ((2048, 4096, 8192, 16384), (0.5, 0.875))
        assert found.ways == tuple(way for way in Way if way is not Way.ADVISED)
        assert found.prefixes[-1] == 14336

    def test_smoke_is_small_and_options_win_over_it(self) -> None:
        found = settings("--smoke --runs 3 --layers 3")
        assert found.ways == (Way.RECOMPUTE, Way.LAYERWISE)
        assert (found.contexts, found.runs, found.shape.num_layers, found.shape.hidden) == ((1024,), 3, 3, 256)

    def test_recomputing_is_always_measured(self) -> None:
        """Its tokens are what all others' are compared with."""
        assert settings("--ways lmcache_s3,objectcache_chunkwise").ways == (
            Way.RECOMPUTE,
            Way.CHUNKWISE,
            Way.LMCACHE_S3,
        )

    def test_chunks_that_do_not_fit_blocks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="multiple"):
            settings("-G 48")

    @pytest.mark.parametrize(
        "text", ["--ways a", "--ways recompute,recompute", "--lengths 4K,2K", "--hits 0", "--hits x"]
    )
    def test_nonsense_is_refused(self, text: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            settings(text)
        assert "must" in capsys.readouterr().err

    def test_without_vllm_it_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("OBJECTCACHE_ENGINES_PYTHON", str(tmp_path / "none"))
        parser = argparse.ArgumentParser()
        add_engine(parser.add_subparsers())
        options = parser.parse_args(["engine", "--smoke"])
        assert options.command(options) == 2
        assert "bench.kv_peers.install engines" in capsys.readouterr().err

    def test_lengths_have_units(self) -> None:
        assert settings("--lengths 1K,1536").contexts == (1024, 1536)
        assert number(1, 10)("3") == 3
        assert engine_command.CONTEXTS[0] == 2048


class FakeEngine:
    """A process that answers with what it was given."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self.told: list[Command] = []
        self.is_closed = False

    def tell(self, line: str) -> None:
        """One command."""
        self.told.append(Command.from_line(line))

    def answer(self, timeout_s: float) -> str:
        """The next answer."""
        if not self.answers:
            raise BaselineError("ended early")
        return self.answers.pop(0).to_line()

    def close(self) -> None:
        """No more."""
        self.is_closed = True


class TestBed:
    def bed(self, way: Way, engine: FakeEngine, tmp_path: Path) -> Bed:
        """One engine that is played."""
        return Bed(settings(), tmp_path, engines={way: engine})  # type: ignore[dict-item]

    def test_a_base_is_stored_once_and_by_the_example_connector_for_each_prefix(self, tmp_path: Path) -> None:
        """That one finds whole files only."""
        for way, wanted in (
            (Way.LAYERWISE, [14336]),
            (Way.EXAMPLE_TOLD, list(settings().prefixes)),
            (Way.RECOMPUTE, []),
        ):
            engine = FakeEngine([Answer()] * 8)
            self.bed(way, engine, tmp_path).store(way, 1)
            assert [command.tokens for command in engine.told] == wanted

    def test_what_an_engine_could_not_do_is_named(self, tmp_path: Path) -> None:
        engine = FakeEngine([Answer(problem="RuntimeError: no")])
        bed = self.bed(Way.EXAMPLE_TOLD, engine, tmp_path)
        with pytest.raises(BaselineError, match="example connector told: RuntimeError: no"):
            bed.measure(Way.EXAMPLE_TOLD, CASE, 1)
        bed.drop(Way.EXAMPLE_TOLD, "no")
        assert engine.is_closed
        assert (bed.engines, bed.missing) == ({}, {Way.EXAMPLE_TOLD: "no"})

    def test_an_engine_that_is_gone_leaves_its_last_words(self, tmp_path: Path) -> None:
        """What it said is in a folder that goes with the bed."""
        bed = self.bed(Way.EXAMPLE, FakeEngine([]), tmp_path)
        bed.log(Way.EXAMPLE).write_text("out of memory")
        with pytest.raises(BaselineError, match="example connector: ended early; out of memory"):
            bed.measure(Way.EXAMPLE, CASE, 1)

    def test_the_last_words_of_a_log(self, tmp_path: Path) -> None:
        (tmp_path / "a.log").write_text("one\ntwo \n\n")
        assert last_words(tmp_path / "a.log") == "two"
        assert last_words(tmp_path / "b.log") == ""


class PlayedBed:
    """Every way answers rightly, but for those in `answers`."""

    def __init__(self, ways: Sequence[Way], answers: Mapping[Way, Answer]) -> None:
        self.settings = settings("--smoke")
        self.engines: dict[Way, None] = dict.fromkeys(ways)
        self.ready: dict[Way, Ready] = {}
        self.missing: dict[Way, str] = {}
        self.asked: list[tuple[int, Way]] = []
        self._answers = answers

    def store(self, way: Way, round_index: int) -> None:
        """Stored."""

    def measure(self, way: Way, case: Case, round_index: int) -> Answer:
        """Tokens that hang on the round, and the prefix loaded."""
        self.asked.append((round_index, way))
        given = self._answers.get(way)
        if given is not None and given.problem is not None:
            raise BaselineError(given.problem)
        cached = 0 if way is Way.RECOMPUTE else case.prefix_tokens
        right = Answer(1.0, cached_tokens=cached, tokens=(round_index,), counters={"loaded_tokens": cached})
        return given or right

    def end_round(self) -> None:
        """Over."""

    def drop(self, way: Way, reason: str) -> None:
        """As the real one."""
        del self.engines[way]
        self.missing[way] = reason


class TestRun:
    def measure(
        self, monkeypatch: pytest.MonkeyPatch, answers: Mapping[Way, Answer], runs: int = 2
    ) -> tuple[Engines, PlayedBed]:
        """Over a played bed of four ways."""
        bed = PlayedBed((Way.RECOMPUTE, Way.LAYERWISE, Way.CHUNKWISE, Way.EXAMPLE_TOLD), answers)
        monkeypatch.setattr(run, "running_bed", lambda _: nullcontext(bed))
        ways = ",".join(way.value for way in bed.engines)
        return measure_engines(settings(f"--smoke --runs {runs} --ways {ways}")), bed

    def test_ways_take_turns_after_recomputing_and_the_first_round_does_not_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found, bed = self.measure(monkeypatch, {})
        assert found.problem is None
        assert [(cell.way, len(cell.answers)) for cell in found.cells] == [(way, 2) for way in bed.engines]
        assert [way for _, way in bed.asked[::4]] == [Way.RECOMPUTE] * 3
        assert len({tuple(way for at, way in bed.asked if at == index) for index in range(3)}) == 3

    def test_a_wrong_token_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times beside wrong tokens are worth nothing."""
        found, bed = self.measure(monkeypatch, {Way.EXAMPLE_TOLD: Answer(1.0, cached_tokens=896, tokens=(99,))})
        assert found.problem is not None
        assert "tokens [99]" in found.problem
        assert {index for index, _ in bed.asked} == {0}

    def test_a_peer_that_fails_is_left_out_and_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found, _ = self.measure(monkeypatch, {Way.EXAMPLE_TOLD: Answer(problem="out of memory")})
        assert found.missing == {Way.EXAMPLE_TOLD: "out of memory"}
        assert {cell.way for cell in found.cells} == {Way.RECOMPUTE, Way.LAYERWISE, Way.CHUNKWISE}

    def test_ours_that_fails_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BaselineError, match="gone"):
            self.measure(monkeypatch, {Way.LAYERWISE: Answer(problem="gone")})


class TestLmcacheServer:
    def status(self, objects: int = 0, pending: int = 0) -> dict[str, object]:
        """As the server tells it, as far as it is read."""
        manager = {"total_object_count": objects, "write_locked_count": 0, "staging_object_count": 0}
        controller = {"pending_keys_count": pending, "in_flight_task_count": 0}
        return {
            "storage_manager": {
                "l1_managers": {"_default": manager},
                "store_controllers": {"_default": controller},
                "prefetch_controller": {"in_flight_request_count": 0},
            }
        }

    def play(self, monkeypatch: pytest.MonkeyPatch, *statuses: dict[str, object]) -> list[str]:
        """The server says these, one after the other; what it is asked."""
        left, asked = list(statuses), []

        def call(self: LmcacheServer, method: str, path: str) -> dict[str, object]:
            asked.append(f"{method} {path}")
            return left.pop(0) if path == "/status" else {}

        monkeypatch.setattr(LmcacheServer, "_call", call)
        monkeypatch.setattr(lmcache_server, "POLL_S", 0.0)
        return asked

    def test_it_is_quiet_when_nothing_is_under_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A store that goes on would be measured with the next request."""
        asked = self.play(monkeypatch, self.status(pending=2), self.status())
        LmcacheServer(1, 2).await_quiet()
        assert asked == ["GET /status"] * 2

    def test_its_memory_is_empty_before_a_load_from_s3(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Chunks a fetch still holds are not dropped at the first call."""
        asked = self.play(monkeypatch, self.status(objects=3), self.status())
        LmcacheServer(1, 2).forget()
        assert asked == ["POST /cache/clear", "GET /status"] * 2

    def test_it_does_not_wait_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.play(monkeypatch, self.status(objects=3, pending=2), self.status(objects=3))
        monkeypatch.setattr(lmcache_server, "QUIET_TIMEOUT_S", -1.0)
        with pytest.raises(BaselineError, match="2 chunks to store"):
            LmcacheServer(1, 2).await_quiet()
        with pytest.raises(BaselineError, match="keeps 3 chunks"):
            LmcacheServer(1, 2).forget()
