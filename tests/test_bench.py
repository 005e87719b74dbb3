"""The benchmark measures what it says, and never passes over wrong bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import aggregate
from bench.cli import run
from bench.content import Content, VerificationError, make_content, verify_payload
from bench.report import Measurement, Report, Sample, Spread, expected_s, plot, ratios, spread, table, to_json
from bench.senders import write_spans
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout

LAYOUT = ChunkLayout(num_layers=3, chunk_tokens=16, per_layer_chunk_bytes=64)
CHUNKS = 8
DELIVERIES = (Delivery.LAYER_MAJOR, Delivery.CHUNK_MAJOR)


def payload_of(content: Content, delivery: Delivery, order: Sequence[int] = range(CHUNKS)) -> np.ndarray:
    """The payload of chunks in this order."""
    chunks = np.stack([content.chunk(index) for index in order])
    if delivery is Delivery.CHUNK_MAJOR:
        return chunks.reshape(-1)
    slices = chunks.reshape(len(order), content.layout.num_layers, content.layout.per_layer_chunk_bytes)
    return slices.transpose(1, 0, 2).reshape(-1).copy()


def test_smoke_measures_everything_and_verifies_every_byte(tmp_path: Path) -> None:
    """CI runs the smoke; whoever reads the JSON relies on these names."""
    file = tmp_path / "result.json"
    assert run(["aggregate", "--smoke", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["state"] == "warm"
    assert result["settings"]["seed"] == 1
    assert result["machine"]["cpu_model"]
    assert result["server_peak_rss_bytes"] > 0
    assert set(result["ratios"]) >= {
        "ucx_over_raw_nixl_write",
        "http_over_raw_socket",
        "ucx_over_memcpy",
        "http_over_memcpy",
        "ucx_over_naive_range_gets",
    }
    for name in ("ucx_layer_major", "ucx_chunk_major", "http_layer_major", "http_chunk_major"):
        measured = result["measurements"][name]
        assert measured["nbytes"] == 16 * 4 * 4096
        assert measured["sample_count"] == len(measured["samples"]) == 1
        assert measured["first_layer_s"]["median"] <= measured["duration_s"]["median"]


def test_ucx_tls_is_recorded_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is for this run and not for whatever the process does next."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    file = tmp_path / "result.json"
    shape = ["-N", "3", "-L", "2", "-S", "1KiB", "--transports", "ucx", "--naive-slices", "2"]
    assert run(["aggregate", "--smoke", *shape, "--ucx-tls", "tcp", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["settings"]["ucx_tls"] == "tcp"
    assert result["measurements"]["naive_range_gets"]["note"] == "boto3, a sample of 2 of 6 slices"
    assert not any(name.startswith("http") for name in result["measurements"])
    assert "UCX_TLS" not in os.environ


def test_wrong_bytes_end_the_benchmark_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast wrong answer is no result."""
    fill = aggregate._fill

    def fill_swapped(server: Any, keys: Sequence[str], content: Content) -> None:
        fill(server, [keys[1], keys[0], *keys[2:]], content)

    monkeypatch.setattr(aggregate, "_fill", fill_swapped)
    file = tmp_path / "result.json"
    assert run(["aggregate", "--smoke", "--transports", "http", "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert result["verified"] is False
    assert "chunk 0, layer 0" in result["problem"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["aggregate", "-N", "0"],
        ["aggregate", "-S", "15"],
        ["aggregate", "-S", "64kb"],
        ["aggregate", "--runs", "0"],
        ["aggregate", "--transports", "tcp"],
        ["aggregate", "--transports", "ucx,ucx"],
    ],
)
def test_wrong_use_is_refused(arguments: list[str]) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    assert ended.value.code == 2


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    """A minute of measuring must not end in a missing folder."""
    assert run(["aggregate", "--smoke", "--json", str(tmp_path / "absent" / "result.json")]) == 2


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_right_bytes_verify(delivery: Delivery) -> None:
    """In the order of either delivery."""
    content = make_content(CHUNKS, LAYOUT, seed=7)
    payload = payload_of(content, delivery)
    verify_payload(payload, content, delivery)  # raises VerificationError, and reads only
    assert np.array_equal(payload, payload_of(content, delivery))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_swapped_chunks_do_not_verify(delivery: Delivery) -> None:
    """The likeliest mistake of a gather."""
    content = make_content(CHUNKS, LAYOUT, seed=7)
    with pytest.raises(VerificationError, match="chunk 2, layer 0"):
        verify_payload(payload_of(content, delivery, [0, 1, 5, 3, 4, 2, 6, 7]), content, delivery)


def test_the_other_delivery_does_not_verify() -> None:
    """The same bytes in the wrong order."""
    content = make_content(CHUNKS, LAYOUT, seed=7)
    with pytest.raises(VerificationError):
        verify_payload(payload_of(content, Delivery.CHUNK_MAJOR), content, Delivery.LAYER_MAJOR)


def test_swapped_tails_of_slices_do_not_verify() -> None:
    """A payload boundary within a slice could mix chunks behind good stamps."""
    content = make_content(CHUNKS, LAYOUT, seed=7)
    payload = payload_of(content, Delivery.LAYER_MAJOR)
    layers = payload.reshape(LAYOUT.num_layers, CHUNKS, LAYOUT.per_layer_chunk_bytes)
    layers[1, [3, 4], 40:] = layers[1, [4, 3], 40:]
    with pytest.raises(VerificationError, match="chunk 3, layer 1"):
        verify_payload(payload, content, Delivery.LAYER_MAJOR)


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, LAYOUT.payload_bytes(CHUNKS) - 1])
def test_one_wrong_bit_does_not_verify(at: int) -> None:
    """Every byte is compared."""
    content = make_content(CHUNKS, LAYOUT, seed=7)
    payload = payload_of(content, Delivery.LAYER_MAJOR)
    payload[at] ^= 1
    with pytest.raises(VerificationError):
        verify_payload(payload, content, Delivery.LAYER_MAJOR)


def test_a_short_payload_does_not_verify() -> None:
    """Nor one that ends on a layer."""
    content = make_content(CHUNKS, LAYOUT, seed=7)
    payload = payload_of(content, Delivery.LAYER_MAJOR)[: -LAYOUT.layer_bytes(CHUNKS)]
    with pytest.raises(VerificationError):
        verify_payload(payload, content, Delivery.LAYER_MAJOR)


def test_no_two_slices_are_alike_even_behind_their_stamps() -> None:
    """Swapping any two slices must show; the same seed makes the same bytes, another seed others."""
    content = make_content(CHUNKS, LAYOUT, seed=7)
    slices = payload_of(content, Delivery.CHUNK_MAJOR).reshape(-1, LAYOUT.per_layer_chunk_bytes)
    assert len({row[16:].tobytes() for row in slices}) == len({row[:16].tobytes() for row in slices}) == len(slices)
    assert (make_content(CHUNKS, LAYOUT, seed=7).chunk(3) == content.chunk(3)).all()
    assert (make_content(CHUNKS, LAYOUT, seed=8).chunk(3) != content.chunk(3)).any()


@pytest.mark.parametrize(("total", "write", "source"), [(10, 3, 6), (10, 10, 10), (7, 2, 5), (4, 8, 8)])
def test_raw_writes_cover_the_buffer_once_from_within_the_source(total: int, write: int, source: int) -> None:
    """Otherwise the raw rate would be that of other work."""
    at = 0
    for source_offset, target_offset, nbytes in write_spans(total, write, source):
        assert target_offset == at
        assert source_offset + nbytes <= source
        at += nbytes
    assert at == total


def measurements() -> list[Measurement]:
    """Copy rate 100 B/s; ucx 40, 50 and 25 B/s; raw 50, 100 and 50 B/s."""
    return [
        Measurement("memcpy", 200, tuple(Sample(seconds) for seconds in (2.0, 2.0, 2.0))),
        Measurement("raw_nixl_write_layer", 100, tuple(Sample(seconds) for seconds in (2.0, 1.0, 2.0))),
        Measurement("ucx_layer_major", 100, (Sample(2.5, 0.5), Sample(2.0, 0.25), Sample(4.0, 1.0)), "a note"),
        Measurement("raw_socket", 100, ()),
    ]


def report(problem: str | None = None) -> Report:
    """A report of them."""
    origin = {"commit": "abc", "machine": {"cpu_model": "a CPU"}}
    return Report("aggregate", origin, {"seed": 3}, measurements(), 10, 5 << 20, problem)


def test_spread_is_median_and_extremes() -> None:
    """An even count has its median between two samples."""
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_ratios_are_of_medians_and_their_spread_of_runs_of_one_round() -> None:
    """Pairs of which one was not measured are left out."""
    assert ratios(measurements()) == {
        "ucx_over_raw_nixl_write": Spread(40 / 50, 0.5, 0.8),
        "ucx_over_memcpy": Spread(0.4, 0.25, 0.5),
    }


def test_the_expected_time_is_one_copy_at_the_copy_rate() -> None:
    """Bytes over bytes per second; unknown until the copy rate is."""
    assert expected_s(50, measurements()) == 0.5
    assert expected_s(50, measurements()[1:]) is None


def test_json_has_samples_spreads_and_origin() -> None:
    """Enough to compute every figure again."""
    result = json.loads(json.dumps(to_json(report())))
    assert (result["commit"], result["settings"], result["server_peak_rss_bytes"]) == ("abc", {"seed": 3}, 5 << 20)
    assert result["ratios"]["ucx_over_memcpy"] == 0.4
    assert result["ratio_spreads"]["ucx_over_memcpy"] == {"median": 0.4, "min": 0.25, "max": 0.5}
    assert set(result["measurements"]) == {"memcpy", "raw_nixl_write_layer", "ucx_layer_major"}
    ucx = result["measurements"]["ucx_layer_major"]
    assert ucx["samples"][1] == {"duration_s": 2.0, "first_layer_s": 0.25}
    assert ucx["throughput_bytes_per_s"] == {"median": 40.0, "min": 25.0, "max": 50.0}
    assert ucx["first_layer_s"] == {"median": 0.5, "min": 0.25, "max": 1.0}
    assert (ucx["expected_duration_s"], ucx["expected_first_layer_s"]) == (1.0, 0.1)
    assert result["measurements"]["memcpy"]["first_layer_s"] is None


def test_the_table_says_what_was_expected_and_whether_bytes_were_right() -> None:
    """Measured and expected stand side by side."""
    lines = table(report()).splitlines()
    row = next(line for line in lines if line.startswith("ucx_layer_major"))
    assert row.split()[4:] == ["2500.00", "1000.00", "500.00", "100.00", "a", "note"]
    assert "server peak RSS: 5 MiB" in lines
    assert lines[-1] == "every byte verified"
    assert table(report("chunk 1, layer 2")).splitlines()[-1] == "WRONG BYTES: chunk 1, layer 2"


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    """Only where the extra is installed."""
    pytest.importorskip("matplotlib")
    plot(report(), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
