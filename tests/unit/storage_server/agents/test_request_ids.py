"""Request ids: taken once, bounded by key, remembered across starts."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from pathlib import Path
from unittest import mock

import pytest

from descriptors.errors import CallerError, ObjectCacheError
from storage_server.agents import request_id_log
from storage_server.agents.request_id_log import WARN_EVERY_S, RequestIdLog
from storage_server.agents.requests import REMEMBER_S, RequestTable
from storage_server.agents.rules import used_ids
from storage_server.agents.rules.used_ids import IDS_MAX, UsedIds


def test_one_keys_request_ids_do_not_use_up_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used_ids, "IDS_MAX", 4)
    table = RequestTable()
    for index in range(2):
        table.begin("greedy", f"id-{index}", 0.0)
    with pytest.raises(ObjectCacheError, match="SlowDown"):
        table.begin("greedy", "id-2", 1.0)
    table.begin("modest", "id-0", 1.0)
    table.begin("greedy", "id-2", REMEMBER_S + 2.0)


def test_a_fleet_of_one_key_is_not_told_to_slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests a second as a server carries out; 145 were too many. Every id of the last half hour is refused
    again, and what is older is forgotten.
    """
    monkeypatch.setattr(used_ids, "SLOTS", 1 << 6)
    monkeypatch.setattr(used_ids, "IDS_PER_SLICE", 48)
    per_s, step_s = 4600, 60.0  # a slice is a 1,024th, so each id stands for 1,024
    each_step = int(per_s * step_s / 1024)
    ids = UsedIds(bytes(16), REMEMBER_S)
    steps = int(1.5 * REMEMBER_S / step_s)
    for step in range(steps):
        for number in range(each_step):
            assert ids.has_room("fleet", step * step_s)
            ids.add(ids.fingerprint("fleet", f"{step}-{number}"), "fleet", step * step_s)
    now_s = (steps - 1) * step_s
    remembered = range(int((now_s - REMEMBER_S) / step_s) + 1, steps)
    for step in remembered:
        assert all(ids.has(ids.fingerprint("fleet", f"{step}-{number}"), now_s) for number in range(each_step))
    assert not any(ids.has(ids.fingerprint("fleet", f"0-{number}"), now_s) for number in range(each_step))
    assert not ids.has(ids.fingerprint("other", f"{steps - 1}-0"), now_s)
    assert per_s < IDS_MAX / 2 / REMEMBER_S


def test_a_quiet_key_s_ids_are_forgotten_in_time() -> None:
    """Though its slice would take more."""
    ids = UsedIds(bytes(16), 100.0)
    for now_s in range(0, 2000, 10):
        ids.add(ids.fingerprint("k", str(now_s)), "k", float(now_s))
    assert ids.has(ids.fingerprint("k", "1900"), 1990.0)
    assert not ids.has(ids.fingerprint("k", "1500"), 1990.0)


async def test_an_id_stays_taken_while_its_request_runs() -> None:
    """However long that takes."""
    table = RequestTable()
    first = table.begin("k", "same", 0.0)
    with pytest.raises(CallerError, match="RequestReplayed"):
        table.begin("k", "same", REMEMBER_S + 1.0)
    await table.run(first, asyncio.sleep(0))
    await table.run(table.begin("k", "same", REMEMBER_S + 2.0), asyncio.sleep(0))


def test_the_log_of_ids_forgets_what_cannot_be_replayed_and_survives_garbage(tmp_path: Path) -> None:
    """Two files, of which the older is started anew; a torn line is passed over."""
    log = RequestIdLog(tmp_path, keep_s=100.0)
    secret, used = log.load(0.0, 0.0)
    assert list(used) == []
    for unix_s in range(0, 1000, 10):
        log.append(unix_s, float(unix_s), float(unix_s))
    log.close()
    with (tmp_path / "used-ids.0").open("ab") as file:
        file.write(b"1 k\n\xff\n995.0 -00000000000003f\nnan 0000000000000042\n995.0 00000000000000zz\n1 2 3\n")
        file.write(b"995.000 00000000000003e")
    again, used = RequestIdLog(tmp_path, keep_s=100.0).load(1000.0, 1000.0)
    assert again == secret
    assert sorted(used) == [(unix_s, float(unix_s)) for unix_s in range(910, 1000, 10)]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2000


@pytest.mark.parametrize(
    "steps",
    [
        [(1000.0, 0.0), (4600.0, 1.0), (1002.0, 2.0)],
        [(5000.0, 0.0), (4400.0, 1.0), (3800.0, 2.0), (3805.0, 3.0)],
        [(1000.0, 0.0), (1101.0, 101.0), (1100.9, 101.1)],
    ],
    ids=["an hour ahead and back", "twice ten minutes back", "a moment back after a rotation"],
)
def test_a_clock_that_is_set_makes_no_id_forgotten(tmp_path: Path, steps: list[tuple[float, float]]) -> None:
    """A replay was carried out after a restart: the file of the last ids had been started anew."""
    log = RequestIdLog(tmp_path, keep_s=100.0)
    log.load(*steps[0])
    for number, (unix_s, steady_s) in enumerate(steps):
        log.append(number, unix_s, steady_s)
    log.close()
    unix_s, _ = steps[-1]
    found = {each for each, _ in RequestIdLog(tmp_path, keep_s=100.0).load(unix_s + 1.0, 0.0)[1]}
    still_valid = [number for number, (at_s, _) in enumerate(steps) if at_s > unix_s - 99.0]
    assert len(still_valid) >= 2
    assert found >= set(still_valid)


def test_a_last_line_without_an_end_does_not_spoil_the_next_process(tmp_path: Path) -> None:
    log = RequestIdLog(tmp_path, keep_s=1000.0)
    log.load(0.0, 0.0)
    log.append(1, 1.0, 1.0)
    log.close()
    with (tmp_path / f"used-ids.{log._current}").open("ab") as file:
        file.write(b"1800000000.1")
    again = RequestIdLog(tmp_path, keep_s=1000.0)
    again.load(2.0, 0.0)
    again.append(2, 2.0, 1.0)
    again.close()
    assert {each for each, _ in RequestIdLog(tmp_path, keep_s=1000.0).load(3.0, 0.0)[1]} == {1, 2}


def test_ids_are_known_after_a_restart_and_two_directories_have_two_secrets(tmp_path: Path) -> None:
    logs = [RequestIdLog(tmp_path / name, keep_s=REMEMBER_S) for name in "ab"]
    for name in "ab":
        (tmp_path / name).mkdir()
    secrets = [log.load(1000.0, 1000.0)[0] for log in logs]
    assert secrets[0] != secrets[1]
    table = RequestTable(lambda fingerprint: logs[0].append(fingerprint, 1000.0, 1000.0))
    table.restore(secrets[0], [])
    table.begin("k", "used", 5.0)
    logs[0].close()
    secret, used = RequestIdLog(tmp_path / "a", keep_s=REMEMBER_S).load(1010.0, 1010.0)
    table = RequestTable()
    table.restore(secret, used)
    with pytest.raises(CallerError, match="RequestReplayed"):
        table.begin("k", "used", 1010.0)
    table.begin("other", "used", 1010.0)


def test_ids_that_a_disk_error_loses_are_warned_of_and_not_each_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay of such an id is carried out after a restart, so somebody must be able to know."""
    log = RequestIdLog(tmp_path, keep_s=1000.0)
    log.load(0.0, 0.0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with caplog.at_level(logging.WARNING), mock.patch.object(os, "write", side_effect=full):
        for index in range(5):
            log.append(index, float(index), float(index))
        log.append(6, WARN_EVERY_S + 1.0, WARN_EVERY_S + 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "request ids are not remembered across a restart (1 so far): [Errno 28] No space left on device",
        "request ids are not remembered across a restart (6 so far): [Errno 28] No space left on device",
    ]
    log.append(7, WARN_EVERY_S + 2.0, WARN_EVERY_S + 2.0)
    log.close()
    assert list(RequestIdLog(tmp_path, keep_s=1000.0).load(100.0, 100.0)[1]) == [(7, WARN_EVERY_S + 2.0)]


@pytest.mark.parametrize("torn", ["a line", "the secret"])
def test_a_line_that_the_disk_took_in_part_spoils_no_other(tmp_path: Path, torn: str) -> None:
    log = RequestIdLog(tmp_path, keep_s=1000.0)
    whole_write = os.write
    if torn == "a line":
        log.load(0.0, 0.0)
    with mock.patch.object(os, "write", lambda fd, line: whole_write(fd, line[:7])):
        if torn == "the secret":
            log.load(0.0, 0.0)
        log.append(1, 1.0, 1.0)
    log.append(2, 2.0, 2.0)
    log.close()
    assert list(RequestIdLog(tmp_path, keep_s=1000.0).load(100.0, 100.0)[1]) == [(2, 2.0)]


def test_a_log_that_could_not_be_opened_is_opened_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error may have been of the moment: no ids would be kept until a restart."""
    log = RequestIdLog(tmp_path / "gone", keep_s=1000.0)
    with caplog.at_level(logging.WARNING):
        log.load(0.0, 0.0)
        log.append(1, 1.0, 1.0)
    assert len(caplog.records) == 1
    (tmp_path / "gone").mkdir()
    log.append(2, 2.0, 2.0)
    log.close()
    assert list(RequestIdLog(tmp_path / "gone", keep_s=1000.0).load(100.0, 100.0)[1]) == [(2, 2.0)]


def test_a_server_that_is_often_restarted_does_not_write_to_one_file_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_id_log, "LINES_MAX", 50)
    for start in range(20):
        at_s = 60.0 * start
        log = RequestIdLog(tmp_path, keep_s=100.0)
        _, used = log.load(at_s, 0.0)
        known = {fingerprint for fingerprint, _ in used}
        assert known >= {number for number in range(10 * start) if at_s - 60.0 * (number // 10) < 100.0}
        for number in range(10 * start, 10 * start + 10):
            log.append(number, at_s, 0.0)
        log.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 32 * 2 * (50 + 20)
