"""`bench ttft` plays compute windows exactly, compares every byte, and finds knees where the model has them."""

from __future__ import annotations

import argparse
import json
import random
import signal
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.beds.fetchers import Clock, Played, Waits, play
from bench.core.options import filled
from bench.core.show import NOT_MEASURED, as_text
from bench.paper.ttft import run as command
from bench.paper.ttft import run as ttft_bed
from bench.paper.ttft.results import (
    CHUNK_TOKENS,
    CONTEXTS,
    HIT_RATES,
    Case,
    Row,
    Scale,
    System,
    Task,
    beyond_bound_s,
    cell_row,
    increases,
    judged,
    make_case,
    overheads,
    sweep_row,
)
from bench.paper.ttft.run import RATE_FACTORS, TTFT, FigureName, TtftOptions, TtftSettings, measure_ttft
from bench.paper.ttft.run import settings_of as settings_of_all
from bench.paper.ttft.show import show
from descriptors.ttft import ttft_layerwise_s
from descriptors.units import bytes_per_s_from_gbps
from nixl_client.client import Client
from nixl_client.session.signed_http import SignedAnswer
from objectcache.calibration import servers as ttft_link
from objectcache.calibration.content import STAMP_BYTES, VerificationError
from objectcache.calibration.knee import Sample, Side, falling_curve, find_knee, without_first_layer
from objectcache.calibration.servers import FixedConfig, LocalServer, LocalServerError, PlayedLink, config_text

LINK = 12.5e9
CAP = 1.25e9
SCALE = Scale(0.125)


@dataclass
class FakeTime:
    """A clock that only sleeping moves, each sleep ending late by `late_s`."""

    at_s: float = 0.0
    late_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> Clock:
        """As `play` takes it."""
        return Clock(lambda: self.at_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        """Later, at once."""
        self.slept.append(seconds)
        self.at_s += seconds + self.late_s


@dataclass
class FakeLayers:
    """Layers that are there at given times; waiting for one moves the clock to `wake_s` after it."""

    time: FakeTime
    there_s: list[float]
    wake_s: float = 0.0

    def wait_layer(self, layer_index: int) -> float:
        """When it is there."""
        if self.there_s[layer_index] > self.time.at_s:
            self.time.at_s = self.there_s[layer_index] + self.wake_s
        return self.there_s[layer_index]

    def is_complete(self) -> bool:
        """By now."""
        return max(self.there_s) <= self.time.at_s


def make_cell(case: Case, system: System, link: float | None, *ttfts_s: float, scale: Scale = SCALE) -> Row:
    """Runs of which only the TTFT matters."""
    return cell_row(Task(case, system, link), [Played(ttft_s, (ttft_s / 2,) * 32) for ttft_s in ttfts_s], scale)


def parse(*arguments: str) -> argparse.Namespace:
    """Options as the command line gives them."""
    parser = argparse.ArgumentParser()
    TTFT.add(parser.add_subparsers(required=True))
    return parser.parse_args(["ttft", *arguments])


def settings_of(options: argparse.Namespace) -> TtftSettings:
    """As the command has them."""
    return settings_of_all(filled(TtftOptions, options))


def model_samples(rates: list[float], layer_bytes: float, compute_s: float, layers: int) -> list[Sample]:
    """TTFT of Eq. 3 at each rate."""
    return [Sample(rate, ttft_layerwise_s([layer_bytes / rate] * layers, [compute_s] * layers)) for rate in rates]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["page_cache", "cold"])
def test_chunks_may_be_elsewhere_than_in_memory_and_the_link_without_limit(tmp_path: Path, state: str) -> None:
    """What this machine moves: neither scaled down to a link nor out of the DRAM tier."""
    file = tmp_path / "out.json"
    options = parse(
        "--smoke", "--figures", "13", "--hits", "50", "--link-gbps", "0", "--state", state, "--json", str(file)
    )
    assert options.command(options) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["settings"]["bed"]["state"] == state
    assert {each["link_bytes_per_s"] for each in result["cells"]} == {None}
    assert any("not limited" in note for note in result["notes"])


@pytest.mark.bench_smoke
def test_smoke_measures_all_systems_and_verifies(tmp_path: Path) -> None:
    """CI runs it; whoever reads the JSON relies on these names."""
    file, charts = tmp_path / "out.json", tmp_path / "charts"
    options = parse("--smoke", "--json", str(file), "--plot", str(charts))
    assert options.command(options) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["machine"]["cpu_model"]
    assert {name.name for name in charts.iterdir()} == {"figure-13.png", "figure-14.png", "figure-15.png"}
    cells = [(each["hit_rate"], each["system"], each["link_bytes_per_s"]) for each in result["cells"]]
    assert set(cells) == {(hit, system.value, LINK) for hit in (0.5, 0.875) for system in System} | {
        (hit, system, CAP) for hit in (0.5, 0.875) for system in ("s3_batch_cw", "s3_agg_lw")
    }
    for hit in ("50", "87.5"):
        assert result["overhead"]["4K"][hit]["64"]["ratio"]["median"] > 0
        assert result["transfer_bound"]["4K"][hit]["64"]["bound_ms"] > 0
    (sweep,) = result["figures"]["15"]
    assert len({sample["rate_bytes_per_s"] for sample in sweep["samples"]}) == 4
    assert sweep["knee"]["side"] in {"between", "below_all", "above_all"}


@pytest.mark.slow
def test_a_played_link_holds_both_orders_to_its_rate(tmp_path: Path) -> None:
    """Neither can have everything before the link has carried it."""
    file = tmp_path / "out.json"
    options = parse("--smoke", "--figures", "13,14", "--hits", "87.5", "--json", str(file))
    assert options.command(options) == 0
    for cell in json.loads(file.read_text())["cells"]:
        if cell["system"].startswith("s3") and cell["link_bytes_per_s"] == CAP:
            assert cell["loaded_bytes_per_s"]["max"] <= CAP * 0.125 * 1.05


@pytest.mark.slow
def test_every_window_can_be_waited_for() -> None:
    """The proof that adding the last windows changes nothing is a mode that adds none."""
    options = parse("--smoke", "--play", "--link-gbps", "0", "--hits", "50")
    result = measure_ttft(settings_of(options), {})
    assert result["problem"] is None
    for cell in result["cells"]:
        assert min(cell["samples_s"]) >= cell["bound_s"]
    assert "every window is waited for" in result["notes"]


@pytest.mark.slow
def test_wrong_bytes_are_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that returned another prompt's chunks must not give a figure."""
    stored = ttft_bed.store_chunks
    monkeypatch.setattr(
        ttft_bed,
        "store_chunks",
        lambda server, prefix, title: stored(
            server, replace(prefix, content=ttft_bed.make_content(len(prefix.keys), prefix.layout, 99)), title
        ),
    )
    result = measure_ttft(settings_of(parse("--smoke", "--link-gbps", "0")), {})
    assert "wrong bytes" in result["problem"]
    assert result["verified"] is False


@pytest.mark.parametrize("waits", list(Waits))
def test_layers_in_time_are_hidden_by_the_windows(waits: Waits) -> None:
    """TTFT is the first layer's time and all windows."""
    time = FakeTime()
    played = play(FakeLayers(time, [1.0, 2.0, 3.0]), 3, 10.0, 0.0, waits, time.clock())
    assert played == Played(31.0, (1.0, 2.0, 3.0))


def test_a_late_layer_delays_its_own_window_and_those_after_it() -> None:
    """Layer 1 is 5 s later than the end of layer 0."""
    time = FakeTime()
    assert play(FakeLayers(time, [1.0, 16.0, 17.0]), 3, 10.0, 0.0, Waits.ALL, time.clock()).ttft_s == 36.0


def test_chunkwise_everything_is_computed_after_everything_is_there() -> None:
    """All layers come at once."""
    time = FakeTime()
    assert play(FakeLayers(time, [7.0] * 4), 4, 2.0, 0.0, Waits.LOADING, time.clock()).ttft_s == 15.0


def test_a_sleep_that_ends_late_shifts_no_window() -> None:
    """The layer was there in time; that this process slept on is not the GPU's delay."""
    time = FakeTime(late_s=0.5)
    assert play(FakeLayers(time, [1.0, 2.0, 13.0]), 3, 5.0, 0.0, Waits.LOADING, time.clock()).ttft_s == 18.0


def test_waking_up_for_a_late_layer_counts() -> None:
    """Whoever waits for a layer sees it only when the thread runs."""
    time = FakeTime()
    layers = FakeLayers(time, [1.0, 20.0], wake_s=0.25)
    assert play(layers, 2, 5.0, 0.0, Waits.LOADING, time.clock()).ttft_s == 25.25


def test_windows_after_the_last_layer_are_added_and_not_slept() -> None:
    """A 64K prefill computes for seconds after its last byte."""
    time = FakeTime()
    play(FakeLayers(time, [1.0, 2.0, 3.0]), 3, 10.0, 0.0, Waits.LOADING, time.clock())
    assert time.slept == [10.0]
    time = FakeTime()
    play(FakeLayers(time, [1.0, 2.0, 3.0]), 3, 10.0, 0.0, Waits.ALL, time.clock())
    assert time.slept == [10.0, 10.0, 10.0]


@given(st.integers(1, 40), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0))
def test_even_transfers_and_windows_give_equation_3(layers: int, transfer_s: float, compute_s: float) -> None:
    """The model and the player are two programs."""
    time = FakeTime()
    there_s = [transfer_s * (index + 1) for index in range(layers)]
    played = play(FakeLayers(time, there_s), layers, compute_s, 0.0, Waits.LOADING, time.clock())
    assert played.ttft_s == pytest.approx(ttft_layerwise_s([transfer_s] * layers, [compute_s] * layers))


@pytest.mark.parametrize(
    ("context", "hit_rate", "chunk_tokens", "chunk_count", "compute_ms", "required_gbytes_per_s"),
    [
        ("4K", 0.125, 16, 32, 322.6, 0.208),
        ("4K", 0.5, 64, 32, 185.31, 1.45),
        ("4K", 0.875, 256, 14, 63.47, 7.40),
        ("64K", 0.125, 256, 32, 11643.8, 0.0922),
        ("64K", 0.5, 16, 2048, 8672.79, 0.495),
        ("64K", 0.875, 16, 3584, 2423.90, 3.10),
    ],
)
def test_workloads_are_the_papers(
    context: str,
    hit_rate: float,
    chunk_tokens: int,
    chunk_count: int,
    compute_ms: float,
    required_gbytes_per_s: float,
) -> None:
    """Tables A8 and, at 12.5 %, A1."""
    case = make_case(context, hit_rate, chunk_tokens)
    assert case.chunk_count == chunk_count
    assert case.compute_s == pytest.approx(compute_ms / 1e3)
    assert case.zero_stall_bytes_per_s / 1e9 == pytest.approx(required_gbytes_per_s, rel=0.005)


def test_bytes_and_link_scale_together() -> None:
    """A transfer takes as long as the paper's: S shrinks, N stays."""
    case = make_case("64K", 0.875, 64)
    whole, eighth = Scale(1.0), SCALE
    assert (case.layout(whole).per_layer_chunk_bytes, case.layout(eighth).per_layer_chunk_bytes) == (262144, 32768)
    assert eighth.link_bytes_per_s(LINK) == LINK / 8
    assert case.bound_s(eighth, LINK) == pytest.approx(case.bound_s(whole, LINK))
    assert case.bound_s(whole, LINK) == pytest.approx(2.4239 + 57344 * 4096 / LINK)
    assert case.bound_s(whole, None) == pytest.approx(2.4239)


def test_a_scale_of_time_shortens_transfers_and_windows_alike() -> None:
    """So that a smoke run is the same experiment, only shorter."""
    case = make_case("64K", 0.875, 256)
    short = Scale(0.125, 0.0625)
    assert case.bound_s(short, LINK) == pytest.approx(case.bound_s(Scale(1.0), LINK) / 16)


def test_slices_keep_room_for_their_stamp() -> None:
    """Whatever the scale, chunks must be told apart."""
    assert make_case("4K", 0.5, 16).layout(Scale(1e-4, 1e-4)).per_layer_chunk_bytes == STAMP_BYTES


def test_what_the_paper_has_no_compute_for_is_refused() -> None:
    """And prefixes that end within a chunk."""
    with pytest.raises(KeyError):
        make_case("8K", 0.5, 16)
    with pytest.raises(ValueError, match="whole number"):
        make_case("4K", 0.5, 100)


def test_overhead_is_the_median_of_ratios_within_rounds() -> None:
    """A slow minute hits both."""
    case = make_case("4K", 0.5, 64)
    ours = make_cell(case, System.S3_AGG_LW, LINK, 1.1, 2.2, 1.3)
    baseline = make_cell(case, System.OPT_LOCAL_LW, LINK, 1.0, 2.0, 1.0)
    (found,) = overheads([baseline, ours], LINK)
    assert found["system"] == "s3_agg_lw"
    assert found["ratio"] == pytest.approx({"median": 1.1, "min": 1.1, "max": 1.3})
    assert found["added_ms"] == pytest.approx({"median": 200, "min": 100, "max": 300})
    assert overheads([baseline, ours], CAP) == []


def test_rounds_that_do_not_match_are_not_compared() -> None:
    """Rather than cut to the shorter."""
    case = make_case("4K", 0.5, 64)
    with pytest.raises(ValueError, match="zip"):
        overheads(
            [make_cell(case, System.S3_AGG_LW, LINK, 1.0), make_cell(case, System.OPT_LOCAL_LW, LINK, 1.0, 1.0)], LINK
        )


def test_a_cap_is_compared_with_the_same_path_at_the_full_link() -> None:
    """Figure 14."""
    case = make_case("64K", 0.875, 64)
    full = make_cell(case, System.S3_BATCH_CW, LINK, 2.0, 2.0)
    capped = make_cell(case, System.S3_BATCH_CW, CAP, 5.0, 6.0)
    cells = [full, capped, make_cell(case, System.S3_AGG_LW, CAP, 1.0, 1.0)]
    (found,) = increases(cells, LINK, CAP)
    assert (found["system"], found["ratio"]["median"]) == ("s3_batch_cw", 2.75)
    assert increases(cells, LINK, None) == []


def test_targets_take_the_worst_hit_rate_of_their_context() -> None:
    """One good corner does not meet them."""
    cells = []
    for hit_rate, ratio in ((0.5, 1.01), (0.875, 1.03)):
        case = make_case("64K", hit_rate, 64)
        cells += [make_cell(case, System.OPT_LOCAL_LW, LINK, 2.0), make_cell(case, System.S3_AGG_LW, LINK, 2.0 * ratio)]
    case = make_case("4K", 0.875, 64)
    bound_s = case.bound_s(SCALE, LINK)
    agg = make_cell(case, System.S3_AGG_LW, LINK, bound_s + 0.008)
    cells += [make_cell(case, System.OPT_LOCAL_LW, LINK, bound_s), agg]
    overhead_target, bound_target = judged(cells, LINK, CAP, SCALE)["targets"]
    assert (overhead_target["value"], overhead_target["is_met"]) == (pytest.approx(1.03), False)
    assert (bound_target["value"], bound_target["is_met"]) == (pytest.approx(0.008), True)
    assert beyond_bound_s(agg)["median"] == pytest.approx(0.008)
    shortened = judged(cells, LINK, CAP, Scale(0.125, 0.5))["targets"]
    assert [target["is_met"] for target in shortened] == [None, None]


def test_the_knee_of_the_model_is_its_zero_stall_rate() -> None:
    """With the first layer taken out and no tolerance; with one, where the line in 1/r meets it."""
    layer_bytes, compute_s, layers = 1e6, 1e-3, 32
    star = layer_bytes / compute_s
    rates = [factor * star for factor in (0.5, 0.8, 1.0, 1.5, 2.0, 4.0)]
    samples = without_first_layer(model_samples(rates, layer_bytes, compute_s, layers), layer_bytes)
    exact = find_knee(samples, tolerance=0.0)
    assert exact.rate_bytes_per_s == pytest.approx(star)
    assert (exact.low_bytes_per_s, exact.high_bytes_per_s) == (pytest.approx(star), pytest.approx(star))
    assert exact.margin_bytes_per_s(star) == pytest.approx(0.0, abs=1.0)
    found = find_knee(samples, tolerance=0.01)
    assert found.rate_bytes_per_s == pytest.approx(31 / (1.01 * 32 - 1) * star)
    assert found.side is Side.BETWEEN


def test_the_knee_stands_through_noise_and_says_how_surely() -> None:
    """Seeded noise of 0.5 %: within 5 % of the true one, and the interval within 1 % of it."""
    noise = random.Random(1)
    rates = [factor * 1e9 for factor in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0, 3.0)]
    clean = without_first_layer(model_samples(rates, 1e6, 1e-3, 32), 1e6)
    noisy = [replace(each, ttft_s=each.ttft_s * noise.gauss(1, 0.005)) for each in clean for _ in range(9)]
    true = find_knee(clean).rate_bytes_per_s
    found = find_knee(noisy)
    assert found.rate_bytes_per_s == pytest.approx(true, rel=0.05)
    assert found.low_bytes_per_s * 0.99 <= true <= found.high_bytes_per_s * 1.01
    assert found.low_bytes_per_s < found.rate_bytes_per_s < found.high_bytes_per_s


def test_the_order_of_samples_changes_no_knee() -> None:
    """Rounds are interleaved as they come."""
    samples = model_samples([5e8, 1e9, 2e9, 4e9], 1e6, 1e-3, 32) * 3
    shuffled = random.Random(2).sample(samples, len(samples))
    assert find_knee(shuffled) == find_knee(samples)


def test_more_bandwidth_is_never_taken_to_be_slower() -> None:
    """An outlier at a fast rate is pooled with its neighbour."""
    times = [4.0, 2.0, 1.0, 1.2, 1.0]
    curve = falling_curve([Sample(float(rate), ttft_s) for rate, ttft_s in enumerate(times, 1)])
    assert [each.ttft_s for each in curve] == [4.0, 2.0, 1.1, 1.1, 1.0]


@pytest.mark.parametrize(
    ("times", "side", "rate"),
    [([1.0, 1.0, 1.0], Side.BELOW_ALL, 1.0), ([4.0, 2.0, 1.0], Side.ABOVE_ALL, 2.0)],
)
def test_a_knee_beyond_the_rates_is_a_bound(times: list[float], side: Side, rate: float) -> None:
    """And said to be one."""
    found = find_knee([Sample(float(at), ttft_s) for at, ttft_s in enumerate(times, 1)])
    assert (found.side, found.rate_bytes_per_s) == (side, rate)


@pytest.mark.parametrize("samples", [[Sample(1.0, 1.0), Sample(2.0, 1.0)], [Sample(1.0, 0.0)] * 3, []])
def test_too_little_for_a_knee_is_refused(samples: list[Sample]) -> None:
    """Two rates make a line, and no time is zero."""
    with pytest.raises(ValueError, match=r"three rates|positive"):
        find_knee(samples)


def test_a_sweep_is_put_back_to_the_papers_scale() -> None:
    """Margins are of the real link, whatever was played."""
    case, scale = make_case("64K", 0.875, 64), Scale(0.125, 0.5)
    star = case.zero_stall_bytes_per_s
    cells = [
        make_cell(case, System.S3_AGG_LW, rate, case.bound_s(scale, rate), scale=scale)
        for rate in (star / 2, star, 2 * star, 3 * star)
    ]
    sweep = sweep_row(case, cells, scale)
    assert sweep["samples"][1]["ttft_s"] == pytest.approx(2.4239 * 33 / 32)
    assert sweep["margin_bytes_per_s"] == pytest.approx((31 / (1.01 * 32 - 1) - 1) * star)
    assert sweep_row(case, cells[:2], scale)["knee"] is None


def test_rates_of_the_sweep_hold_the_schedulers_choice() -> None:
    """r* and r* + 5 Gbps are measured, not only drawn."""
    settings = settings_of(parse())
    case = make_case("64K", 0.875, 64)
    rates = settings.sweep_rates(case)
    assert rates == sorted(rates)
    assert len(rates) == len(RATE_FACTORS) + 1
    assert case.zero_stall_bytes_per_s in rates
    assert case.zero_stall_bytes_per_s + bytes_per_s_from_gbps(5) in rates


def test_the_full_run_is_figure_13s_grid() -> None:
    """Two contexts, three hit rates, three chunk sizes, at 100 Gbps and 10."""
    settings = settings_of(parse())
    assert (settings.contexts, settings.hit_rates, settings.chunk_tokens) == (CONTEXTS, HIT_RATES, CHUNK_TOKENS)
    assert (settings.link_bytes_per_s, settings.cap_bytes_per_s) == (LINK, CAP)
    assert settings.figures == tuple(FigureName)
    assert settings.bed.scale.time == 1


def test_without_a_link_only_figure_13_is_left() -> None:
    """Caps and rates need a scheduler that holds them."""
    assert settings_of(parse("--link-gbps", "0")).figures == (FigureName.OVERHEAD,)
    options = parse("--link-gbps", "0", "--figures", "14")
    assert options.command(options) == 2


def test_a_cap_is_below_the_link() -> None:
    """Else there is nothing to compare."""
    options = parse("--link-gbps", "10")
    assert options.command(options) == 2


def test_figure_15_takes_the_chunk_size_there_is() -> None:
    """Without 64, the first."""
    assert settings_of(parse()).sweep_chunk_tokens == 64
    assert settings_of(parse("-G", "16,256")).sweep_chunk_tokens == 16


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hits", "33"],
        ["--figures", "13,13"],
        ["-G", "17"],
        ["--contexts", "8K"],
        ["--scale", "2"],
        ["--scale", "nan"],
    ],
)
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    """By the parser."""
    with pytest.raises(SystemExit):
        parse(*arguments)


def test_the_servers_config_names_the_link_only_where_there_is_one() -> None:
    """An absent rate is no limit."""
    assert tomllib.loads(config_text(FixedConfig(1000), 1.5e9)) == {
        "storage": {"dram_bytes": 1000},
        "scheduler": {"link_bytes_per_s": 1.5e9},
        "internals": {"scheduler": {"policy": "equal", "chunkwise_fraction": 1e-6}},
    }
    assert tomllib.loads(config_text(FixedConfig(1000, 0.5), None)) == {"storage": {"dram_bytes": 1000}}
    assert tomllib.loads(config_text(FixedConfig(1000, 0.5), 1.0))["internals"]["scheduler"]["gather_s"] == 0.5


def make_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *seen: float | None) -> tuple[PlayedLink, list[int]]:
    """A link whose server says these rates, one after the other, and then the last one; and the signals it was sent."""
    answers, signals = list(seen), []

    def request(method: str, path: str) -> SignedAnswer:
        assert (method, path) == ("GET", "/_objectcache/scheduler")
        rate = answers.pop(0) if len(answers) > 1 else answers[0]
        return SignedAnswer({}, json.dumps({"link_bytes_per_s": rate}).encode())

    monkeypatch.setattr(ttft_link.os, "kill", lambda pid, number: signals.append(number))
    client = SimpleNamespace(http=SimpleNamespace(request=request))
    server = LocalServer("http://127.0.0.1:1", 0, "a", "b")
    return PlayedLink(server, tmp_path / "config.toml", cast(Client, client), FixedConfig(1000)), signals


def test_a_link_is_changed_when_the_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample taken before would be of the old rate; and a rate that is set already is not set again."""
    link, signals = make_link(tmp_path, monkeypatch, None, None, 2e9)
    link.set(2e9)
    link.set(2e9)
    assert signals == [signal.SIGHUP]
    assert (tmp_path / "config.toml").read_text() == config_text(FixedConfig(1000), 2e9)
    assert list(tmp_path.iterdir()) == [tmp_path / "config.toml"]


def test_a_server_that_keeps_its_old_link_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than figures of another rate."""
    link, _ = make_link(tmp_path, monkeypatch, 1e9)
    monkeypatch.setattr(ttft_link, "CHANGE_TIMEOUT_S", 0.01)
    with pytest.raises(LocalServerError, match=r"still goes by .*1000000000\.0"):
        link.set(2e9)


def test_an_empty_result_still_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever went wrong before the first cell."""

    def fail(*_: object) -> None:
        raise VerificationError("chunk 0, layer 0: wrong bytes")

    monkeypatch.setattr(command, "filled_bed", fail)
    result = measure_ttft(settings_of(parse("--smoke")), {})
    assert result["problem"] == "chunk 0, layer 0: wrong bytes"
    assert NOT_MEASURED in as_text(result, show(result))
    assert result["overhead"] == {}
    assert all(target["is_met"] is None for target in result["targets"])
