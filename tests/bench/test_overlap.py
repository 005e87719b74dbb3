"""The overlap bench gives the paper's figures back, says where every other one comes from, and compares every byte."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.core import experiment
from bench.core.show import as_text
from bench.paper.overlap import run as command
from bench.paper.overlap.run import (
    CONTEXTS,
    HIT_RATES,
    MARKS,
    OVERLAP,
    PAPER_DEVICES,
    Origin,
    Row,
    held_against,
    paper_grid,
    paper_grids,
    rate_at,
    scaling_error,
    share_below,
    show,
)
from bench.paper.tables import (
    MARGIN_BYTES_PER_S,
    NUM_LAYERS,
    TOKEN_LAYER_BYTES,
    WORKLOADS,
    PaperPolicy,
    table_a1_a2,
    table_a8,
    table_a10_a11,
    table_a12,
    workload,
)
from descriptors.units import MIB, gbps_from_bytes_per_s
from objectcache.calibration import chunks
from objectcache.calibration.compute import measure
from objectcache.calibration.compute.shapes import SHAPES, shape
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import Cell, cell_json
from objectcache.calibration.servers import LocalServerError

LLAMA = shape("llama-3.1-8b")
CELL = {"layer_bytes": 8 * MIB, "layer_compute_s": 4e-3, "required_bytes_per_s": 8 * MIB / 4e-3}


def overlap(*arguments: str) -> int:
    """The sub-command's exit status."""
    parser = argparse.ArgumentParser()
    OVERLAP.add(parser.add_subparsers())
    options = parser.parse_args(["overlap", *arguments])
    status: int = options.command(options)
    return status


def _rate(layer_bytes: int, bytes_per_s: float) -> Row:
    return cell_json(Cell({"layer_bytes": layer_bytes}, layer_bytes, (layer_bytes / bytes_per_s,)))


def _cell(grid: Row, context: int, hit_rate: float) -> Row:
    return next(cell for cell in grid["cells"] if (cell["context_tokens"], cell["hit_rate"]) == (context, hit_rate))


@pytest.mark.bench_smoke
def test_smoke_measures_draws_and_verifies_everything(tmp_path: Path) -> None:
    """CI runs the smoke; whoever reads the JSON relies on these names."""
    file, chart = tmp_path / "overlap.json", tmp_path / "overlap.png"
    assert overlap("--smoke", "--measure", "--json", str(file), "--plot", str(chart)) == 0
    assert chart.stat().st_size > 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["settings"]["seed"] == 1
    assert result["machine"]["cpu_model"]
    assert "commit" in result
    for cell in result["throughput"]:
        assert cell["sample_count"] == len(cell["samples_s"]) == 1
        assert cell["throughput_bytes_per_s"]["median"] > 0
    devices = [*PAPER_DEVICES, "host"]
    assert set(result["grids"]) == {f"{model.name}/{device}" for model in SHAPES for device in devices}
    assert set(result["share_compute_bound"]) == set(devices)
    assert set(result["compute"]) == {model.name for model in SHAPES}
    for grid in result["grids"].values():
        for cell in grid["cells"]:
            assert cell["required_bytes_per_s"] == pytest.approx(cell["layer_bytes"] / cell["layer_compute_s"])
            is_enough = cell["host_bytes_per_s"] >= cell["required_bytes_per_s"]
            assert cell["bound"] == ("compute" if is_enough else "transfer")
            assert cell["total_bytes"] == cell["layer_bytes"] * grid["num_layers"]


@pytest.mark.parametrize("request_", table_a8(), ids=lambda request: request.name)
def test_the_8b_on_the_a100_is_exactly_table_a8(request_: Any) -> None:
    """Cached tokens, compute and B_req as printed (Table A8; its B_req is of the rounded compute)."""
    cell = _cell(paper_grid(LLAMA, "A100"), request_.context_tokens, request_.hit_rate)
    assert cell["origin"] == Origin.TABLE_A8.value
    assert cell["cached_tokens"] == request_.cached_tokens
    assert cell["layer_bytes"] == request_.cached_tokens * 4096
    assert cell["layer_compute_s"] * NUM_LAYERS == pytest.approx(request_.compute_s)
    assert cell["layer_compute_s"] == pytest.approx(request_.printed_layer_compute_s, abs=5.1e-6)
    printed = request_.layer_bytes / request_.printed_layer_compute_s
    assert printed == pytest.approx(request_.printed_bytes_per_s, abs=0.0051e9)
    assert cell["required_bytes_per_s"] == pytest.approx(printed, rel=0.002)


@pytest.mark.parametrize("name", WORKLOADS)
def test_bw_prop_of_table_a9_is_that_of_the_unrounded_compute(name: str) -> None:
    """r* = s / c in proportion fills the budget; so whoever rounds c first is further off than the table's digits."""
    load = workload(name)
    rates = [request.zero_stall_bytes_per_s for request in load.requests]
    for rate, printed in zip(rates, load.rates_gbps[PaperPolicy.BW_PROP], strict=True):
        share = gbps_from_bytes_per_s(rate / sum(rates) * load.budget_bytes_per_s)
        assert share == pytest.approx(printed, abs=0.005)


def test_the_papers_tables_agree_with_each_other() -> None:
    """Tables A10 and A11 have Table A9's rates and add up to Table A12; the constants are the caption's."""
    assert (TOKEN_LAYER_BYTES, MARGIN_BYTES_PER_S) == (4096, 625e6)
    assert (len(table_a1_a2()), len(table_a10_a11()), len(table_a12())) == (56, 70, 15)
    for name in WORKLOADS:
        load = workload(name)
        for policy in PaperPolicy:
            measured, added = load.measured(policy), load.added(policy)
            rates = [gbps_from_bytes_per_s(row.rate_bytes_per_s) for row in measured]
            assert rates == pytest.approx(list(load.rates_gbps[policy]))
            assert sum(row.ttft_s for row in measured) == pytest.approx(added.total_ttft_s, abs=3e-4)
            assert added.total_ttft_s - added.no_limit_s == pytest.approx(added.added_ttft_s, abs=2e-4)
    with pytest.raises(KeyError):
        workload("D")


def test_every_cell_says_where_it_comes_from() -> None:
    """An extrapolation must not pass for a measurement of the paper's."""
    llama = paper_grid(LLAMA, "A100")
    assert _cell(llama, 16384, 0.25)["origin"] == Origin.INTERPOLATED.value
    assert _cell(llama, 131072, 0.5)["origin"] == Origin.EXTRAPOLATED.value
    assert _cell(llama, 65536, 0.25)["origin"] == Origin.TABLES_A1_A2.value
    assert _cell(paper_grid(LLAMA, "H100"), 65536, 0.875)["origin"] == Origin.TABLES_A1_A2.value
    granite = paper_grid(shape("granite-3.3-8b"), "H100")
    assert {cell["origin"] for cell in granite["cells"]} == {Origin.SCALED.value}
    assert set(MARKS) == {origin.value for origin in Origin}
    assert len({mark for mark, _ in MARKS.values()}) == len(MARKS)


def test_a_derived_cell_lies_below_the_ttft_of_its_row() -> None:
    """Tables A1 and A2 recompute 16 tokens of the prefix; a cell recomputes none of them."""
    grid = paper_grid(shape("deepseek-r1-7b"), "H100")
    for row in table_a1_a2():
        if row.model == "DeepSeek-R1-Distill-Qwen-7B" and row.gpu == "H100":
            compute_s = _cell(grid, row.context_tokens, row.hit_rate)["layer_compute_s"] * grid["num_layers"]
            assert 0.95 * row.ttft_s_by_chunk_tokens[16] < compute_s < row.ttft_s_by_chunk_tokens[16]


def test_the_cost_model_is_near_what_the_paper_measured() -> None:
    """Else nothing between the tables' rows could be filled in; 8 % is what the worst row is off by."""
    for device in PAPER_DEVICES:
        for name in ("llama-3.1-8b", "deepseek-r1-7b"):
            assert paper_grid(shape(name), device)["fit_error_greatest"] < 0.08
        assert scaling_error(device) < 0.08


def test_most_of_the_a100s_cells_need_less_than_the_paper_says() -> None:
    """Figure 12: most need less than 2.5 GB/s. Faster compute needs more (Figure A7)."""
    a100, h100 = ([paper_grid(model, device) for model in SHAPES] for device in PAPER_DEVICES)
    slow_cells, fast_cells = ([cell for grid in grids for cell in grid["cells"]] for grids in (a100, h100))
    assert share_below(slow_cells, 2.5e9) > 0.5
    assert share_below(fast_cells, 2.5e9) < share_below(slow_cells, 2.5e9)
    for slow, fast in zip(a100, h100, strict=True):
        for slow_cell, fast_cell in zip(slow["cells"], fast["cells"], strict=True):
            assert fast_cell["required_bytes_per_s"] > slow_cell["required_bytes_per_s"]


def test_longer_contexts_and_fewer_hits_ask_for_less() -> None:
    """Section 5.4: the compute window grows faster than the bytes, beyond the contexts that a fixed cost dominates."""
    for grid in paper_grids(SHAPES):
        for hit_rate in HIT_RATES:
            needs = [cell["required_bytes_per_s"] for cell in grid["cells"] if cell["hit_rate"] == hit_rate]
            assert needs[2:] == sorted(needs[2:], reverse=True)
        for context in CONTEXTS:
            needs = [cell["required_bytes_per_s"] for cell in grid["cells"] if cell["context_tokens"] == context]
            assert needs == sorted(needs)


def test_cells_stop_at_a_models_longest_context() -> None:
    """Figure A5: blank beyond Mistral's 32K."""
    grid = paper_grid(shape("mistral-7b"), "A100")
    assert max(cell["context_tokens"] for cell in grid["cells"]) == 32768
    assert len(paper_grid(LLAMA, "A100")["cells"]) == len(CONTEXTS) * len(HIT_RATES)


def test_a_rate_that_just_suffices_is_compute_bound_and_adds_one_layer() -> None:
    """Section 5.3: then only the first layer's transfer is visible."""
    rate = CELL["required_bytes_per_s"]
    held = held_against(CELL, rate, 32)
    assert (held["bound"], held["added_ttft_s"]) == ("compute", pytest.approx(4e-3))
    assert held_against(CELL, rate * 0.999, 32)["bound"] == "transfer"
    assert held_against(CELL, rate / 2, 32)["added_ttft_s"] == pytest.approx(8e-3 + 31 * 4e-3)


def test_a_layer_is_held_against_the_rate_of_layers_of_its_size() -> None:
    """Large layers move faster than small ones, and nothing larger than measured is assumed to move faster still."""
    rates = [_rate(8 * MIB, 2e9), _rate(2 * MIB, 1e9)]
    assert [rate_at(rates, size * MIB) for size in (1, 2, 7, 8, 1000)] == pytest.approx([1e9, 1e9, 1e9, 2e9, 2e9])


@pytest.mark.slow
def test_wrong_bytes_fail_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast wrong answer is no result."""

    def wrong(*_: object) -> None:
        raise VerificationError("chunk 3, layer 1")

    monkeypatch.setattr(chunks, "verify_payload", wrong)
    file = tmp_path / "overlap.json"
    assert overlap("--smoke", "--transport", "shm", "--models", "llama-3.1-8b", "--json", str(file)) == 1
    result = json.loads(file.read_text())
    assert result["verified"] is False
    assert result["problem"] == "WRONG BYTES: chunk 3, layer 1"


def test_a_server_that_fails_fails_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it said, and the paper's grids all the same: only the bound is left open."""

    def failing(*_: object) -> list[Row]:
        raise LocalServerError("the server ended with status 3")

    monkeypatch.setattr(command, "measure_throughput", failing)
    file = tmp_path / "overlap.json"
    assert overlap("--smoke", "--transport", "shm", "--json", str(file)) == 1
    result = json.loads(file.read_text())
    assert result["problem"] == "the server ended with status 3"
    cell = result["grids"]["llama-3.1-8b/A100"]["cells"][0]
    assert "bound" not in cell
    assert cell["required_bytes_per_s"] > 0
    assert result["share_compute_bound"] == {"A100": None, "H100": None}
    assert "Llama 3.1 8B on A100" in as_text(result, show(result))


def test_a_layer_that_torch_cannot_run_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Out of memory on a small device, say."""

    def failing(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure, "measure_compute", failing)
    assert overlap("--smoke", "--measure", "--transport", "shm") == 1
    assert "torch: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "x.png"], "pip install matplotlib"),
        (["--measure"], "pip install torch"),
        (["--transport", "ucx"], "pip install nixl-cu12"),
    ],
)
def test_what_is_not_installed_is_asked_for(
    arguments: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and the command that installs it, before anything is measured."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(experiment, "is_available", lambda: False)
    monkeypatch.setattr(command, "measure_overlap", lambda *_: sys.exit("it ran"))
    assert overlap("--smoke", "--transport", "shm", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and nothing is measured elsewhere instead."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert overlap("--measure", "--device", "cuda", "--transport", "shm") == 2
    assert "CUDA" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not after minutes of measuring."""
    assert overlap("--transport", "shm", "--json", str(tmp_path / "no" / "x.json")) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--models", "gpt-5"],
        ["--models", "mistral-7b,mistral-7b"],
        ["--chunk-tokens", "48"],
        ["--chunk-tokens", "512"],
        ["--runs", "0"],
        ["--device", "tpu"],
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: Sequence[str]) -> None:
    """By the parser, with status 2."""
    with pytest.raises(SystemExit) as ended:
        overlap(*arguments)
    assert ended.value.code == 2
