"""`bench upstream`: it measures what it says, counts what comes back, and shows what it found."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cli import run
from bench.core.show import as_text
from bench.experiments.upstream import FIRST_LAYER_MAX, Bed, Taken, Way, counting_relay, plot, show


@pytest.mark.bench_smoke
@pytest.mark.needs_server
@pytest.mark.timeout(180)
def test_smoke_measures_every_way_and_verifies_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert run(["upstream", "--smoke", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"]
    assert list(result["upstream"]) == ["a second ObjectCache, N = 4", "a second ObjectCache, N = 6"]
    for service in result["upstream"].values():
        assert service["ways"].keys() == {way.value for way in Way}
        assert all(len(way["samples"]) == 1 for way in service["ways"].values())
        assert 1 <= service["asked_over_needed"] < 1.2
    assert len(result["targets"]) == 8
    plot(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.needs_server
@pytest.mark.timeout(180)
def test_wrong_bytes_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = Bed._fetched

    def damaged(self: Any, way: Way, prefix: Any) -> Taken:
        prefix.content.base[:] ^= np.uint8(1)
        return fetched(self, way, prefix)

    monkeypatch.setattr(Bed, "_fetched", damaged)
    file = tmp_path / "result.json"
    assert run(["upstream", "--smoke", "--json", str(file)]) == 1
    assert "wrong bytes" in json.loads(file.read_text())["problem"]


def test_the_relay_counts_what_comes_back() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as service:

        def answer() -> None:
            connection, _ = service.accept()
            with connection:
                assert connection.recv(100) == b"ask"
                connection.sendall(b"x" * 100_000)

        threading.Thread(target=answer, daemon=True).start()
        with counting_relay(f"http://127.0.0.1:{service.getsockname()[1]}") as (url, count):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
                client.sendall(b"ask")
                client.shutdown(socket.SHUT_WR)
                received = 0
                while data := client.recv(1 << 16):
                    received += len(data)
            assert received == count() == 100_000


def test_misses_are_shown_as_such() -> None:
    spread = {"median": 3.0, "min": 2.0, "max": 4.0}
    names = ("cold_over_native", "first_layer_over_native", "cache_over_native", "dram_over_native")
    service = {
        "ways": {Way.COLD.value: {"first_layer_s": spread, "whole_s": spread, "bytes_per_s": 1e9}},
        "ratios": dict.fromkeys((*names, "dram_over_embedded"), spread),
        "asked_over_needed": 1.0,
    }
    target = {"what": "first layer", "limit": FIRST_LAYER_MAX, "value": 3.0, "is_met": False, "side": "at most"}
    settings = {"chunk_count": 4, "num_layers": 4, "per_layer_chunk_bytes": 65536, "runs": 1, "transport": "shm"}
    result = {
        "verified": True, "problem": None, "commit": "", "has_local_changes": False, "machine": {},
        "settings": settings, "upstream": {"moto": service}, "absent": {"Ceph RGW": "not installed"},
        "targets": [{**target, "case": "moto"}],
    }  # fmt: skip
    text = as_text(result, show(result))
    assert "missed" in text
    assert "Not here: Ceph RGW: not installed." in text
