"""`bench engine` counts only runs whose tokens are right and whose prefix was loaded, and compares within rounds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.beds.processes import BaselineError, last_words
from bench.core.lines import from_line, to_line
from bench.core.options import filled, number
from bench.core.show import as_text
from bench.experiments.engine import bed as engine_bed
from bench.experiments.engine import measure, paced
from bench.experiments.engine.bed import Bed, LmcacheServer
from bench.experiments.engine.measure import (
    best_of,
    figures,
    insensitive,
    loading,
    measure_engines,
    ratio,
    rows,
    targets,
    wrong,
)
from bench.experiments.engine.paced import is_met, link_row, measure_advised
from bench.experiments.engine.run import ENGINE, plot, result_of, settings_of, show
from bench.experiments.engine.ways import (
    BLOCK_TOKENS,
    NOTES,
    TIERS,
    Answer,
    Case,
    Command,
    Dtype,
    EngineSettings,
    EngineWork,
    Prompts,
    Shape,
    Way,
    engine_options,
    transfer_config,
)
from nixl_client.connectors.vllm.options import LoadPolicy, VllmOptions
from objectcache.calibration.servers import LocalServer

CASE = Case(16384, 0.875)
HALF = Case(16384, 0.5)
TOKENS = (5, 6, 7, 8)
SHAPE = Shape()


def settings(text: str = "") -> EngineSettings:
    """As the command line gives them."""
    parser = argparse.ArgumentParser()
    ENGINE.add(parser.add_subparsers())
    return settings_of(filled(EngineSettings, parser.parse_args(["engine", *text.split()])))


def transfer(way: Way, tmp_path: Path) -> Any:
    """As an engine of that way is told it."""
    return transfer_config(way, settings("-G 64"), "http://127.0.0.1:1", tmp_path, 15555)


def answer(ttft_s: float, **counters: float) -> Answer:
    """A right one of the longest prefix."""
    loaded = {"loaded_tokens": 14336.0, "lookup_s": 0.01, "load_wait_s": 0.02, "load_copy_s": 0.03}
    return Answer(ttft_s=ttft_s, cached_tokens=14336, tokens=TOKENS, counters={**loaded, **counters})


def taking(*ttfts_s: float) -> list[Answer]:
    """Rounds of which only the TTFTs matter."""
    return [answer(ttft_s) for ttft_s in ttfts_s]


def row_of(*ttfts_s: float) -> Any:
    """The same as a row of the result."""
    return rows({(CASE, Way.LAYERWISE): taking(*ttfts_s)}, SHAPE.token_bytes)[0]


def spread_of(median: float, least: float, greatest: float) -> dict[str, float]:
    """As it is published."""
    return {"median": median, "min": least, "max": greatest}


ANSWERS = {
    (CASE, Way.RECOMPUTE): taking(20.0, 22.0, 30.0),
    (CASE, Way.OWN_BLOCKS): taking(3.0, 3.0, 3.5),
    (CASE, Way.LAYERWISE): taking(4.0, 4.0, 4.0),
    (CASE, Way.CHUNKWISE): taking(3.5, 5.0, 5.0),
    (CASE, Way.EXAMPLE_TOLD): taking(4.4, 3.6, 4.0),
}


class TestCases:
    def test_a_prefix_of_part_of_a_block_is_refused(self) -> None:
        """vLLM counts hits in whole blocks: the rate that was asked for would not be the one that is measured."""
        with pytest.raises(ValueError, match="whole blocks"):
            Case(1056, 0.875)
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
        for case in (Case(tokens, rate) for tokens in (512, 1024) for rate in (0.5, 0.875)):
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
        assert from_line(Shape, to_line(shape)) == shape


class TestWork:
    def test_values_travel_as_json(self) -> None:
        work = EngineWork(Way.EXAMPLE, {"a": [1], "k": None}, Prompts(1, 2), 64, 4096)
        commands = (Command(3, tokens=64), Command(1, case=CASE))
        for each in (work, *commands, answer(1.0)):
            assert from_line(type(each), to_line(each)) == each

    def test_engines_differ_in_their_own_prefix_cache_alone(self) -> None:
        """Every other difference would be measured as one of the connectors."""
        options = {way: engine_options(settings(), way) for way in Way}
        own = options.pop(Way.OWN_BLOCKS)
        assert len({json.dumps(each) for each in options.values()}) == 1
        differing = {name for name, value in own.items() if value != options[Way.RECOMPUTE][name]}
        assert differing == {"enable_prefix_caching", "num_gpu_blocks_override"}

    def test_a_prompt_is_one_step_and_fits_the_blocks(self) -> None:
        """The ExampleConnector stores what the first step computes."""
        options = engine_options(settings(), Way.EXAMPLE_TOLD)
        assert options["max_num_batched_tokens"] == options["max_model_len"]
        assert settings().kv_tokens(Way.EXAMPLE_TOLD) > 16384 + 4

    def test_own_blocks_hold_a_round(self) -> None:
        cases = settings().cases
        suffixes = sum(case.context_tokens - case.prefix_tokens + BLOCK_TOKENS for case in cases)
        assert settings().kv_tokens(Way.OWN_BLOCKS) > max(case.prefix_tokens for case in cases) + suffixes


class TestWays:
    def test_our_connector_takes_the_options(self, tmp_path: Path) -> None:
        """A name it does not know would stop the engine."""
        deliveries = []
        for way in (Way.LAYERWISE, Way.CHUNKWISE):
            options = VllmOptions.of(transfer(way, tmp_path)["kv_connector_extra_config"])
            assert options.staging_bytes >= settings().payload_bytes
            assert options.chunk_tokens == 64
            assert options.load is LoadPolicy.ALL
            deliveries.append(options.delivery.value)
        assert deliveries == ["layer-major", "chunk-major"]

    def test_tiers_differ_in_the_tier_alone(self, tmp_path: Path) -> None:
        """The same host memory and the same copies; ours over shared memory, or what was asked for, and over http."""
        told = {way: transfer(way, tmp_path)["kv_connector_extra_config"] for way in TIERS}
        assert len({each["cpu_bytes_to_use"] for each in told.values()}) == 1
        assert (told[Way.TIER]["transport"], told[Way.TIER_HTTP]["transport"]) == ("auto", "http")
        assert [told[way]["secondary_tiers"][0]["type"] for way in (Way.FS_TIER, Way.OBJ_TIER)] == ["fs", "obj"]

    def test_what_is_advised_is_the_connector_as_it_comes(self, tmp_path: Path) -> None:
        extra = transfer(Way.ADVISED, tmp_path)["kv_connector_extra_config"]
        assert VllmOptions.of(extra).load is LoadPolicy.ADVISED

    def test_only_ways_that_load_have_a_connector(self, tmp_path: Path) -> None:
        assert [way for way in Way if transfer(way, tmp_path) is None] == [Way.RECOMPUTE, Way.OWN_BLOCKS]
        assert set(NOTES) == set(Way)

    def test_hits_are_whole_chunks(self) -> None:
        ways = (Way.RECOMPUTE, Way.CHUNKWISE, Way.EXAMPLE_TOLD, Way.LMCACHE_S3)
        assert [settings("-G 64").grain_tokens(way) for way in ways] == [1, 64, 1, 256]


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
        found = ratio(row_of(20.0, 22.0, 30.0), row_of(3.5, 5.0, 5.0))
        assert found == spread_of(20.0 / 3.5, 22 / 5, 6.0)

    def test_ratios_of_other_rounds_are_refused(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            ratio(row_of(1.0), row_of(1.0, 2.0))

    def test_loading_is_what_is_added_to_own_blocks(self) -> None:
        found = loading(row_of(4.0, 4.0, 4.0), row_of(3.0, 3.0, 3.5), SHAPE.token_bytes)
        assert found["added_s"] == spread_of(1.0, 0.5, 1.0)
        assert (found["nbytes"], found["rate_bytes_per_s"]) == (112 << 20, 112 << 20)

    def test_nothing_added_has_no_rate(self) -> None:
        assert loading(row_of(3.0), row_of(3.0), 1)["rate_bytes_per_s"] is None

    def test_the_lower_median_stands_for_ours(self) -> None:
        ways = {row["way"]: row for row in rows(ANSWERS, SHAPE.token_bytes)}
        assert best_of(ways) is ways["objectcache_layerwise"]
        assert best_of({}) is None

    def test_a_row_has_the_raw_samples(self) -> None:
        """What computes has nothing to load."""
        found = {row["way"]: row for row in rows(ANSWERS, SHAPE.token_bytes)}
        layerwise = found["objectcache_layerwise"]
        assert layerwise["recompute_over_it"] == spread_of(5.5, 5.0, 7.5)
        assert layerwise["over_own_blocks"]["nbytes"] == 112 << 20
        assert [sample["ttft_s"] for sample in layerwise["samples"]] == [4.0, 4.0, 4.0]
        assert [way for way, row in found.items() if row["over_own_blocks"] is None] == ["recompute", "own_blocks"]

    def test_targets_take_the_worst_length_at_the_high_hit_rate(self) -> None:
        short = Case(2048, 0.875)
        answers = {
            **ANSWERS,
            (short, Way.RECOMPUTE): taking(3.0, 3.0, 3.0),
            (short, Way.LAYERWISE): taking(1.0, 1.0, 1.0),
            (HALF, Way.RECOMPUTE): taking(1.0, 1.0, 1.0),
            (HALF, Way.LAYERWISE): taking(1.0, 1.0, 1.0),
        }
        recompute, _, example, s3 = targets(rows(answers, 1), {Way.LMCACHE_S3: "not installed"})
        assert (recompute["case"], recompute["is_met"]) == (short.title, False)
        assert (example["case"], example["is_met"], example["ours"]) == (CASE.title, False, "objectcache_layerwise")
        assert example["value"] == spread_of(1.0, 0.9, 1.1)
        assert (s3["is_met"], s3["reason"]) == (None, "not installed")

    def test_the_limit_is_enough_of_recomputing_and_not_of_peers(self) -> None:
        ttfts_s = {Way.RECOMPUTE: 4.0, Way.LAYERWISE: 1.0, Way.EXAMPLE_TOLD: 1.0}
        found = targets(rows({(CASE, way): taking(ttft_s) for way, ttft_s in ttfts_s.items()}, 1), {})
        assert [target["is_met"] for target in found] == [True, None, False, None]


class TestAdvised:
    def link(self, factor: float, load_s: float, advised_s: float) -> dict[str, Any]:
        """Recomputing takes 10 s."""
        answers = {
            (CASE, Way.RECOMPUTE): taking(10.0, 10.0),
            (CASE, Way.LAYERWISE): taking(load_s, load_s),
            (CASE, Way.ADVISED): taking(advised_s, 9.0),
        }
        return link_row(factor, factor * 1e6, rows(answers, 1))

    def test_advised_is_compared_with_the_better_of_both(self) -> None:
        over_loading = self.link(4, 2.0, 2.1)
        assert over_loading["advised_over_best"] == spread_of((2.1 / 2 + 9 / 2) / 2, 2.1 / 2, 9 / 2)
        over_computing = self.link(0.25, 40.0, 10.5)
        assert over_computing["advised_over_best"]["max"] == pytest.approx(1.05)
        assert (over_loading["best"], over_computing["best"]) == ("objectcache_layerwise", "recompute")

    def test_it_is_met_where_it_is_at_every_rate(self) -> None:
        good, bad, nothing = self.link(0.25, 40.0, 10.5), self.link(4, 2.0, 2.1), link_row(1, 1e6, [])
        assert is_met([good, good])
        assert not is_met([good, bad])
        assert not is_met([good, nothing])
        seen = {
            "case": CASE.title,
            "break_even_bytes_per_s": 1e6,
            "limit": 1.1,
            "is_met": False,
            "problem": "no engine",
        }
        found = result_of(settings(), {}, "no engine", advised={**seen, "links": [bad, nothing]})
        text = as_text(found, show(json.loads(json.dumps(found))))
        assert "Target: missed." in text
        assert "1.05" in text
        assert text.count("not measured") == 4
        assert text.endswith("FAILED: no engine")

    def test_links_are_paced_to_factors_of_the_break_even(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """14,336 tokens that take 17 seconds to compute."""
        asked: list[tuple[tuple[Way, ...], str]] = []

        def measured(given: EngineSettings) -> Any:
            config = given.serve_options[-1] if given.serve_options else ""
            asked.append((given.ways, Path(config).read_text() if config else ""))
            seen = {key: mine for key, mine in ANSWERS.items() if key[1] in given.ways}
            return {"measurements": rows(seen, 1), "problem": None, "not_run": {}}

        monkeypatch.setattr(paced, "measure_engines", measured)
        found = measure_advised(settings("--contexts 16K --hits 87.5"), (2.0,))
        assert found["break_even_bytes_per_s"] == pytest.approx(14336 * SHAPE.token_bytes / 19.0)
        assert asked[0] == ((Way.RECOMPUTE, Way.OWN_BLOCKS), "")
        assert asked[1][0] == (Way.RECOMPUTE, Way.LAYERWISE, Way.ADVISED)
        assert f"link_bytes_per_s = {2 * found['break_even_bytes_per_s']}" in asked[1][1]


class TestReport:
    def result(self, problem: str | None = None) -> Any:
        """One of five ways, and one that could not run, as it is read back."""
        bed = Bed(settings(), Path(), cast("LocalServer", None), ExitStack())
        bed.missing = {Way.LMCACHE_S3: "No module named 'lmcache'"}
        bed.ready = {Way.RECOMPUTE: {"started_s": 4.0, "vllm": "0.32.0", "torch": "2.13.0", "threads": 2}}
        found = figures(bed, ANSWERS, {CASE: [TOKENS, (1, 2, 3, 4)]})
        return json.loads(json.dumps(result_of(settings(), {"commit": "c"}, problem, **found)))

    def test_every_way_has_a_line_and_what_was_not_run_its_reason(self) -> None:
        text = as_text(self.result(), show(self.result()))
        assert "112 MiB of KV" in text
        assert "LMCache over S3 (our gateway): not run: No module named 'lmcache'" in text
        target = next(line for line in text.splitlines() if line.startswith("recompute over ObjectCache  "))
        assert target.split()[3:] == ["16K,", "0.875", "layerwise", "4", "5.50", "(5.00", "to", "7.50)", "met"]
        assert "missed" in text
        assert "not measured: No module named 'lmcache'" in text
        assert "recompute over ObjectCache: ours is ObjectCache layerwise" in text
        assert text.endswith("everything verified")

    def test_a_failure_is_said(self) -> None:
        result = self.result("other tokens")
        assert as_text(result, show(result)).endswith("FAILED: other tokens")

    def test_names_of_the_result_stay(self) -> None:
        """Whoever reads the JSON relies on them."""
        found = self.result()
        assert (found["benchmark"], found["commit"], found["problem"]) == ("engine", "c", None)
        assert found["not_run"] == {"lmcache_s3": "not run: No module named 'lmcache'"}
        assert found["engines"]["recompute"]["vllm"] == "0.32.0"
        assert found["settings"]["shape"]["dtype"] == "float32"
        assert found["settings"]["block_tokens"] == BLOCK_TOKENS
        assert "folder" not in found["settings"]
        assert found["distinct_outputs"] == {CASE.title: 2}
        assert found["measurements"][2]["way"] == "objectcache_layerwise"

    @pytest.mark.slow
    def test_a_chart_is_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        plot(self.result(), tmp_path / "a.png")
        assert (tmp_path / "a.png").stat().st_size > 0


class TestCommandLine:
    def test_defaults_are_the_issues(self) -> None:
        found = settings()
        assert (found.contexts, found.hit_rates) == ((2048, 4096, 8192, 16384), (0.5, 0.875))
        assert found.ways == tuple(way for way in Way if way not in (Way.ADVISED, Way.STATED, Way.AHEAD, *TIERS))
        assert found.prefixes[-1] == 14336

    def test_tiers_are_a_question_of_their_own(self) -> None:
        assert settings("--tier").ways == (Way.RECOMPUTE, *TIERS)
        with pytest.raises(ValueError, match="ask one"):
            settings("--tier --advised")

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
        "text", ["--ways a", "--ways recompute,recompute", "--contexts 4K,2K", "--hits 0", "--hits x"]
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
        ENGINE.add(parser.add_subparsers())
        options = parser.parse_args(["engine", "--smoke"])
        assert options.command(options) == 2
        assert "bench.beds.kv_peers.install engines" in capsys.readouterr().err

    def test_lengths_have_units(self) -> None:
        assert settings("--contexts 1K,1536").contexts == (1024, 1536)
        assert number(1, 10)("3") == 3


class FakeEngine:
    """A process that answers with what it was given."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self.told: list[Command] = []
        self.is_closed = False

    def tell(self, line: str) -> None:
        """One command."""
        self.told.append(from_line(Command, line))

    def answer(self, timeout_s: float) -> str:
        """The next answer."""
        if not self.answers:
            raise BaselineError("ended early")
        return to_line(self.answers.pop(0))

    def close(self) -> None:
        """No more."""
        self.is_closed = True


class TestBed:
    def bed(self, way: Way, engine: FakeEngine, tmp_path: Path) -> Bed:
        """One engine that is played."""
        return Bed(settings(), tmp_path, cast("LocalServer", None), ExitStack(), {way: engine})  # type: ignore[dict-item]

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
        (tmp_path / "example_connector.log").write_text("out of memory")
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
        self.ready: dict[Way, Any] = {}
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
    ) -> tuple[Any, PlayedBed]:
        """Over a played bed of four ways."""
        bed = PlayedBed((Way.RECOMPUTE, Way.LAYERWISE, Way.CHUNKWISE, Way.EXAMPLE_TOLD), answers)
        monkeypatch.setattr(measure, "running_bed", lambda _: nullcontext(bed))
        ways = ",".join(way.value for way in bed.engines)
        bed.settings = settings(f"--smoke --runs {runs} --ways {ways}")
        return measure_engines(bed.settings), bed

    def test_ways_take_turns_after_recomputing_and_the_first_round_does_not_count(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found, bed = self.measure(monkeypatch, {})
        assert found["problem"] is None
        seen = [(row["way"], len(row["samples"])) for row in found["measurements"]]
        assert seen == [(way.value, 2) for way in bed.engines]
        assert [way for _, way in bed.asked[::4]] == [Way.RECOMPUTE] * 3
        assert len({tuple(way for at, way in bed.asked if at == index) for index in range(3)}) == 3

    def test_a_wrong_token_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times beside wrong tokens are worth nothing."""
        found, bed = self.measure(monkeypatch, {Way.EXAMPLE_TOLD: Answer(1.0, cached_tokens=896, tokens=(99,))})
        assert "tokens [99]" in found["problem"]
        assert {index for index, _ in bed.asked} == {0}

    def test_a_peer_that_fails_is_left_out_and_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found, _ = self.measure(monkeypatch, {Way.EXAMPLE_TOLD: Answer(problem="out of memory")})
        assert found["not_run"] == {Way.EXAMPLE_TOLD: "not run: out of memory"}
        assert {row["way"] for row in found["measurements"]} == {way.value for way in measure.needed(settings())}

    def test_ours_that_fails_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BaselineError, match="gone"):
            self.measure(monkeypatch, {Way.LAYERWISE: Answer(problem="gone")})


class TestTierTargets:
    def test_each_is_told_where_it_is_worst(self) -> None:
        long = Case(16384, 0.875)
        answers = {
            (CASE, Way.FS_TIER): taking(3.0, 3.0),
            (CASE, Way.TIER): taking(1.0, 1.0),
            (long, Way.FS_TIER): taking(2.2, 2.2),
            (long, Way.TIER): taking(2.0, 2.0),
        }
        fs, obj = measure.tier_targets(rows(answers, SHAPE.token_bytes), {Way.OBJ_TIER: "no NIXL"})
        assert (fs["value"]["median"], fs["case"], fs["is_met"]) == (pytest.approx(1.1), long.title, False)
        assert (obj["value"], obj["reason"]) == (None, "no NIXL")


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
        monkeypatch.setattr(engine_bed, "POLL_S", 0.0)
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
        monkeypatch.setattr(engine_bed, "QUIET_TIMEOUT_S", -1.0)
        with pytest.raises(BaselineError, match="2 stores and 0 fetches"):
            LmcacheServer(1, 2).await_quiet()
        with pytest.raises(BaselineError, match="3 chunks in its memory"):
            LmcacheServer(1, 2).forget()
