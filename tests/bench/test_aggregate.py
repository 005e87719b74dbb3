"""The benchmark measures what it says, and never passes over wrong bytes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.beds.baselines import write_spans
from bench.beds.kv_peers import running
from bench.beds.kv_peers.running import PeerFailed, PeerName, PeerRun, Peers, Program
from bench.beds.kv_peers.work import Capability, Outcome, S3Target, Work, verify_first_layers
from bench.cli import run
from bench.core.lines import from_line, to_line
from bench.core.show import as_text
from bench.experiments.aggregate import run as aggregate
from bench.experiments.aggregate.ratios import Measurement, Ratio, Sample, first_layers, grain_ratios, plot, show
from bench.experiments.aggregate.run import Contender, Found, peer_contenders, result_of, run_rounds
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from objectcache.calibration.chunks import Chunks
from objectcache.calibration.content import Content, VerificationError, make_content, verify_payload
from objectcache.calibration.samples import Spread, State, spread

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


@pytest.mark.bench_smoke
def test_smoke_measures_everything_and_verifies_every_byte(tmp_path: Path) -> None:
    """CI runs the smoke; whoever reads the JSON relies on these names, and on peers that did not run being named."""
    file = tmp_path / "result.json"
    assert run(["aggregate", "--smoke", "--peers", "none", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert result["settings"]["seed"] == 1
    assert result["machine"]["cpu_model"]
    assert set(result["ratios"]) == {
        "shm_over_memcpy",
        "shm_over_memcpy_page_cache",
        "ucx_over_raw_nixl_write",
        "http_over_raw_socket",
        "http_over_mooncake_tcp_layerwise",
        "http4_over_mooncake_tcp_layerwise",
        "ucx_tcp_over_mooncake_tcp_layerwise",
        "shm_over_mooncake_layerwise",
        "shm_over_mooncake_shm_chunkwise",
        "http_over_lmcache_s3",
        "shm_over_lmcache_s3",
        "http_over_nixl_obj",
        "http_over_native_range_gets",
        "g16_over_g256",
        "g16_over_g256_cold_shm",
        "g16_over_g256_cold_shm_direct",
        "http_over_raw_socket_page_cache",
        "shm_over_raw_cold_read",
        "shm_direct_over_raw_cold_read",
    }
    assert result["ratios"]["shm_over_memcpy"] > 0
    assert result["ratios"]["shm_over_lmcache_s3"] is None
    assert result["ratio_details"]["shm_over_lmcache_s3"]["is_met"] is False
    assert all(peak > 0 for peak in result["server_peak_rss_bytes"].values())
    for state in ("page_cache", "dram"):
        for grain in (16, 64):
            for name in ("shm", "ucx", "http"):
                measured = result["measurements"][f"{state}/g{grain}/{name}_layer_major"]
                assert measured["nbytes"] == 16 * 4 * 4096
                assert measured["sample_count"] == len(measured["samples"]) == 1
                assert measured["first_layer_s"]["median"] <= measured["duration_s"]["median"]
                assert f"{state}/g{grain}/{name}_chunk_major" in result["measurements"]
    cold = {"cold/g16/shm_layer_major", "cold/g16/shm_direct_layer_major", "cold/raw_cold_read"}
    assert cold <= set(result["measurements"])
    for key in ("cold/g16/http_layer_major", "dram/g16/shm_layer_major"):
        assert set(result["first_layers"][key]["phases_s"]) == {"plan", "wait", "gather", "transfer", "rest"}
    assert "stayed" in result["remarks"]["cold g16,g64"]


@pytest.mark.slow
def test_ucx_tls_is_for_the_tcp_phase_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The setting is not for whatever the process does next."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    file = tmp_path / "result.json"
    shape = ["-N", "3", "-L", "2", "-S", "1KiB", "-G", "16", "--states", "tcp", "--transports", "ucx"]
    assert run(["aggregate", "--smoke", *shape, "--peers", "none", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert "tcp/g16/ucx_layer_major" in result["measurements"]
    assert "UCX_TLS" not in os.environ


@pytest.mark.slow
def test_peers_do_the_same_work_and_are_checked(tmp_path: Path) -> None:
    """Those that need no environment of their own."""
    file = tmp_path / "result.json"
    chosen = ["--states", "dram", "--transports", "http", "--peers", "nixl_obj,native_range_gets", "-G", "16"]
    assert run(["aggregate", "--smoke", *chosen, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["peers_missing"] == {}
    for name in ("nixl_obj_via_ours", "native_range_gets_via_ours"):
        assert result["measurements"][f"dram/g16/{name}"]["nbytes"] == 16 * 4 * 4096
    assert result["ratios"]["http_over_native_range_gets"] > 0


@pytest.mark.slow
def test_wrong_bytes_end_the_benchmark_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast wrong answer is no result."""
    store = aggregate.store_chunks

    def store_swapped(server: Any, chunks: Chunks) -> None:
        store(server, replace(chunks, keys=(chunks.keys[1], chunks.keys[0], *chunks.keys[2:])))

    monkeypatch.setattr(aggregate, "store_chunks", store_swapped)
    file = tmp_path / "result.json"
    chosen = ["--states", "page_cache", "--transports", "http", "--peers", "none"]
    assert run(["aggregate", "--smoke", *chosen, "--json", str(file)]) == 1
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
        ["aggregate", "--states", "warm"],
        ["aggregate", "--peers", "redis"],
        ["aggregate", "-G", "64,16"],
        ["aggregate", "-G", "16,24"],
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


@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, LAYOUT.delivery_bytes(CHUNKS) - 1])
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


def measured(name: str, *seconds: float, state: State = State.DRAM, grain: int | None = 16) -> Measurement:
    """Runs of 100 bytes, whose first layer takes a tenth of the time."""
    samples = tuple(Sample(each, each / 10 if name.endswith("layer_major") else None) for each in seconds)
    return Measurement(name, state, grain, 100, samples, f"note of {name}")


def measurements() -> list[Measurement]:
    """Copy rate 100 B/s; shm 50, 40 and 80 B/s, ucx slower; Mooncake's two ways over TCP 5 and 10 B/s."""
    return [
        measured("memcpy", 1.0, 1.0, 2.0, grain=None),
        measured("shm_layer_major", 2.0, 2.5, 1.25),
        measured("ucx_layer_major", 4.0, 4.0, 4.0),
        measured("shm_layer_major", 2.0, 2.0, 2.0, grain=256),
        measured("mooncake_tcp_layer_major", 20.0, 20.0, 20.0),
        measured("mooncake_tcp_session_layer_major", 10.0, 10.0, 10.0),
        measured("mooncake_shm_at_once_layer_major", 1.0, 1.0, 1.0),
        measured("raw_socket", grain=None),
    ]


def result(problem: str | None = None) -> Any:
    """A result of them, as it is read back."""
    origin = {"commit": "abc", "machine": {"cpu_model": "a CPU"}}
    missing = {"lmcache_s3": "not installed"}
    remarks, peaks = {"dram g16": "how it was made"}, {"dram g16": 5 << 20}
    found = Found(measurements(), missing, remarks, peaks)
    return json.loads(json.dumps(result_of(found, {"seed": 3, "grains": (16, 256)}, origin, 10, problem)))


def test_spread_is_median_and_extremes() -> None:
    """An even count has its median between two samples."""
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """Runs of one round saw the same machine."""
    found = Ratio(0.75, 0.5, 0.4, 1.6, "dram/g16/shm_layer_major", "dram/memcpy")
    assert found.is_met is False
    assert result()["ratio_details"]["shm_over_memcpy"] == found.json()
    assert result()["ratios"]["shm_over_memcpy"] == 0.5


def test_ours_meets_the_best_of_theirs_that_hands_over_layers() -> None:
    """A peer is taken at its fastest; one whose layers come all at the end has a ratio of its own."""
    found = result()["ratio_details"]["shm_over_mooncake_layerwise"]
    assert (found["ours"], found["theirs"]) == ("dram/g16/shm_layer_major", "dram/g16/mooncake_tcp_session_layer_major")
    assert found["median"] == 5.0
    at_once = result()["further_ratios"]["shm_over_mooncake_at_once"]
    assert (at_once["theirs"], at_once["median"]) == ("dram/g16/mooncake_shm_at_once_layer_major", 0.5)


def test_fine_chunks_are_compared_with_coarse_ones_over_the_fastest_transport() -> None:
    """Finest over coarsest, under the target's name and for each transport."""
    found = result()["ratio_details"]["g16_over_g256"]
    sides = ("dram/g16/shm_layer_major", "dram/g256/shm_layer_major")
    assert (found["ours"], found["theirs"], found["median"], found["is_met"]) == (*sides, 1.0, True)
    assert list(grain_ratios(measurements()[:3])) == ["g16_over_g256"]


def test_what_was_not_measured_misses_its_target_with_the_reason() -> None:
    """A peer that could not run must not look like one that was beaten."""
    found = result()["ratio_details"]
    assert found["shm_over_lmcache_s3"]["is_met"] is False
    assert found["shm_over_lmcache_s3"]["reason"] == "lmcache_s3: not installed"
    assert found["http_over_raw_socket"]["reason"] == "http_layer_major: not measured"
    assert found["http_over_nixl_obj"]["is_met"] is None


def test_the_first_layer_may_take_five_milliseconds_and_its_transfer() -> None:
    """At the rate of the raw limit, 100 B/s here."""
    first = {"median_s": 0.2, "limit_s": 0.005 + 10 / 100, "phases_s": {}, "is_met": False}
    assert result()["first_layers"]["dram/g16/shm_layer_major"] == first


def test_a_late_first_layer_is_told_phase_by_phase() -> None:
    """Each phase has its median, and the rest is of client, gateway and the way."""
    phases = [{"plan": 0.01, "gather": 0.03}, {"plan": 0.02, "gather": 0.05}, {}]
    samples = tuple(Sample(4.0, 0.1, each) for each in phases)
    measured = Measurement("shm_layer_major", State.COLD, 16, 100, samples)
    raw = Measurement("raw_cold_read", State.COLD, None, 100, (Sample(1.0),))
    (found,) = first_layers([measured, raw], 10).values()
    assert found.limit_s == 0.005 + 10 / 100
    assert found.phases_s == {"plan": pytest.approx(0.015), "gather": pytest.approx(0.04), "rest": pytest.approx(0.045)}


def test_a_result_has_samples_spreads_and_origin() -> None:
    """Enough to compute every figure again."""
    found = result()
    assert (found["commit"], found["settings"]["seed"]) == ("abc", 3)
    assert found["peers_missing"] == {"lmcache_s3": "not installed"}
    assert "dram/raw_socket" not in found["measurements"]
    ucx = found["measurements"]["dram/g16/ucx_layer_major"]
    assert ucx["samples"][1] == {"duration_s": 4.0, "first_layer_s": 0.4, "phases_s": {}}
    assert ucx["throughput_bytes_per_s"] == {"median": 25.0, "min": 25.0, "max": 25.0}
    assert found["measurements"]["dram/memcpy"]["first_layer_s"] is None


def test_what_is_shown_says_what_was_missed_and_whether_bytes_were_right() -> None:
    """Targets stand beside the figures."""
    lines = as_text(result(), show(result())).splitlines()
    row = next(line for line in lines if line.startswith("shm over memcpy, DRAM"))
    assert row.split()[4:] == ["0.50", "(0.40", "to", "1.60)", "0.75:", "missed"]
    assert "lmcache_s3 did not run: not installed" in lines
    assert "server's peak memory, dram g16: 5 MiB" in lines
    assert lines[-1] == "everything verified"
    wrong = result("chunk 1, layer 2")
    assert as_text(wrong, show(wrong)).splitlines()[-1] == "FAILED: chunk 1, layer 2"


@pytest.mark.slow
def test_the_chart_is_drawn(tmp_path: Path) -> None:
    """Only where the extra is installed."""
    pytest.importorskip("matplotlib")
    plot(result(), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def work(**changes: Any) -> Work:
    """Eight chunks of three layers."""
    return replace(Work(tuple(f"k{index}" for index in range(CHUNKS)), LAYOUT, 7, 1000), **changes)


def test_work_and_answers_travel_unchanged() -> None:
    """Between this process and a peer's, which may have other versions of everything."""
    target = S3Target("http://127.0.0.1:1", "access", "secret", "bucket", "region")
    capability = Capability("a peer", 5, "a note")
    for each in (work(), work(s3=target), capability, Outcome(1.5, 0.5)):
        assert from_line(type(each), to_line(each)) == each


@pytest.mark.parametrize(("slices_max", "layers"), [(1, 1), (8, 1), (23, 2), (24, 3), (1000, 3)])
def test_a_sample_of_slices_is_whole_layers(slices_max: int, layers: int) -> None:
    """The time to the first layer is then that of a layer; no sample is empty."""
    assert work(slices_max=slices_max).sampled_layers == layers


def test_a_peer_that_fails_loses_its_samples_and_the_others_go_on() -> None:
    """Whatever it brought before cannot be trusted, and the bench is not about it."""
    outcomes = iter([Outcome(1.0), Outcome(1.0)])

    def failing() -> Outcome:
        try:
            return next(outcomes)
        except StopIteration:
            raise PeerFailed("chunk 1, layer 2: wrong bytes") from None

    with ExitStack() as stack:
        peers = Peers(stack)
        peers.runs.append(PeerRun(Capability("a_peer", 100, ""), failing))
        ours = Contender("ours", 16, 100, lambda: Sample(1.0))
        found = run_rounds(State.DRAM, [ours, *peer_contenders(peers, 16)], peers, runs=3)
    assert [len(each.samples) for each in found] == [3, 0]
    assert peers.missing == {"a_peer": "chunk 1, layer 2: wrong bytes"}


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what would help."""
    absent = Program(tmp_path / "absent", "mooncake.store", "mooncake_reader", True)
    broken = Program(Path(sys.executable), "no_such_module_at_all", "lmcache_reader", True)
    monkeypatch.setattr(running, "PROGRAMS", {PeerName.MOONCAKE_TCP: absent, PeerName.LMCACHE_S3: broken})
    with ExitStack() as stack:
        peers = Peers(stack)
        peers.start([PeerName.MOONCAKE_TCP, PeerName.LMCACHE_S3], work(), {}, tmp_path)
    assert peers.runs == []
    assert peers.missing == {
        "mooncake_tcp": "not installed: python -m bench.beds.kv_peers.install",
        "lmcache_s3": "ModuleNotFoundError: No module named 'no_such_module_at_all'",
    }


def test_a_peer_with_the_data_in_its_own_memory_is_spared_large_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more copies of 7 GiB do not fit beside ours."""
    program = Program(Path(sys.executable), "json", "mooncake_reader", True)
    monkeypatch.setattr(running, "PROGRAMS", {PeerName.MOONCAKE_TCP: program})
    with ExitStack() as stack:
        peers = Peers(stack)
        peers.start([PeerName.MOONCAKE_TCP], work(layout=replace(LAYOUT, per_layer_chunk_bytes=1 << 28)), {}, None)
    assert "up to 2 GiB only" in peers.missing["mooncake_tcp"]


def test_wrong_bytes_of_a_peer_are_found() -> None:
    """In the layers that were asked for."""
    content = work().content()
    payload = payload_of(content, Delivery.LAYER_MAJOR)
    verify_first_layers(payload, content, 3)
    payload[LAYOUT.layer_bytes(CHUNKS)] ^= 1
    verify_first_layers(payload, content, 1)
    with pytest.raises(VerificationError, match="chunk 0, layer 1"):
        verify_first_layers(payload, content, 2)
