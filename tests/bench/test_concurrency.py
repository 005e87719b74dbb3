"""`bench concurrency` compares every byte, shows who waited how long, and holds the server to its memory bound."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.beds.fetchers import Job
from bench.beds.memory import own_bytes, tree, watched
from bench.beds.processes import shares
from bench.cli import run
from bench.core.lines import from_line, to_line
from bench.core.show import Json, as_text
from bench.experiments import concurrency
from bench.experiments.concurrency import (
    ConcurrencySettings,
    jain_index,
    level_of,
    measure_concurrency,
    ratios,
    server_of,
    show,
)
from descriptors.layout import ChunkLayout
from descriptors.units import KIB, MIB
from nixl_client.client import Transport
from nixl_client.transports import shared_memory
from objectcache.calibration.samples import Spread
from objectcache.calibration.servers import LocalServer

SETTINGS = ConcurrencySettings(
    counts=(1, 3),
    transports=(Transport.HTTP,),
    workers=1,
    processes=2,
    chunk_count=2,
    num_layers=2,
    chunk_tokens=16,
    per_layer_chunk_bytes=4 * KIB,
    prefix_count=2,
    runs=1,
    seed=1,
    memcpy_bytes=MIB,
)


def make_wave(*ended_s: float) -> Json:
    """Fetches that were all asked for at once."""
    requests = [{"asked_s": 0.0, "first_layer_s": each / 2, "ended_s": each} for each in ended_s]
    return {"requests": requests, "memcpy_bytes_per_s": 100.0, "memory_bytes": 7 * MIB}


@pytest.mark.bench_smoke
def test_smoke_fetches_over_every_transport(tmp_path: Path) -> None:
    """CI runs it; whoever reads the JSON relies on these names."""
    file, chart = tmp_path / "out.json", tmp_path / "out.png"
    assert run(["concurrency", "--smoke", "--json", str(file), "--plot", str(chart)]) == 0
    result = json.loads(file.read_text())
    assert result["verified"] is True
    assert chart.stat().st_size > 0
    assert {(level["transport"], level["count"]) for level in result["levels"]} == {
        (transport, count) for transport in ("shm", "ucx", "http") for count in (1, 4)
    }
    for level in result["levels"]:
        assert [len(wave["requests"]) for wave in level["waves"]] == [level["count"]]
        assert 1 / level["count"] <= level["jain"] <= 1
    assert {f"{transport}_4_over_1" for transport in ("shm", "ucx", "http")} <= set(result["ratios"])
    assert result["server"]["peak_bytes"] <= result["server"]["bound_bytes"]


@pytest.mark.slow
def test_workers_can_be_asked_for() -> None:
    """Their memory counts as the server's."""
    one = measure_concurrency(SETTINGS, {})
    two = measure_concurrency(replace(SETTINGS, workers=2), {})
    assert two["server"]["processes"] > one["server"]["processes"]
    assert two["problem"] is None


@pytest.mark.slow
def test_wrong_bytes_are_the_result() -> None:
    """Fetchers that expect other bytes than are stored must say so."""
    wrong = replace(SETTINGS, seed=2)
    with pytest.MonkeyPatch.context() as patched:
        fill = concurrency.fill
        patched.setattr(concurrency, "fill", lambda server, _: fill(server, [SETTINGS.job(server)]))
        found = measure_concurrency(wrong, {})
    assert found["verified"] is False
    assert "wrong bytes" in found["problem"]
    assert as_text(found, show(found)).splitlines()[-1] == f"FAILED: {found['problem']}"


def test_jain_index_of_known_cases() -> None:
    """All alike: 1. One alone among four: 1/4."""
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 2.0]) == pytest.approx(0.9)


def test_a_level_tells_throughput_and_fairness() -> None:
    """Together they are as fast as the last of them; alone each as fast as it was."""
    level = level_of("shm", 2, 100, [make_wave(1.0, 2.0), make_wave(2.0, 2.0), make_wave(2.0, 4.0)])
    assert level["throughput_bytes_per_s"] == Spread(100.0, 50.0, 100.0)
    assert level["jain"] == pytest.approx(0.9)
    assert level["slowest_over_fastest"] == 2.0
    assert level["ended_s"] == Spread(2.0, 1.0, 4.0)
    assert level["first_layer_s"] == Spread(1.0, 0.5, 2.0)
    assert level["memory_bytes_max"] == 7 * MIB


def test_ratios_are_medians_of_rounds() -> None:
    """To the single fetch of the same round, and to its copy rate."""
    levels = [
        level_of("shm", 1, 100, [make_wave(1.0), make_wave(2.0), make_wave(1.0)]),
        level_of("shm", 2, 100, [make_wave(1.0, 1.0), make_wave(1.0, 1.0), make_wave(4.0, 4.0)]),
    ]
    expected = {"shm_1_over_memcpy": 1.0, "shm_2_over_memcpy": 2.0, "shm_2_over_1": 2.0}
    assert ratios(levels) == expected
    ended_early = level_of("shm", 2, 100, [make_wave(1.0, 1.0), make_wave(1.0, 1.0)])
    assert ratios([levels[0], ended_early])["shm_2_over_1"] == 3.0


@given(st.integers(1, 300), st.integers(1, 64))
def test_fetches_are_shared_out_evenly(count: int, processes: int) -> None:
    """No process is asked for more than its buffer holds."""
    found = shares(count, processes)
    assert sum(found) == count
    assert max(found) - min(found) <= 1
    assert found[0] == max(found)


def test_a_server_over_its_bound_is_seen() -> None:
    """The verdict is not a matter of reading figures."""
    levels = [level_of("shm", 1, 100, [make_wave(1.0)])]
    assert server_of(levels, 1, 0, 7 * MIB)["is_within_bound"] is True
    over = server_of(levels, 1, 0, 7 * MIB - 1)
    assert over["is_within_bound"] is False
    assert "OVER" in show({"levels": (), "ratios": {}, "server": over})["levels"][1]
    assert server_of([], 1, None, 0)["is_within_bound"] is None


def test_memory_that_clients_handed_in_is_not_the_servers() -> None:
    """A client's buffer, mapped by a server, is still the client's; what the server takes for itself is not."""
    pids = [os.getpid()]
    before = own_bytes(pids)
    assert before is not None
    with watched(pids) as clients:
        lent = shared_memory.allocate(64 * MIB)
    with watched(pids) as ours:
        own = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    clients_bytes, ours_bytes = clients(), ours()
    assert clients_bytes is not None
    assert ours_bytes is not None
    assert clients_bytes < before + 32 * MIB
    assert ours_bytes > before + 32 * MIB
    assert lent.nbytes == len(own)
    own.close()


def test_a_process_tree_has_its_root() -> None:
    """Even where nothing else can be seen."""
    assert tree(os.getpid())[0] == os.getpid()


def test_a_job_survives_its_line() -> None:
    """Client processes get it on their command line."""
    server = LocalServer("http://127.0.0.1:1", 1, "a", "b", Path("data"))
    job = Job(server, (Transport.SHM, Transport.HTTP), "name", 1, ChunkLayout(2, 3, 4096), 5, 6, 7)
    assert from_line(Job, to_line(job)) == job


@pytest.mark.parametrize(
    "arguments", [["--counts", "64", "--processes", "1", "--transports", "pigeon"], ["--counts", "1,1"]]
)
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    """By the parser."""
    with pytest.raises(SystemExit):
        run(["concurrency", *arguments])


def test_more_fetches_than_a_client_makes_at_once_are_wrong_use() -> None:
    """Rather than a queue that is measured as if it were the server's."""
    assert run(["concurrency", "--counts", "65", "--processes", "1", "--transports", "http"]) == 2
