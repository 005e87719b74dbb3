"""`bench s3` measures what it says, names who could not take part, and never passes over wrong bytes."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.beds.canned import serve
from bench.beds.kv_peers.work import S3Target
from bench.beds.memory import cpu_seconds
from bench.beds.processes import BaselineError
from bench.beds.s3_jobs import (
    LIST_NBYTES,
    NUMBER_MAX,
    Group,
    Job,
    Kind,
    ObjectContent,
    Outcome,
    make_object_content,
    object_key,
    parse_key,
)
from bench.beds.s3_load import run_job
from bench.beds.s3_servers import Peer, PeerName, running_moto
from bench.cli import run
from bench.core.lines import from_line, to_line
from bench.core.show import as_text
from bench.experiments.s3 import run as s3
from bench.experiments.s3.results import Cell, expected_per_s, measurement_of, plot, ratios, show
from bench.experiments.s3.run import SampleFailed
from bench.figures import load
from descriptors.units import KIB, MIB
from objectcache.calibration.samples import Spread
from objectcache.calibration.servers import BUCKET, REGION

LISTED = 2300
RESULT = load()["s3"]
DISK = {"write_bytes_per_s": 1e6, "sync_s": 0.01}
NBYTES = 100 * KIB


def make_job(kind: Kind, url: str, count: int = 6, **changes: Any) -> Job:
    """A small job on a server of this test."""
    fields = {"group": Group.GET, "nbytes": NBYTES, "in_flight": 3, "count_max": count, "seconds": 30.0, **changes}
    return Job(kind=kind, target=S3Target(url, "key", "secret", BUCKET, REGION), **fields)


@contextmanager
def canned_server(content: ObjectContent) -> Iterator[str]:
    """The canned answers, served from a thread that ends with this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener, content, LISTED), daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def content() -> ObjectContent:
    """What the load puts and expects."""
    return make_object_content(NBYTES, seed=5)


@pytest.mark.bench_smoke
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


def test_wrong_bytes_that_were_put_are_found_when_they_are_read_back(content: ObjectContent) -> None:
    """A server that acknowledges and stores something else must not win."""
    with canned_server(make_object_content(NBYTES, seed=6)) as url:
        assert run_job(make_job(Kind.PUT, url), content).problem is None
        assert run_job(make_job(Kind.CHECK, url), content).problem == f"get/{NBYTES}/000000000: wrong bytes"


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
    assert from_line(Job, to_line(job)) == job
    outcome = Outcome(1.0, 2.5, 2, 2, (0.25, 0.5), 0.1, "no")
    assert from_line(Outcome, to_line(outcome)) == outcome


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


def peer_of(name: PeerName) -> Peer:
    """Something that runs, as far as a result tells."""
    return Peer(name, S3Target("", "", "", "", ""), "synced", "this tree", list)


def cell_samples(cell: Cell, *durations_s: float) -> dict[str, Any]:
    """Samples of 10 requests each."""
    sample = {"count": 10, "items": 10, "client_cpu_s": 0.1, "server_cpu_s": None}
    times = ({"duration_s": each_s, "p50_s": each_s / 10, "p99_s": each_s / 5} for each_s in durations_s)
    return measurement_of(cell, [{**sample, **each} for each in times])


def measurements() -> dict[str, dict[str, Any]]:
    """Ours at half of the raw socket with 8 in flight, at a quarter with 32, twice as fast as RGW."""
    cells = [Cell(Kind.GET, 32 * MIB, in_flight) for in_flight in (8, 32)]
    return {
        cell.name: {
            "rgw": cell_samples(cell, 4.0, 5.0, 4.0),
            "ours": cell_samples(cell, 2.0, 2.0, 2.0),
            "raw_socket": cell_samples(cell, raw_s, raw_s, 2 * raw_s),
        }
        for cell, raw_s in zip(cells, (1.0, 0.5), strict=True)
    }


def test_ratios_are_of_medians_and_the_raw_socket_is_met_where_it_is_hardest() -> None:
    """The figure with a target must not be picked by luck."""
    assert measurements()["get_32mib_x8"]["ours"]["requests_per_s"] == Spread(5.0, 5.0, 5.0)
    assert measurements()["get_32mib_x8"]["ours"]["server_cpu_s_per_request"] is None
    found = ratios(measurements())
    assert found["get_32mib_x8_ours_over_rgw"] == Spread(2.0, 2.0, 2.5)
    assert found["get_32mib_x8_ours_over_raw_socket"] == Spread(0.5, 0.5, 1.0)
    assert found["get_32mib_over_raw_socket"] == Spread(0.25, 0.25, 0.5)


def test_what_is_shown_names_absent_peers_and_what_was_not_measured() -> None:
    """A peer that could not run is a fact of the run."""
    absent = {"moto": "python3 has no moto.server (pip install 'moto[server]')"}
    found: Any = {**RESULT, "absent": absent, "ratio_spreads": {**RESULT["ratio_spreads"]}}
    del found["ratio_spreads"]["get_32mib_received_over_raw_socket"]
    lines = as_text(found, show(found)).splitlines()
    assert "moto is absent: python3 has no moto.server (pip install 'moto[server]')" in lines
    assert "canned: this tree; nothing is stored" in lines
    (row,) = (line.split() for line in lines if line.startswith("the same, received"))
    assert row[-2:] == ["not", "measured"]
    assert lines[-1] == "everything verified"
    wrong = {**RESULT, "problem": "get/4096/1: wrong bytes"}
    assert as_text(wrong, show(wrong)).splitlines()[-1] == "FAILED: get/4096/1: wrong bytes"


@pytest.mark.slow
def test_the_chart_is_drawn(tmp_path: Path) -> None:
    """Only where the extra is installed."""
    pytest.importorskip("matplotlib")
    plot(RESULT, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_put_is_expected_to_wait_for_the_disk_and_a_get_only_for_the_load() -> None:
    """Expected figures are written down from what was seen of load and disk alone."""
    assert expected_per_s(Cell(Kind.GET, 1000, 8), 5000.0, DISK) == 5000.0
    assert expected_per_s(Cell(Kind.PUT, 1000, 8), 5000.0, DISK) == pytest.approx(800.0)
    assert expected_per_s(Cell(Kind.PUT, 10_000, 8), 5000.0, DISK) == pytest.approx(100.0)


def test_a_failing_peer_is_left_out_and_ours_ends_the_run() -> None:
    """The comparison goes on without a peer; nothing is published about a server of ours that fails."""
    absent: dict[str, str] = {}
    for name in (PeerName.RGW, PeerName.OURS):
        peer = peer_of(name)
        if name is PeerName.OURS:
            with pytest.raises(SampleFailed), s3.failure_of("ours", peer, absent):
                raise SampleFailed("wrong")
        else:
            with s3.failure_of("rgw", peer, absent):
                raise SampleFailed("timeout")
    assert absent == {"rgw": "timeout"}


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    """The reason goes into the report."""
    with pytest.raises(BaselineError, match="moto"), running_moto(str(tmp_path / "python"), None):
        pass


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


@pytest.mark.slow
def test_a_result_says_nothing_of_where_an_interpreter_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, python = tmp_path / "s3.json", tmp_path / "bin" / "python3"
    assert run(["s3", "--smoke", "--peers", "moto,canned", "--moto", str(python), "--json", str(file)]) == 0
    assert "python3 has no moto.server" in file.read_text()
    assert str(python) not in file.read_text() + capsys.readouterr().out
