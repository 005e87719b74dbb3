"""`bench scheduler`: the simulation runs the server's own scheduler and agrees with closed forms; bytes are checked."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.core.experiment import WrongUse
from bench.core.show import as_text
from bench.paper.scheduler import live as live_module
from bench.paper.scheduler.cells import cell, paper_policy, ratios, show, simulation, targets
from bench.paper.scheduler.live import LiveSettings, measure_live
from bench.paper.scheduler.run import SCHEDULER, measure_random, serve_scale, summarize
from bench.paper.scheduler.simulation import (
    CALIBRATED,
    EQUAL,
    EXCERPT,
    HELD,
    SLACK,
    VARIANTS,
    WORK_CONSERVING,
    Load,
    Simulated,
    SimulatedRequest,
    Variant,
    paper_batch,
    poisson_load,
    random_batch,
    read_trace,
    simulate,
    table_a8_costs,
    trace_requests,
)
from bench.paper.tables import NUM_LAYERS, PaperPolicy, workload
from descriptors.units import MIB, bytes_per_s_from_gbps
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import LinkTenant
from storage_server.delivery.scheduler.policies import allocate

FLUID_MS = {"A": (1204, 481), "B": (3499, 1740), "C": (9565, 7726)}
"""Equal and Calibrated Stall-opt: L*s/r - (L-1)*c, or s/r where nothing stalls, of all requests together."""
PAYLOAD_BYTES = 16 * MIB
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def run_cli(*arguments: str) -> int:
    """The sub-command alone."""
    parser = ArgumentParser()
    SCHEDULER.add(parser.add_subparsers(required=True))
    options = parser.parse_args(["scheduler", *arguments])
    status: int = options.command(options)
    return status


def run_batch(batch: Load, which: Variant, payload_bytes_max: int | None = PAYLOAD_BYTES) -> Simulated:
    """One link."""
    return simulate(batch, which.pool_settings(), payload_bytes_max)


def request(came_s: float = 0.0) -> SimulatedRequest:
    """Two layers; 100 bytes a second are enough for it not to stall after the first."""
    return SimulatedRequest(came_s, 100, 2, 1.0, 1.0, LinkTenant("t"))


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
    found = simulation([name], PAYLOAD_BYTES)["ratios"][name]
    assert found["added_ttft_calibrated_over_slack"] >= 1.5
    assert found["added_ttft_best_work_conserving_over_slack"] >= 1.1


def test_allocations_are_table_a9s() -> None:
    """What the simulation's requests are offered, and so what the live ones are."""
    for found in simulation("ABC", PAYLOAD_BYTES)["cells"]:
        policy = paper_policy(found["variant"])
        if policy is not None:
            expected = [bytes_per_s_from_gbps(rate) for rate in workload(found["workload"]).rates_gbps[policy]]
            assert found["rates_bytes_per_s"] == pytest.approx(expected, abs=bytes_per_s_from_gbps(0.0101))


@pytest.mark.slow
def test_the_same_seed_is_the_same_workload_however_many_processes() -> None:
    """A result can be had again."""
    assert measure_random(3, 5, 1) == measure_random(3, 5, 1)
    assert measure_random(21, 5, 2)[20] == measure_random(21, 5, 1)[20]
    assert random_batch(5, 0) != random_batch(6, 0)
    assert poisson_load(5, 2, 1e9, 0.5, 1) == poisson_load(5, 2, 1e9, 0.5, 1)


@pytest.mark.slow
def test_random_workloads_meet_their_targets() -> None:
    """A few of the ten thousand of the bench."""
    found = summarize(measure_random(40, 1, 1))
    assert found["mean_calibrated_over_slack"] >= 1.3
    assert found["p99_slack_over_calibrated"] <= 1.02
    assert found["worst_delay_over_equal_work_conserving"] <= 1.25
    assert found["lost_gain"] <= 0.15


def test_ttft_is_stall_and_computing() -> None:
    """Alone on a link, a layer that takes as long as its window stalls the GPU once."""
    (result,) = simulate(Load([request()], 100.0), EQUAL.pool_settings()).results
    assert [result.ttft_s, result.stall_s] == pytest.approx([3, 1])
    assert result.added_ttft_s == pytest.approx(1)


def test_requests_share_a_link() -> None:
    """Each of two is slower than one alone."""
    found = simulate(Load([request(), request()], 100.0), EQUAL.pool_settings()).results
    assert min(each.ttft_s for each in found) > 4


def test_requests_wait_for_a_gpu() -> None:
    """And only then ask for their layers: the second of two has waited for the first one's end."""
    first, second = simulate(Load([request(), request(0.5)], 100.0), EQUAL.pool_settings(), gpu_count=1).results
    assert first.ttft_s == pytest.approx(3)
    assert second.ttft_s == pytest.approx(3 - 0.5 + 3)
    assert second.stall_s == pytest.approx(1)


@pytest.mark.parametrize("which", VARIANTS, ids=lambda each: each.name)
def test_arrivals_in_time_all_end(which: Variant) -> None:
    """Under every variant, with epochs as a server has them."""
    found = simulate(poisson_load(12, 4, 2e9, 0.8, 1), which.pool_settings(gather_s=0.005, epoch_s_max=1.0))
    assert all(result.added_ttft_s > 0 for result in found.results)
    assert len(found.results) == 12


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
    with pytest.raises(WrongUse, match=r"trace\.jsonl"):
        read_trace(file)


def test_the_excerpt_is_a_trace_that_a_cache_serves() -> None:
    """Otherwise it would say nothing about loading."""
    entries = read_trace(EXCERPT)
    assert len(entries) == 400
    assert sum(entry.cached_tokens for entry in entries) > 0.5 * sum(entry.context_tokens for entry in entries)


def test_scale_is_one_pool_of_many_tenants() -> None:
    """All at once, and at random times."""
    found = serve_scale(8, 16, 1e10, 1)
    assert {(each["arrivals"], each["request_count"]) for each in found} == {("batch", 8), ("poisson", 16)}
    assert all(each["added_p99_s"] > 0 for each in found)


def one_round(ttfts_s: list[float], compute_s: list[float], no_limit_s: list[float]) -> dict[str, list[float]]:
    """One round of workload A or B, which have four requests each."""
    return {"ttfts_s": ttfts_s, "compute_s": compute_s, "no_limit_s": no_limit_s, "rates_bytes_per_s": [1.0] * 4}


def test_added_ttft_is_over_computing_and_beside_it_over_the_same_rounds_baseline() -> None:
    """A slow round is slow for both."""
    slow = one_round([3.0, 5.0, 0.0, 0.0], [1.5, 3.5, 0.0, 0.0], [2.0, 4.0, 0.0, 0.0])
    fast = one_round([2.0, 3.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.5, 0.0, 0.0])
    found = cell("A", "slack", (slow, fast))
    assert found["added_ttft_s"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert found["added_ttft_over_no_limit_s"] == {"median": 2.25, "min": 2.0, "max": 2.5}
    assert found["ttfts_s"] == [2.5, 4.0, 0.0, 0.0]
    assert found["error"] is None


def test_ratios_are_medians_of_rounds_and_have_targets() -> None:
    """By the names that readers of the JSON rely on."""

    def added(which: Variant, *seconds: float) -> dict[str, Any]:
        return cell("B", which.name, [one_round([each, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4) for each in seconds])

    found = ratios(
        [added(EQUAL, 4, 6, 8), added(CALIBRATED, 2, 3, 8), added(SLACK, 1, 2, 2), added(WORK_CONSERVING[3], 1, 3, 4)]
    )
    assert found == {
        "B": {
            "added_ttft_equal_over_slack": 4,
            "added_ttft_calibrated_over_slack": 2,
            "added_ttft_equal_over_calibrated": 2,
            "added_ttft_best_work_conserving_over_slack": 1.5,
        }
    }
    assert all(target["is_met"] for target in targets(found))
    least = next(target["least"] for target in targets(found) if "equal_over_calibrated" in target["what"])
    assert least == pytest.approx(0.9 * 3834.4 / 2171.1)


def test_the_model_error_is_of_what_the_paper_measured() -> None:
    """Held rates of the five policies, and nothing else."""
    found = simulation(["A"], PAYLOAD_BYTES)
    errors = {each["variant"]: each["error"] for each in found["cells"] if each["error"] is not None}
    assert set(errors) == {each.name for each in HELD}
    measured = workload("A").measured(PaperPolicy.EQUAL)[0].ttft_s
    assert errors["equal"]["ttft"][0] == pytest.approx(found["cells"][0]["ttfts_s"][0] / measured - 1)
    sizes = [abs(one) for error in errors.values() for one in error["ttft"]]
    assert found["model_error"] == {"median": median(sizes), "min": min(sizes), "max": max(sizes)}


def test_bytes_and_link_shrink_together() -> None:
    """Then a layer takes as long as the paper's."""
    settings = LiveSettings(("A",), link_scale=0.1, time_scale=0.5)
    paper = settings.requests()[0]
    layer_bytes = paper.cached_tokens // settings.chunk_tokens * settings.per_layer_chunk_bytes
    transfer_s = layer_bytes / settings.rules(EQUAL, 1e9).link_bytes_per_s
    assert transfer_s == pytest.approx(settings.time_scale * paper.layer_bytes / 1e9, rel=1e-4)
    assert settings.compute_us(paper) == pytest.approx(0.5e6 * paper.layer_compute_s, abs=1)


@pytest.mark.bench_smoke
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
    assert result["trace_entry_count"] == 60
    assert result["scale"]
    assert set(show(result)) == {
        "simulated-workloads", "simulated", "live", "shared-link", "cost", "trace", "scale",
    }  # fmt: skip


@pytest.mark.slow
def test_wrong_bytes_are_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Players that expect other bytes than are stored must say so."""
    settings = LiveSettings(("A",), (EQUAL,), rounds=1, link_scale=0.02, time_scale=0.005)
    fill = live_module.fill
    monkeypatch.setattr(
        live_module, "fill", lambda server, jobs: fill(server, [replace(job, seed=job.seed + 50) for job in jobs])
    )
    live, problem = measure_live(settings)
    assert "wrong bytes" in str(problem)
    assert (live["cells"], live["targets"]) == ([], [])


def test_what_is_shown_has_the_papers_figures_and_misses() -> None:
    """Every figure of a part stands beside its target."""
    result = json.loads((RESULTS / "scheduler-live.json").read_text())
    result["live"]["targets"][0] |= {"value": 1.0, "is_met": False}
    result["live"]["targets"][1] |= {"value": None, "is_met": None}
    lines = as_text(result, show(result)).splitlines()
    assert any(line.split() == ["A:", "added", "ttft", "equal", "over", "calibrated", "1.59", "1.00", "missed"]
               for line in lines)  # fmt: skip
    assert any(line.startswith("A: added ttft calibrated over slack") and "not measured" in line for line in lines)
    allocation = next(line for line in lines if line.startswith("Stall-opt  "))
    assert "42.25 (42.25)" in allocation
    result["settings"]["live"]["time_scale"] = 0.05
    assert "Windows this short say nothing about targets." in as_text(result, show(result))


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
