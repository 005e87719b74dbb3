"""`calibrate link`: requests keep the paper's ratios, margins follow exactly from times, and the file is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.paper.tables import table_a8
from descriptors.ttft import ttft_layerwise_s
from descriptors.units import KIB, MIB
from nixl_client.client import Transport
from objectcache.calibration import chunks as fetching
from objectcache.calibration.content import VerificationError
from objectcache.calibration.knee import Side
from objectcache.calibration.link import (
    MARGIN_SHARE,
    PAPER_REQUESTS,
    LinkPlan,
    PaperPoint,
    SweptRequest,
    full_link_plan,
    increase_at,
    link_row,
    played_ttft_s,
    rounds_of,
    smoke_link_plan,
)
from objectcache.calibration.link_report import scheduler_entries
from objectcache.calibration.servers import STATUS_PATH, running_server
from objectcache.cli import calibrate_link
from objectcache.cli.config import load_config
from objectcache.cli.main import run

LAYERS = 32
FACTORS = (0.5, 0.75, 0.9, 1.0, 1.125, 1.25, 1.5, 2.0, 3.0)
REQUEST = SweptRequest("exact", 4, 1_000_000, 0.002)
MOVED = ([3e9, 1e9, 2e9], [1.5e9, 1.0e9, 1.25e9])
"""The rates of several requests, and those of one."""


def held(rate: float, late_s: float = 0.0, request: SweptRequest = REQUEST) -> dict[str, Any]:
    """Layers that come when the rate has carried them, the later ones late by as much."""
    layer_s = request.layer_bytes / rate
    layers_s = [(index + 1) * layer_s + (late_s if index else 0.0) for index in range(LAYERS)]
    return {"rate_bytes_per_s": rate, "layers_s": layers_s}


def exact(slope: float = 1.0, request: SweptRequest = REQUEST) -> list[dict[str, Any]]:
    """Requests whose rates come to only one in `slope` of what they are said to be."""
    star = request.zero_stall_bytes_per_s
    return [
        {**held(factor * star / slope, request=request), "rate_bytes_per_s": factor * star}
        for factor in FACTORS
        for _ in range(3)
    ]


def test_a_window_begins_when_its_layer_is_there_and_the_one_before_is_over() -> None:
    """Layer 1 comes early, layer 2 late but announced before layer 3, which was there already."""
    assert played_ttft_s((1.0, 1.5, 6.0, 5.0), 2.0) == 1.0 + 2.0 + 2.0 + (6.0 - 5.0) + 2.0 + 2.0


def test_ttft_is_that_of_equation_3_for_steady_rates() -> None:
    """Where every layer takes as long, both say the same."""
    for rate in (0.4e9, 0.5e9, 0.6e9):
        layer_s = REQUEST.layer_bytes / rate
        expected = ttft_layerwise_s([layer_s] * LAYERS, [REQUEST.compute_s] * LAYERS)
        assert played_ttft_s(held(rate)["layers_s"], REQUEST.compute_s) == pytest.approx(expected)


def test_the_papers_requests_are_rows_of_table_a8() -> None:
    """The command goes without the benchmark, which has the whole table."""
    rows = {(row.context, row.hit_rate): (row.cached_tokens, row.compute_s) for row in table_a8()}
    for place, request in PAPER_REQUESTS.items():
        assert request == pytest.approx(rows[place])


def test_an_exact_server_needs_no_margin() -> None:
    """The knee is at r*, less what the tolerance allows."""
    found = link_row(*MOVED, {REQUEST: exact()}, seed=1)
    assert found["requests"][0]["knee"]["side"] == Side.BETWEEN.value
    assert -0.03 * 0.5e9 < found["requests"][0]["margin_bytes_per_s"] < 0
    assert found["margin_bytes_per_s"] == 0.0


def test_rates_that_come_to_less_make_a_margin() -> None:
    """With 4/5 of each rate r* is reached at 5/4 of it."""
    found = link_row(*MOVED, {REQUEST: exact(slope=1.25)}, seed=1)
    assert found["requests"][0]["knee"]["rate_bytes_per_s"] == pytest.approx(1.25 * 0.5e9, rel=0.03)
    assert found["margin_bytes_per_s"] == pytest.approx(0.25 * 0.5e9, rel=0.15)


def test_one_margin_is_the_median_of_the_requests() -> None:
    """One that is disturbed does not make everybody's; negative ones count as none in the spread."""
    requests = [replace(REQUEST, name=str(index)) for index in range(3)]
    sweeps = zip(requests, (1.0, 1.25, 1.5), strict=True)
    found = link_row(*MOVED, {request: exact(slope) for request, slope in sweeps}, seed=1)
    margins = [each["margin_bytes_per_s"] for each in found["requests"]]
    assert margins == sorted(margins)
    assert found["margin_bytes_per_s"] == margins[1]
    assert found["margins_bytes_per_s"] == {"median": margins[1], "min": 0.0, "max": margins[2]}


def test_increases_are_read_off_the_curve() -> None:
    """At measured rates what was measured, between them linear over 1/r, beyond them as at the ends."""
    swept = link_row(*MOVED, {REQUEST: exact()}, seed=1)["requests"][0]
    star = 0.5e9
    stall = (LAYERS - 1) / LAYERS
    assert increase_at(swept, 0.5 * star) == pytest.approx(stall)
    assert increase_at(swept, 0.6 * star) == pytest.approx(stall * (1 / 0.6 - 1))
    assert increase_at(swept, 0.1 * star) == pytest.approx(stall)
    assert increase_at(swept, star) == pytest.approx(0.0)
    assert increase_at(swept, 9 * star) == pytest.approx(0.0)


def test_a_link_moves_the_better_of_several_requests_and_one() -> None:
    """Medians, and the extremes of the same rounds."""
    found = link_row(*MOVED, {REQUEST: exact()}, seed=1)
    assert found["bytes_per_s"] == 2e9
    assert (rounds_of(found).min, rounds_of(found).max) == (1e9, 3e9)
    assert link_row([1.0], [2.0], {REQUEST: exact()}, seed=1)["bytes_per_s"] == 2.0


def test_no_request_no_margin() -> None:
    """Nothing follows from nothing."""
    with pytest.raises(ValueError, match="no request"):
        link_row(*MOVED, {}, seed=1)


def test_requests_keep_the_ratio_of_their_need_to_the_link() -> None:
    """Table A8's r* over 100 Gbps is r* here over what one request moves; s and c shrink together."""
    plan = full_link_plan(1)
    for single in (0.8e9, 3e9, 9e9):
        for point in plan.points:
            request = plan.request(point, single)
            assert request.layer_bytes <= point.layer_bytes_max
            assert request.layer_bytes == request.chunk_count * plan.layout.per_layer_chunk_bytes
            assert plan.rates(request, single) == sorted(plan.rates(request, single))
            assert request.zero_stall_bytes_per_s + MARGIN_SHARE * single in plan.rates(request, single)
    # 4K, 50%: s = 2048 * 4096 bytes in c = 185.31 ms / 32, on a link of 12.5e9 bytes/s
    share = 2048 * 4096 * 32 / 0.18531 / 12.5e9
    assert plan.request(PaperPoint("4K", 0.5, MIB), 2e9).zero_stall_bytes_per_s == pytest.approx(share * 2e9)
    assert MARGIN_SHARE == 0.05


def test_a_layer_has_at_least_one_chunk() -> None:
    """On a slow machine the window grows instead."""
    plan = full_link_plan(1)
    request = plan.request(PaperPoint("4K", 0.5, MIB), 1e6)
    assert (request.chunk_count, request.layer_bytes) == (1, 256 * KIB)
    assert request.compute_s > plan.compute_s_max


def test_the_plan_stores_what_its_requests_need() -> None:
    """Those that come together have different chunks; everything fits the default DRAM tier."""
    plan = full_link_plan(1)
    assert plan.chunk_count == 32
    assert plan.stored_bytes == 256 * MIB


def test_what_is_written_has_six_digits() -> None:
    """More would promise what seven rounds cannot show."""
    link = link_row([2.3456789e9], [1e9], {REQUEST: exact(slope=1.25)}, seed=1)
    written = scheduler_entries(link)
    assert set(written) == {"link_bytes_per_s", "margin_bytes_per_s"}
    assert written["link_bytes_per_s"] == 2.34568e9


def tiny_plan(_: int) -> LinkPlan:
    """In place of the full one."""
    return smoke_link_plan(1)


@pytest.mark.slow
def test_a_calibrated_link_goes_into_the_file_and_a_server_starts_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command to the scheduler's status."""
    monkeypatch.setattr("objectcache.calibration.link.full_link_plan", tiny_plan)
    path = tmp_path / "objectcache.toml"
    own = "[internals.scheduler]\npolicy = 'calibrated' # the paper's\n"
    path.write_text(f"# mine\n[scheduler]\n{own}")
    arguments = ["--config", str(path), "--data", str(tmp_path), "--transport", "http"]
    assert run(["calibrate", "link", *arguments]) == 0
    assert path.read_text().startswith("# mine\n[scheduler]\n")
    assert own in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    config = load_config(path)
    assert config.scheduler.link_bytes_per_s is not None
    with running_server(tmp_path, ["--config", str(path)]) as server, server.client(Transport.HTTP) as client:
        status = client.http.request("GET", STATUS_PATH).json()
    assert status["policy"] == "calibrated"
    assert status["link_bytes_per_s"] == config.scheduler.link_bytes_per_s
    assert status["margin_bytes_per_s"] == config.scheduler.margin_bytes_per_s


@pytest.mark.bench_smoke
def test_smoke_measures_all_transports_and_writes_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CI runs it; its figures mean nothing."""
    path, file, chart = (tmp_path / name for name in ("objectcache.toml", "out.json", "out.png"))
    arguments = ["--config", str(path), "--data", str(tmp_path), "--json", str(file), "--plot", str(chart)]
    assert run(["calibrate", "link", "--smoke", "--runs", "1", *arguments]) == 0
    result = json.loads(file.read_text())
    assert not path.exists()
    assert chart.stat().st_size > 0
    assert (result["what"], result["verified"]) == ("link", True)
    assert set(result["links"]) == {"shm", "ucx", "http"}
    for link in result["links"].values():
        for request in link["requests"]:
            assert len(request["held"]) == len(request["ttft_samples"]) == 4
            assert all(len(one["layers_s"]) == 4 for one in request["held"])
    printed = capsys.readouterr().out
    assert "name the --transport" in printed
    assert "[scheduler]\n" not in printed


def test_of_several_transports_one_must_be_named_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget is one number for all of them, and it is not ours to guess which of them crosses the shared link."""
    assert run(["calibrate", "link", "--config", str(tmp_path / "x.toml")]) == 2
    assert "pass --transport" in capsys.readouterr().err


@pytest.mark.slow
def test_wrong_bytes_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates of wrong bytes are worth nothing."""

    def find_wrong_bytes(*_: object) -> None:
        raise VerificationError("chunk 3, layer 1: wrong bytes")

    monkeypatch.setattr(fetching, "verify_payload", find_wrong_bytes)
    path = tmp_path / "objectcache.toml"
    assert run(["calibrate", "link", "--smoke", "--transport", "http", "--config", str(path)]) == 1
    assert "WRONG BYTES: chunk 3, layer 1" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.slow
def test_a_transport_that_cannot_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file turns it off."""
    path = tmp_path / "objectcache.toml"
    path.write_text("[storage]\nshm = false\n")
    assert run(["calibrate", "link", "--smoke", "--transport", "shm", "--config", str(path)]) == 1
    assert "shm cannot run here" in capsys.readouterr().err


def test_a_file_that_cannot_be_edited_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits minutes to hear that."""

    def measure(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate_link, "measure_links", measure)
    path = tmp_path / "objectcache.toml"
    path.write_text("scheduler = {policy = 'equal'}\n")
    assert run(["calibrate", "link", "--transport", "http", "--config", str(path)]) == 2
    assert "edited safely" in capsys.readouterr().err
