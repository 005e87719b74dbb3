"""`bench scheduler`: the simulation runs the server's own scheduler and agrees with closed forms; bytes are checked."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from bench.paper import NUM_LAYERS, PaperPolicy, workload
from bench.scheduler import live as live_module
from bench.scheduler.command import add_scheduler
from bench.scheduler.live import LiveSettings, measure_live
from bench.scheduler.player import PlayerJob
from bench.scheduler.random_workloads import measure_random, summarize
from bench.scheduler.results import Cell, Round, model_error, ratios, simulate_paper, targets
from bench.scheduler.scale import serve_scale
from bench.scheduler.simulation import LinkSettings, Simulated, SimulatedRequest, simulate
from bench.scheduler.tables import live_text
from bench.scheduler.trace import EXCERPT, TraceError, read_trace, trace_requests
from bench.scheduler.variants import CALIBRATED, EQUAL, HELD, SLACK, VARIANTS, WORK_CONSERVING, Variant, variant
from bench.scheduler.workloads import Batch, paper_batch, poisson_requests, random_batch, table_a8_costs
from descriptors.units import MIB, bytes_per_s_from_gbps
from storage_server.scheduler.demand import Demand
from storage_server.scheduler.flow import Tenant
from storage_server.scheduler.policies import allocate

FLUID_MS = {"A": (1204, 481), "B": (3499, 1740), "C": (9565, 7726)}
"""Equal and Calibrated Stall-opt: L*s/r - (L-1)*c, or s/r where nothing stalls, of all requests together."""
PAYLOAD_BYTES = 16 * MIB


def run_cli(*arguments: str) -> int:
    """The sub-command alone."""
    parser = ArgumentParser()
    add_scheduler(parser.add_subparsers(required=True))
    options = parser.parse_args(["scheduler", *arguments])
    status: int = options.command(options)
    return status


def run_batch(batch: Batch, which: Variant, payload_bytes_max: int | None = PAYLOAD_BYTES) -> Simulated:
    """One link."""
    return simulate(batch.requests, [LinkSettings(batch.link_bytes_per_s, which.pool_settings(), payload_bytes_max)])


def request(
    came_s: float = 0.0, link_index: int = 0, layer_bytes: int = 100, compute_s: float = 1.0
) -> SimulatedRequest:
    """Two layers; 100 bytes a second are enough for it not to stall after the first."""
    return SimulatedRequest(came_s, layer_bytes, 2, compute_s, compute_s, Tenant("t"), link_index)


def fluid_stall_s(layer_bytes: float, rate: float, compute_s: float) -> float:
    """D of a request at a held rate."""
    return max(layer_bytes / rate, NUM_LAYERS * layer_bytes / rate - (NUM_LAYERS - 1) * compute_s)


@pytest.mark.parametrize("name", FLUID_MS)
def test_held_rates_agree_with_the_closed_form(name: str) -> None:
    """The paper's workloads, to 1 %: the model must not be wrong where it can be checked."""
    for which, expected_ms in zip((EQUAL, CALIBRATED), FLUID_MS[name], strict=True):
        assert run_batch(paper_batch(name), which).added_ttft_s * 1e3 == pytest.approx(expected_ms, rel=0.01)


@pytest.mark.parametrize("which", HELD, ids=lambda each: each.name)
def test_every_request_at_a_held_rate_agrees_with_the_closed_form(which: Variant) -> None:
    """Not only their sum."""
    batch = paper_batch("C")
    assert which.policy is not None
    demands = [Demand(each.layer_bytes, each.layer_count, each.compute_s) for each in batch.requests]
    rates = allocate(which.policy, demands, batch.link_bytes_per_s)
    found = run_batch(batch, which, 4 * MIB).results
    for each, rate, result in zip(batch.requests, rates.tolist(), found, strict=True):
        assert result.rate_bytes_per_s == pytest.approx(rate)
        assert result.stall_s == pytest.approx(fluid_stall_s(each.layer_bytes, rate, each.compute_s), rel=0.03)


@pytest.mark.parametrize("name", FLUID_MS)
def test_slack_is_below_every_rate_on_the_papers_workloads(name: str) -> None:
    """What it is for: by half against Calibrated, by a tenth against the best work-conserving policy."""
    found = ratios(simulate_paper([name], PAYLOAD_BYTES))[name]
    assert found["added_ttft_calibrated_over_slack"] >= 1.5
    assert found["added_ttft_best_work_conserving_over_slack"] >= 1.1


def test_allocations_are_table_a9s() -> None:
    """What the simulation's requests are offered, and so what the live ones are."""
    for cell in simulate_paper("ABC", PAYLOAD_BYTES):
        policy = cell.variant.paper_policy
        if policy is not None:
            expected = [bytes_per_s_from_gbps(rate) for rate in workload(cell.workload).rates_gbps[policy]]
            assert cell.rates_bytes_per_s() == pytest.approx(expected, abs=bytes_per_s_from_gbps(0.0101))


def test_the_same_seed_is_the_same_workload_however_many_processes() -> None:
    """A result can be had again."""
    assert measure_random(3, 5, 1) == measure_random(3, 5, 1)
    assert measure_random(21, 5, 2)[20] == measure_random(21, 5, 1)[20]
    assert random_batch(5, 0) != random_batch(6, 0)
    assert poisson_requests(5, 2, 1e9, 0.5, 1) == poisson_requests(5, 2, 1e9, 0.5, 1)


def test_random_workloads_meet_their_targets() -> None:
    """A few of the ten thousand of the bench."""
    found = summarize(measure_random(40, 1, 1))
    assert found.mean_calibrated_over_slack >= 1.3
    assert found.p99_slack_over_calibrated <= 1.02
    assert found.worst_delay_over_equal_work_conserving <= 1.25
    assert found.lost_gain <= 0.15


def test_ttft_is_stall_and_computing() -> None:
    """Alone on a link, a layer that takes as long as its window stalls the GPU once."""
    (result,) = simulate([request()], [LinkSettings(100.0, EQUAL.pool_settings())]).results
    assert [result.ttft_s, result.stall_s, result.first_layer_s] == pytest.approx([3, 1, 1])
    assert result.added_ttft_s == pytest.approx(1)


def test_links_do_not_share() -> None:
    """Two servers carry two requests as one carries one."""
    link = LinkSettings(100.0, EQUAL.pool_settings())
    apart = simulate([request(), request(link_index=1)], [link, link]).results
    together = simulate([request(), request()], [link]).results
    assert [each.ttft_s for each in apart] == pytest.approx([3, 3])
    assert min(each.ttft_s for each in together) > 4


def test_requests_wait_for_a_gpu() -> None:
    """And only then ask for their layers: the second of two has waited for the first one's end."""
    link = LinkSettings(100.0, EQUAL.pool_settings())
    first, second = simulate([request(), request(0.5)], [link], gpu_count=1).results
    assert first.ttft_s == pytest.approx(3)
    assert second.ttft_s == pytest.approx(3 - 0.5 + 3)
    assert second.stall_s == pytest.approx(1)


def test_a_link_that_there_is_not_is_refused() -> None:
    """Rather than an index from the end."""
    with pytest.raises(ValueError, match="links"):
        simulate([request(link_index=1)], [LinkSettings(1.0, SLACK.pool_settings())])


@pytest.mark.parametrize("which", VARIANTS, ids=lambda each: each.name)
def test_arrivals_in_time_all_end(which: Variant) -> None:
    """Under every variant, with epochs as a server has them."""
    requests = poisson_requests(12, 4, 2e9, 0.8, 1)
    found = simulate(requests, [LinkSettings(2e9, which.pool_settings(gather_s=0.005, epoch_s_max=1.0))])
    assert all(result.added_ttft_s > 0 for result in found.results)
    assert found.payload_count == 12 * NUM_LAYERS


def test_the_cost_model_is_table_a8s() -> None:
    """Within 5 % of each of its rows."""
    assert table_a8_costs().greatest_error < 0.05


def test_a_trace_hits_what_it_has_seen(tmp_path: Path) -> None:
    """The longest beginning of blocks of 512 tokens; one token is always computed."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1500, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 1600, "hash_ids": [1, 2, 4, 3]},
        {"timestamp": 2000, "input_length": 1024, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 900, "hash_ids": [7, 2]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    entries = read_trace(file)
    assert [entry.cached_tokens for entry in entries] == [0, 1024, 1023, 0]
    assert [each.came_s for each in trace_requests(entries)] == [1.0, 2.0]
    assert len(read_trace(file, 2)) == 2


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", '{"timestamp": -1, "input_length": 5, "hash_ids": []}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    """With the line."""
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        read_trace(file)


def test_the_excerpt_is_a_trace_that_a_cache_serves() -> None:
    """Otherwise it would say nothing about loading."""
    entries = read_trace(EXCERPT)
    assert len(entries) == 400
    assert sum(entry.cached_tokens for entry in entries) > 0.5 * sum(entry.context_tokens for entry in entries)


def test_scale_is_one_pool_of_many_tenants() -> None:
    """All at once, and at random times."""
    found = serve_scale(8, 16, 1e10, 1)
    assert {(each.arrivals, each.request_count) for each in found} == {("batch", 8), ("poisson", 16)}
    assert all(each.added_p99_s > 0 for each in found)


def test_added_ttft_is_over_computing_and_beside_it_over_the_same_rounds_baseline() -> None:
    """A slow round is slow for both."""
    slow = Round((3.0, 5.0), (1.5, 3.5), (2.0, 4.0), (1.0, 1.0))
    fast = Round((2.0, 3.0), (1.0, 1.0), (1.0, 1.5), (1.0, 1.0))
    assert (slow.added_s, slow.added_over_no_limit_s) == (pytest.approx(3), pytest.approx(2))
    cell = Cell("A", SLACK, (slow, fast))
    assert (cell.added().max, cell.added_over_no_limit().max) == (pytest.approx(3), pytest.approx(2.5))


def test_ratios_are_medians_of_rounds_and_have_targets() -> None:
    """By the names that readers of the JSON rely on."""

    def cell(which: Variant, *added: float) -> Cell:
        return Cell("B", which, tuple(Round((each,), (0.0,), (0.0,), (0.0,)) for each in added))

    found = ratios(
        [cell(EQUAL, 4, 6, 8), cell(CALIBRATED, 2, 3, 8), cell(SLACK, 1, 2, 2), cell(WORK_CONSERVING[3], 1, 3, 4)]
    )
    assert found == {
        "B": {
            "added_ttft_equal_over_slack": 4,
            "added_ttft_calibrated_over_slack": 2,
            "added_ttft_equal_over_calibrated": 2,
            "added_ttft_best_work_conserving_over_slack": 1.5,
        }
    }
    assert all(target.is_met for target in targets(found))
    least = next(target.least for target in targets(found) if "equal_over_calibrated" in target.what)
    assert least == pytest.approx(0.9 * 3834.4 / 2171.1)


def test_the_model_error_is_of_what_the_paper_measured() -> None:
    """Held rates of the five policies, and nothing else."""
    cells = simulate_paper(["A"], PAYLOAD_BYTES)
    assert {cell.variant for cell in cells if model_error(cell) is not None} == set(HELD)
    error = model_error(cells[0])
    assert error is not None
    measured = workload("A").measured(PaperPolicy.EQUAL)[0].ttft_s
    assert error.ttft[0] == pytest.approx(cells[0].ttfts_s()[0] / measured - 1)


def test_variants_are_found_by_name() -> None:
    """Results name them."""
    assert [variant(each.name) for each in VARIANTS] == list(VARIANTS)
    assert len({each.title for each in VARIANTS}) == 11


def test_bytes_and_link_shrink_together() -> None:
    """Then a layer takes as long as the paper's."""
    settings = LiveSettings(("A",), link_scale=0.1, time_scale=0.5)
    paper = settings.requests()[0]
    layer_bytes = paper.cached_tokens // settings.chunk_tokens * settings.per_layer_chunk_bytes
    transfer_s = layer_bytes / settings.rules(EQUAL, 1e9).link_bytes_per_s
    assert transfer_s == pytest.approx(settings.time_scale * paper.layer_bytes / 1e9, rel=1e-4)
    assert settings.compute_us(paper) == pytest.approx(0.5e6 * paper.layer_compute_s, abs=1)


def test_a_job_survives_its_line() -> None:
    """Client processes get it on their command line."""
    job = PlayerJob("http://127.0.0.1:1", "a", "b", "shm", "00", 1, 2, 3, 4096, 5)
    assert PlayerJob.from_line(job.to_line()) == job


def test_smoke_runs_every_part(tmp_path: Path) -> None:
    """CI runs it, the server and its clients included; whoever reads the JSON relies on these names."""
    file = tmp_path / "out.json"
    assert run_cli("--smoke", "--json", str(file), "--plot", str(tmp_path / "plots")) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        f"scheduler-{part}.png" for part in ("simulated", "live", "random")
    }
    assert set(result["ratios"]["A"]) == {
        "added_ttft_equal_over_slack",
        "added_ttft_calibrated_over_slack",
        "added_ttft_equal_over_calibrated",
        "added_ttft_best_work_conserving_over_slack",
    }
    live_cells = {cell["variant"]: cell for cell in result["live"]["cells"]}
    assert set(live_cells) == {each.name for each in VARIANTS}
    simulated = {cell["variant"]: cell for cell in result["simulation"]["cells"]}
    for each in HELD[:2]:
        offered = live_cells[each.name]["rates_bytes_per_s"]
        assert offered == pytest.approx(simulated[each.name]["rates_bytes_per_s"], rel=0.02)
    assert {cost["active_count"] for cost in result["cost"]} == {1, 10}
    assert result["random"]["summary"]["count"] == 6
    assert len(result["trace"]) == len(VARIANTS)
    assert result["scale"]


def test_wrong_bytes_are_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Players that expect other bytes than are stored must say so."""
    settings = LiveSettings(("A",), (EQUAL,), rounds=1, link_scale=0.02, time_scale=0.005)
    fill = live_module._fill
    monkeypatch.setattr(
        live_module, "_fill", lambda server, jobs: fill(server, [replace(job, seed=job.seed + 50) for job in jobs])
    )
    found = measure_live(settings)
    assert found.problem is not None
    assert "wrong bytes" in found.problem
    assert "WRONG BYTES" in live_text(settings, found)


@pytest.mark.parametrize(
    "arguments",
    [["--parts", "simulation,simulation"], ["--parts", "pigeon"], ["--workloads", "A,D"], ["--time-scale", "0"]],
)
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    """By the parser."""
    with pytest.raises(SystemExit):
        run_cli(*arguments)


def test_a_trace_that_is_not_there_is_wrong_use(tmp_path: Path) -> None:
    """Said in one line."""
    assert run_cli("--parts", "trace", "--trace", str(tmp_path / "none.jsonl")) == 2
    (tmp_path / "cold.jsonl").write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n')
    assert run_cli("--parts", "trace", "--trace", str(tmp_path / "cold.jsonl")) == 2
