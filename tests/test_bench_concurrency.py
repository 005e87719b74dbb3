"""`bench concurrency` compares every byte, shows who waited how long, and holds the server to its memory bound."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cli import run
from bench.concurrency import run as running
from bench.concurrency.fetcher import Job
from bench.concurrency.memory import MemoryWatch, own_bytes, tree
from bench.concurrency.report import is_within_bound, table
from bench.concurrency.run import Concurrency, ConcurrencySettings, measure_concurrency
from bench.concurrency.waves import Level, RequestTimes, Wave, jain_index, ratios, shares
from descriptors.units import KIB, MIB
from nixl_client import shared_memory

SETTINGS = ConcurrencySettings(
    counts=(1, 3),
    transports=("http",),
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


def make_wave(*ended_s: float) -> Wave:
    """Fetches that were all asked for at once."""
    return Wave(tuple(RequestTimes(0.0, each / 2, each) for each in ended_s), 100.0, 7 * MIB)


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


def test_workers_can_be_asked_for() -> None:
    """Their memory counts as the server's."""
    one = measure_concurrency(SETTINGS)
    two = measure_concurrency(ConcurrencySettings(**{**_fields(SETTINGS), "workers": 2}))
    assert two.server_processes > one.server_processes
    assert two.problem is None


def test_wrong_bytes_are_the_result() -> None:
    """Fetchers that expect other bytes than are stored must say so."""
    wrong = ConcurrencySettings(**{**_fields(SETTINGS), "seed": 2})
    with pytest.MonkeyPatch.context() as patched:
        fill = running._fill
        patched.setattr(running, "_fill", lambda server, job: fill(server, SETTINGS.job(server)))
        found = measure_concurrency(wrong)
    assert found.problem is not None
    assert "wrong bytes" in found.problem
    assert "WRONG BYTES" in table(wrong, found)


def test_jain_index_of_known_cases() -> None:
    """All alike: 1. One alone among four: 1/4."""
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 2.0]) == pytest.approx(0.9)


def test_a_level_tells_throughput_and_fairness() -> None:
    """Together they are as fast as the last of them; alone each as fast as it was."""
    level = Level("shm", 2, 100, (make_wave(1.0, 2.0), make_wave(2.0, 2.0), make_wave(2.0, 4.0)))
    assert level.rates_bytes_per_s() == [100.0, 100.0, 50.0]
    assert level.jain() == pytest.approx(0.9)
    assert level.slowest_over_fastest() == 2.0
    assert (level.ended().min, level.ended().max) == (1.0, 4.0)
    assert level.memory_bytes_max() == 7 * MIB


def test_ratios_are_medians_of_rounds() -> None:
    """To the single fetch of the same round, and to its copy rate."""
    levels = [
        Level("shm", 1, 100, (make_wave(1.0), make_wave(2.0), make_wave(1.0))),
        Level("shm", 2, 100, (make_wave(1.0, 1.0), make_wave(1.0, 1.0), make_wave(4.0, 4.0))),
    ]
    assert ratios(levels) == {"shm_1_over_memcpy": 1.0, "shm_2_over_memcpy": 2.0, "shm_2_over_1": 2.0}


@given(st.integers(1, 300), st.integers(1, 64))
def test_fetches_are_shared_out_evenly(count: int, processes: int) -> None:
    """No process is asked for more than its buffer holds."""
    found = shares(count, processes)
    assert sum(found) == count
    assert max(found) - min(found) <= 1
    assert found[0] == max(found)


def test_a_server_over_its_bound_is_seen() -> None:
    """The verdict is not a matter of reading figures."""
    level = Level("shm", 1, 100, (make_wave(1.0),))
    assert is_within_bound(Concurrency([level], 0, 7 * MIB, 1)) is True
    assert is_within_bound(Concurrency([level], 0, 7 * MIB - 1, 1)) is False
    assert "OVER" in table(SETTINGS, Concurrency([level], 0, 7 * MIB - 1, 1))
    assert is_within_bound(Concurrency([], None, None, 1)) is None


def test_memory_that_clients_handed_in_is_not_the_servers() -> None:
    """A client's buffer, mapped by a server, is still the client's; what the server takes for itself is not."""
    pids = [os.getpid()]
    before = own_bytes(pids)
    assert before is not None
    with MemoryWatch(pids) as clients:
        lent = shared_memory.allocate(64 * MIB)
    with MemoryWatch(pids) as ours:
        own = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    assert clients.peak_bytes is not None
    assert ours.peak_bytes is not None
    assert clients.peak_bytes < before + 32 * MIB
    assert ours.peak_bytes > before + 32 * MIB
    assert lent.nbytes == len(own)
    own.close()


def test_a_process_tree_has_its_root() -> None:
    """Even where nothing else can be seen."""
    assert tree(os.getpid())[0] == os.getpid()


def test_a_job_survives_its_line() -> None:
    """Client processes get it on their command line."""
    job = Job("http://127.0.0.1:1", "a", "b", ("shm", "http"), 1, 2, 3, 4096, 5, 6, 7)
    assert Job.from_line(job.to_line()) == job


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


def _fields(settings: ConcurrencySettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in ConcurrencySettings.__slots__}
