"""Theta follows from the samples, says how sure it is, and reaches the config file without harm to the rest of it."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from objectcache.calibration import chunks as fetching
from objectcache.calibration.content import VerificationError
from objectcache.calibration.knee import Side
from objectcache.calibration.samples import State
from objectcache.calibration.theta import (
    CalibrationPlan,
    Family,
    costs,
    find_theta,
    fit,
    full_plan,
    make_curves,
    payload_bytes,
    point_row,
    sensitivities,
    sign_changes,
    smoke_plan,
    ttft_s,
)
from objectcache.cli.calibrate_theta import calibrate_theta
from objectcache.cli.config import Config, ConfigError, load_config
from objectcache.cli.config_file import edit_file
from objectcache.cli.config_text import ConfigTextError, literal, with_table, with_values
from objectcache.cli.main import run

LAYERS = 8
REQUEST_S, LAYER_S, BYTES_PER_S = 2e-3, 2e-3, 1e9
COMPUTE_S = 1e-2
TINY = CalibrationPlan((Family("tiny", ChunkLayout(2, 16, 4 * KIB), 8 * KIB, 32 * KIB),), runs=1)
CODECS = ("compression", "codecs")
MEASURED = {"kivi4-1": {"quality": 0.99, "decoded_bytes_per_s": 4e9}, "fp8-1": {"quality": 1.0}}
OWN = """# of a deployment
[gateway]
region = "eu-1"  # ours

[storage]
dram_bytes = 4096 # not theta_bytes = 7
theta_bytes = 100   # by hand

# the one and only
[[credentials]]
access_key = "KVREADER"
secret_key = "at # least [8]"
"""


def a_run(chunk_major_s: float, *layers_s: float) -> dict[str, Any]:
    """One round of a point."""
    return {"chunk_major_s": chunk_major_s, "layers_s": layers_s}


def make_points(
    wobble: Callable[[int], float] = lambda _: 1.0,
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128),
    runs: int = 5,
) -> list[dict[str, Any]]:
    """Payloads of a machine with a fixed cost of each request and layer, and a rate; rounds differ by `wobble`."""
    layout = ChunkLayout(LAYERS, 16, 32 * KIB)
    family = Family("exact", layout, 0, 0)

    def make_run(count: int, round_index: int) -> dict[str, Any]:
        layer_s = layout.layer_bytes(count) / BYTES_PER_S
        ready_s = tuple(REQUEST_S + (LAYER_S + layer_s) * (index + 1) for index in range(LAYERS))
        return a_run(REQUEST_S + LAYERS * layer_s, *(each * wobble(round_index) for each in ready_s))

    return [
        {**point_row(family, count, "shm", State.DRAM), "runs": [make_run(count, index) for index in range(runs)]}
        for count in counts
    ]


def exact_crossing_bytes() -> float:
    """Where request + W/B + L*C is request + X_0 + L*C, all later layers being hidden: X_0 = LAYER_S + W/(L*B)."""
    return LAYER_S / (1 - 1 / LAYERS) * BYTES_PER_S


def test_ttft_is_that_of_equation_3() -> None:
    """Chunk-major waits for everything; layer-major overlaps layer l's compute with layer l+1's transfer."""
    run = a_run(10.0, 2.0, 5.0, 6.0)
    assert ttft_s(run, 1.0) == (13.0, 2.0 + 3.0 + 1.0 + 1.0)
    assert ttft_s(run, 4.0) == (22.0, 2.0 + 4.0 + 4.0 + 4.0)


def test_layers_announced_out_of_order_count_from_when_they_can_be_used() -> None:
    """Notices overtake each other; layer 1 is of no use before layer 0."""
    assert ttft_s(a_run(1.0, 4.0, 3.0, 5.0), 0.0)[1] == 5.0


def test_theta_is_where_the_orders_are_level() -> None:
    """Between the two sizes around the crossing that follows from the costs."""
    (curve,) = make_curves(make_points(), [COMPUTE_S])
    theta = find_theta(curve, seed=1)
    crossing, sizes = exact_crossing_bytes(), [case.payload_bytes for case in curve]
    below, above = max(size for size in sizes if size < crossing), min(size for size in sizes if size >= crossing)
    assert theta["side"] == Side.BETWEEN.value
    assert below < theta["theta_bytes"] <= above
    assert theta["low_bytes"] == theta["theta_bytes"] == theta["high_bytes"]
    assert sign_changes(curve) == 1


def test_rounds_that_disagree_widen_the_interval() -> None:
    """A Theta from rounds that differ must not look exact."""
    theta = find_theta(make_curves(make_points(lambda index: 0.8 + 0.1 * index), [COMPUTE_S])[0], seed=1)
    assert theta["low_bytes"] <= theta["theta_bytes"] <= theta["high_bytes"]
    assert theta["low_bytes"] < theta["high_bytes"]


@pytest.mark.parametrize(
    ("factor", "side"), [(0.01, Side.BELOW_ALL), (100.0, Side.ABOVE_ALL)], ids=["always layers", "always chunks"]
)
def test_a_theta_outside_the_measured_sizes_is_called_a_bound(factor: float, side: Side) -> None:
    """Where one order wins everywhere nothing was found but that."""
    theta = find_theta(make_curves(make_points(lambda _: factor), [COMPUTE_S])[0], seed=1)
    sizes = [payload_bytes(point) for point in make_points()]
    assert theta["side"] == side.value
    assert theta["theta_bytes"] == (min(sizes) if side is Side.BELOW_ALL else max(sizes) + 1)


def test_no_threshold_does_better_than_theta() -> None:
    """On average over the payloads, which is what Theta is chosen by."""
    cases = list(chain(*make_curves(make_points(), [4e-3, COMPUTE_S])))
    found = {each["name"]: each for each in sensitivities(cases, find_theta(cases, 1)["theta_bytes"])}
    assert found["Theta x 1"]["mean_change"] == 0
    assert min(each["mean_cost"] for each in found.values()) == found["Theta x 1"]["mean_cost"]
    assert found["always chunk-major"]["worst_change"] > 0
    assert found["Theta x 4"]["worst_change"] >= found["Theta x 2"]["worst_change"]


def test_costs_are_recovered_from_exact_times() -> None:
    """Least squares on what the model itself would take finds what it was made of."""
    chunk, layer = costs(make_points()).values()
    names = ("request_s", "layer_s", "bytes_per_s")
    assert [chunk[name] for name in names] == pytest.approx([REQUEST_S, 0, BYTES_PER_S])
    assert [layer[name] for name in names] == pytest.approx([REQUEST_S, LAYER_S, BYTES_PER_S])
    assert max(chunk["error"], layer["error"]) < 1e-6


@given(st.lists(st.floats(1e-4, 10), min_size=4, max_size=8))
def test_no_fitted_cost_is_negative(times_s: list[float]) -> None:
    """A scheduler must not be told that more bytes take less time."""
    rows = [(1.0, float(index % 3 + 1), float(index % 2), float(1 << index)) for index in range(len(times_s))]
    found = fit(list(zip(rows, times_s, strict=True)))
    assert min(found["request_s"], found["chunk_s"], found["layer_s"]) >= 0
    assert found["bytes_per_s"] > 0


def test_payloads_reach_from_256_kib_to_512_mib() -> None:
    """The sizes that were asked for, each about twice the one before."""
    sizes = sorted(family.layout.delivery_bytes(count) for family in full_plan(1).families for count in family.counts)
    assert (sizes[0], sizes[-1]) == (256 * KIB, 512 * MIB)
    assert all(larger <= 2.1 * smaller for smaller, larger in pairwise(sizes))


def calibrated(text: str, theta_bytes: int = 5) -> str:
    """The edit that a calibration makes."""
    return with_values(text, "storage", {"theta_bytes": theta_bytes})


def test_the_rest_of_a_config_file_stays_as_it_was() -> None:
    """Comments, order and spacing are their owner's."""
    edited = calibrated(OWN, 5000)
    assert edited == OWN.replace("theta_bytes = 100 ", "theta_bytes = 5000 ")
    assert Config.model_validate(tomllib.loads(edited)).storage.theta_bytes == 5000
    start = with_table(OWN, CODECS, MEASURED).index("\n[compression.codecs.kivi4-1]")
    assert with_table(OWN, CODECS, MEASURED)[:start] == OWN
    assert tomllib.loads(with_table(OWN, CODECS, MEASURED)) == {
        **tomllib.loads(OWN),
        "compression": {"codecs": MEASURED},
    }


def test_calibrating_again_replaces_what_was_written() -> None:
    """And nothing piles up, wherever the table has been moved to."""
    once = with_table(OWN, CODECS, MEASURED)
    assert with_table(once, CODECS, MEASURED) == once
    moved = once[once.index("[compression.codecs.kivi4-1]") :] + "\n# mine\n" + OWN
    again = with_table(moved, CODECS, {"fp8-1": {"quality": 0.5}})
    assert again.count("[compression.codecs") == 1
    assert "# mine\n# of a deployment\n[gateway]" in again
    assert tomllib.loads(again)["compression"] == {"codecs": {"fp8-1": {"quality": 0.5}}}


@pytest.mark.parametrize(
    "text",
    ["", "[gateway]\nregion = 'x'", "[storage]\n", "[storage]\r\ndram_bytes = 1\r\n", "[storage] # here\n[gateway]\n"],
    ids=["empty", "no table, no last newline", "empty table", "crlf", "table in the middle"],
)
def test_theta_finds_its_place(text: str) -> None:
    """Whatever of the file there is already."""
    edited = calibrated(text, 77)
    before, after = tomllib.loads(text), tomllib.loads(edited)
    assert after == {**before, "storage": {**before.get("storage", {}), "theta_bytes": 77}}
    assert ("\r\n" in edited) == ("\r\n" in text)
    assert edited.count("\n") == edited.count("\r\n") or "\r" not in edited


@pytest.mark.parametrize(
    "text",
    [
        "storage = {theta_bytes = 1}\n",
        "storage.theta_bytes = 1\n",
        "[gateway]\nregion = '''\n[storage]\n'''\n",
        "[",
        "storage = 1",
    ],
    ids=["inline", "dotted", "a header within a string", "no TOML", "no table"],
)
def test_what_cannot_be_edited_safely_is_refused(text: str) -> None:
    """Better no Theta than a file that says something else."""
    with pytest.raises(ConfigTextError):
        calibrated(text, 77)


@given(st.text(st.characters(blacklist_categories=("Cs",))))
def test_every_string_survives_as_a_literal(text: str) -> None:
    """Machine names are not ours to choose."""
    assert tomllib.loads(f"x = {literal(text)}") == {"x": text}


def test_writing_replaces_the_file_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at the last moment leaves the old file, and nothing else."""
    path = tmp_path / "objectcache.toml"
    path.write_text(OWN)
    path.chmod(0o640)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space"):
            edit_file(path, calibrated)
    assert path.read_text() == OWN
    assert list(tmp_path.iterdir()) == [path]
    edit_file(path, calibrated)
    assert load_config(path).storage.theta_bytes == 5
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_linked_config_file_stays_a_link(tmp_path: Path) -> None:
    """Deployments link their config to where it is kept."""
    kept, link = tmp_path / "kept.toml", tmp_path / "link.toml"
    kept.write_text(OWN)
    link.symlink_to(kept)
    edit_file(link, calibrated)
    assert link.is_symlink()
    assert load_config(kept).storage.theta_bytes == 5


def options(**changes: object) -> argparse.Namespace:
    """What the command line would have given."""
    fields = {
        "config": None,
        "data": None,
        "transport": "http",
        "states": ("warm",),
        "compute_us": (100.0,),
        "json": None,
        "plot": None,
        "smoke": False,
    }
    return argparse.Namespace(**{**fields, **changes})


@pytest.mark.slow
def test_a_calibration_makes_the_config_file(tmp_path: Path) -> None:
    """Measured with the settings of the file, or the defaults where there is none; a server then accepts it."""
    path = tmp_path / "objectcache.toml"
    assert calibrate_theta(options(config=path, data=tmp_path), TINY) == 0
    assert load_config(path).storage.theta_bytes is not None
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_servers_run_with_the_storage_settings_of_the_file(tmp_path: Path) -> None:
    """But without its credentials; with little DRAM for chunks these come from the page cache."""
    path = tmp_path / "objectcache.toml"
    path.write_text(OWN)
    assert calibrate_theta(options(config=path, data=tmp_path, json=tmp_path / "out.json"), TINY) == 0
    found = load_config(path)
    assert found.credentials[0].access_key == "KVREADER"
    points = json.loads((tmp_path / "out.json").read_text())["points"]
    assert {(point["transport"], point["state"]) for point in points} == {("http", "page_cache")}


@pytest.mark.bench_smoke
def test_smoke_shows_the_curve_and_writes_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over all transports, warm and cold; CI runs it, and its Theta means nothing."""
    path, file, chart = (tmp_path / name for name in ("objectcache.toml", "out.json", "out.png"))
    arguments = ["--config", str(path), "--data", str(tmp_path), "--json", str(file), "--plot", str(chart)]
    assert run(["calibrate", "theta", "--smoke", "--runs", "1", *arguments]) == 0
    result = json.loads(file.read_text())
    assert not path.exists()
    assert chart.stat().st_size > 0
    assert result["verified"] is True
    assert {point["transport"] for point in result["points"]} == {"shm", "ucx", "http"}
    assert {point["state"] for point in result["points"]} == {"dram", "cold"}
    assert all(len(point["runs"]) == 1 for point in result["points"])
    assert {each["name"] for each in result["sensitivity"]} >= {"Theta x 0.25", "Theta x 4", "always chunk-major"}
    assert "Theta for all of it" in capsys.readouterr().out


@pytest.mark.slow
def test_wrong_bytes_end_it_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times of wrong bytes are worth nothing."""

    def find_wrong_bytes(*_: object) -> None:
        raise VerificationError("chunk 3, layer 1: wrong bytes")

    monkeypatch.setattr(fetching, "verify_payload", find_wrong_bytes)
    path = tmp_path / "objectcache.toml"
    assert calibrate_theta(options(config=path, data=tmp_path), TINY) == 1
    assert not path.exists()
    assert "chunk 3, layer 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_transport_that_cannot_run_is_said_when_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With auto the others are measured; asked for by name there is nothing else to measure."""
    path = tmp_path / "objectcache.toml"
    path.write_text("[storage]\nshm = false\n")
    assert calibrate_theta(options(config=path, transport="shm"), TINY) == 1
    assert "shm cannot run here" in capsys.readouterr().err
    assert path.read_text() == "[storage]\nshm = false\n"


def test_a_file_that_cannot_be_edited_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """Nobody waits minutes to hear that."""
    path = tmp_path / "objectcache.toml"
    path.write_text("storage = {theta_bytes = 1}\n")
    with pytest.raises(ConfigError, match="edited safely"):
        calibrate_theta(options(config=path, data=tmp_path), smoke_plan(1))


@pytest.mark.parametrize(
    "arguments",
    [["--config", "/no/such/folder/x.toml"], ["--data", "/no/such/folder"], ["--json", "/no/such/folder/x"]],
)
def test_options_that_cannot_work_are_wrong_use(arguments: list[str]) -> None:
    """Said at once."""
    assert run(["calibrate", "theta", *arguments]) == 2
