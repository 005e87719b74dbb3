"""`bench s3` measures what it says, names who could not take part, and never passes over wrong bytes."""

from __future__ import annotations

import json
import os
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import s3
from bench.canned import Answers, serve
from bench.cli import run
from bench.jobs import LIST_NBYTES, Job, Kind, Outcome, Target, joined
from bench.load import run_job
from bench.objects import NUMBER_MAX, Group, ObjectContent, make_object_content, object_key, parse_key
from bench.peers import Peer, PeerName, PeerUnavailable, cpu_seconds, running_moto
from bench.profiler import shares
from bench.report import Spread
from bench.s3_bed import SampleFailed
from bench.s3_report import (
    Cell,
    Disk,
    Operation,
    S3Measurement,
    S3Report,
    S3Sample,
    s3_json,
    s3_plot,
    s3_ratios,
    s3_table,
)
from descriptors.units import KIB, MIB

LISTED = 2300
NBYTES = 100 * KIB


def make_job(kind: Kind, url: str, count: int = 6, **changes: Any) -> Job:
    """A small job on a server of this test."""
    fields = {"group": Group.GET, "nbytes": NBYTES, "in_flight": 3, "count_max": count, "seconds": 30.0, **changes}
    return Job(kind=kind, target=Target(url, "key", "secret"), **fields)


@contextmanager
def canned_server(content: ObjectContent) -> Iterator[str]:
    """The canned answers, served from a thread that ends with this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, Answers(content, LISTED)), daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def content() -> ObjectContent:
    """What the load puts and expects."""
    return make_object_content(NBYTES, seed=5)


def test_smoke_measures_everything_and_verifies_every_byte(tmp_path: Path) -> None:
    """CI runs the smoke; whoever reads the JSON relies on these names."""
    file = tmp_path / "result.json"
    assert run(["s3", "--smoke", "--json", str(file), "--folder", str(tmp_path)]) == 0
    result = json.loads(file.read_text())
    assert (result["bench"], result["state"], result["verified"], result["absent"]) == ("s3", "warm", True, {})
    assert result["settings"]["seed"] == 1
    assert "synced" in result["peers"]["ours"]["durability"]
    assert set(result["measurements"]) == {"put_4kib_x2", "get_4kib_x2", "put_1mib_x2", "get_1mib_x2", "list"}
    assert set(result["measurements"]["get_1mib_x2"]) == {"ours", "ours_received", "canned", "raw_socket"}
    assert {"get_4kib_x2_ours_over_canned", "get_1mib_x2_ours_over_raw_socket"} <= set(result["ratios"])
    measured = result["measurements"]["put_4kib_x2"]["ours"]
    assert measured["sample_count"] == len(measured["samples"]) == 1
    assert 2 <= measured["samples"][0]["count"] <= 10
    assert measured["p50_s"] <= measured["p99_s"]
    assert result["measurements"]["list"]["ours"]["samples"][0]["items"] == result["settings"]["list_keys"]


@pytest.mark.parametrize("kind", [Kind.GET, Kind.RECEIVE])
def test_a_get_of_wrong_bytes_is_a_problem(content: ObjectContent, kind: Kind) -> None:
    """A server that answers fast and wrong must not win."""
    with canned_server(content) as url:
        assert run_job(make_job(kind, url), content).problem is None
    with canned_server(make_object_content(NBYTES, seed=6)) as url:
        assert "wrong bytes" in (run_job(make_job(kind, url), content).problem or "")


def test_a_list_of_other_keys_is_a_problem(content: ObjectContent) -> None:
    """Every key, size and their order are compared, page by page."""
    listing = {"group": Group.LIST, "nbytes": LIST_NBYTES, "in_flight": 1}
    with canned_server(content) as url:
        outcome = run_job(make_job(Kind.LIST, url, LISTED, population=LISTED, **listing), content)
        assert (outcome.count, outcome.items, outcome.problem) == (3, LISTED, None)
        missing = run_job(make_job(Kind.LIST, url, LISTED, population=LISTED + 1, **listing), content)
    assert missing.problem == f"{LISTED} keys listed, not {LISTED + 1}"


def test_a_refused_request_is_a_problem_and_is_not_tried_again(content: ObjectContent) -> None:
    """A retry would hide it in a slow sample."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    outcome = run_job(make_job(Kind.PUT, f"http://127.0.0.1:{port}"), content)
    assert (outcome.problem or "").startswith("put: ")
    assert outcome.count == 0


def test_a_sample_has_a_request_for_each_in_flight_and_then_ends_with_its_time(content: ObjectContent) -> None:
    """Slow peers must not hold a round up, and every connection must have been used."""
    with canned_server(content) as url:
        outcome = run_job(make_job(Kind.GET, url, 100_000, seconds=1e-6, in_flight=5), content)
    assert 5 <= outcome.count < 100
    assert len(outcome.latencies_s) == outcome.count == outcome.items


def test_jobs_and_outcomes_survive_the_way_between_processes() -> None:
    """They travel as JSON."""
    job = make_job(Kind.PUT, "http://127.0.0.1:1", population=4, first=7)
    assert Job.from_line(job.to_line()) == job
    outcome = Outcome(1.0, 2.5, 2, 2, array("d", [0.25, 0.5]), 0.1, "no")
    assert Outcome.from_line(outcome.to_line()) == outcome
    assert joined([outcome, outcome]).latencies_s == array("d", [0.25, 0.5, 0.25, 0.5])


@pytest.mark.parametrize("parts", [1, 2, 3, 50])
def test_processes_share_a_job_without_doing_anything_twice(parts: int) -> None:
    """Puts must name fresh keys, whichever process makes them."""
    job = make_job(Kind.PUT, "http://127.0.0.1:1", 11, in_flight=5, first=100)
    shares = job.divided(parts)
    assert all(share.in_flight >= 1 and share.count_max >= 1 for share in shares)
    assert sum(share.in_flight for share in shares) == 5
    numbers = sorted(share.number(index) for share in shares for index in range(share.count_max))
    assert numbers == list(range(100, 111))


def test_objects_of_different_numbers_differ_and_keys_name_them(content: ObjectContent) -> None:
    """Otherwise a server that mixes objects up would pass."""
    first = content.window(0, NBYTES)
    assert content.holds(first.copy(), 0, NBYTES)
    assert not content.holds(first.copy(), 1, NBYTES)
    assert not content.holds(first[:-1].copy(), 0, NBYTES)
    assert content.window(NUMBER_MAX - 1, NBYTES).nbytes == NBYTES
    changed = first.copy()
    changed[-1] ^= 1
    assert not content.holds(changed, 0, NBYTES)
    assert parse_key(object_key(Group.PUT, NBYTES, 12)) == (NBYTES, 12)


def cell_samples(cell: Cell, name: str, *durations_s: float) -> S3Measurement:
    """Samples of 10 requests each."""
    return S3Measurement(cell, name, tuple(S3Sample(s, 10, 10, s / 10, s / 5, 0.1, None) for s in durations_s))


def make_report(problem: str | None = None) -> S3Report:
    """Ours at half of the raw socket with 8 in flight, at a quarter with 32, twice as fast as RGW."""
    cells = [Cell(Operation.GET, 32 * MIB, in_flight) for in_flight in (8, 32)]
    measurements = [
        *(cell_samples(cell, "ours", 2.0, 2.0, 2.0) for cell in cells),
        *(cell_samples(cell, "rgw", 4.0, 5.0, 4.0) for cell in cells),
        *(
            cell_samples(cell, "raw_socket", raw_s, raw_s, 2 * raw_s)
            for cell, raw_s in zip(cells, (1.0, 0.5), strict=True)
        ),
    ]
    peers = {"ours": {"version": "this tree", "durability": "synced"}}
    absent = {"moto": "not installed"}
    return S3Report(
        {"commit": "abc"}, {"seed": 1}, peers, absent, measurements, {cells[0]: 12.0}, Disk(1e9, 1e-3), problem
    )


def test_ratios_are_of_medians_and_the_raw_socket_is_met_where_it_is_hardest() -> None:
    """The figure with a target must not be picked by luck."""
    found = s3_ratios(make_report().measurements)
    assert found["get_32mib_x8_ours_over_rgw"] == Spread(2.0, 2.0, 2.5)
    assert found["get_32mib_x8_ours_over_raw_socket"] == Spread(0.5, 0.5, 1.0)
    assert found["get_32mib_over_raw_socket"] == Spread(0.25, 0.25, 0.5)


def test_the_report_names_absent_peers_and_what_was_expected() -> None:
    """A peer that could not run is a fact of the run."""
    result = s3_json(make_report())
    assert result["absent"] == {"moto": "not installed"}
    assert result["expected_per_s"] == {"get_32mib_x8": 12.0}
    assert result["measurements"]["get_32mib_x8"]["ours"]["requests_per_s"]["median"] == 5.0
    assert result["measurements"]["get_32mib_x8"]["ours"]["server_cpu_s_per_request"] is None
    lines = s3_table(make_report()).splitlines()
    assert "moto is absent: not installed" in lines
    assert lines[-1] == "every byte and every key verified"
    assert s3_table(make_report("get/4096/1: wrong bytes")).splitlines()[-1] == "FAILED: get/4096/1: wrong bytes"


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    """Only where the extra is installed."""
    pytest.importorskip("matplotlib")
    s3_plot(make_report(), tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_put_is_expected_to_wait_for_the_disk_and_a_get_only_for_the_load() -> None:
    """Expected figures are written down from what was seen of load and disk alone."""
    disk = Disk(write_bytes_per_s=1e6, sync_s=0.01)
    assert s3.expected_per_s(Cell(Operation.GET, 1000, 8), 5000.0, disk) == 5000.0
    assert s3.expected_per_s(Cell(Operation.PUT, 1000, 8), 5000.0, disk) == pytest.approx(800.0)
    assert s3.expected_per_s(Cell(Operation.PUT, 10_000, 8), 5000.0, disk) == pytest.approx(100.0)


def test_a_failing_peer_is_left_out_and_ours_ends_the_run() -> None:
    """The comparison goes on without a peer; nothing is published about a server of ours that fails."""
    absent: dict[str, str] = {}
    for name in (PeerName.RGW, PeerName.OURS):
        peer = Peer(name, Target("", "", ""), "", "", list, lambda: None)
        if name is PeerName.OURS:
            with pytest.raises(SampleFailed), s3._failure_of("ours", peer, absent):
                raise SampleFailed("wrong")
        else:
            with s3._failure_of("rgw", peer, absent):
                raise SampleFailed("timeout")
    assert absent == {"rgw": "timeout"}


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    """The reason goes into the report."""
    with pytest.raises(PeerUnavailable, match="moto"), running_moto(str(tmp_path / "python"), None):
        pass


def test_a_profile_counts_a_function_once_a_sample_however_deep_it_recurs() -> None:
    """Shares above 100 % would explain nothing."""
    own, inclusive = shares(["main (a.py:1);walk (a.py:2);walk (a.py:3) 3", "main (a.py:1) 1"])
    assert own == {"walk (a.py)": 3, "main (a.py)": 1}
    assert inclusive == {"walk (a.py)": 3, "main (a.py)": 4}


def test_processor_time_grows_with_work() -> None:
    """Figures per request are differences of it."""
    before_s = cpu_seconds([os.getpid()])
    while (now_s := cpu_seconds([os.getpid()])) == before_s:
        np.arange(1 << 20).sum()
    assert before_s is not None
    assert now_s is not None
    assert now_s > before_s
    assert cpu_seconds([1 << 30]) is None


@pytest.mark.parametrize("wrong", [["--sizes", "3"], ["--peers", "minio"], ["--seconds", "0"], ["--in-flight", "8,8"]])
def test_wrong_use_is_said_before_anything_starts(wrong: list[str]) -> None:
    """Status 2, as argparse has it."""
    with pytest.raises(SystemExit) as left:
        run(["s3", *wrong])
    assert left.value.code == 2
