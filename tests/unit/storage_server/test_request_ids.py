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
from storage_server.request_id_log import WARN_EVERY_S, RequestIdLog, UsedId
from storage_server.requests import REMEMBER_S, RequestTable


def test_one_keys_request_ids_do_not_use_up_anothers() -> None:
    table = RequestTable(2)
    for index in range(2):
        table.begin("greedy", f"id-{index}", 0.0)
    with pytest.raises(ObjectCacheError, match="SlowDown"):
        table.begin("greedy", "id-2", 1.0)
    table.begin("modest", "id-0", 1.0)


async def test_an_id_stays_taken_while_its_request_runs() -> None:
    """However long that takes."""
    table = RequestTable(10)
    first = table.begin("k", "same", 0.0)
    with pytest.raises(CallerError, match="RequestReplayed"):
        table.begin("k", "same", REMEMBER_S + 1.0)
    await table.run(first, asyncio.sleep(0))
    await table.run(table.begin("k", "same", REMEMBER_S + 2.0), asyncio.sleep(0))


def test_the_log_of_ids_forgets_what_cannot_be_replayed_and_survives_garbage(tmp_path: Path) -> None:
    """Two files, of which the older is started anew; a torn line is passed over."""
    log = RequestIdLog(tmp_path, keep_s=100.0)
    assert log.load(0.0) == []
    for unix_s in range(0, 1000, 10):
        log.append(UsedId("k", f"id-{unix_s}", float(unix_s)))
    log.close()
    with (tmp_path / "request-ids.0").open("ab") as file:
        file.write(b'[1, "k"\n\xff\n{"a":1}\n[995.0, "torn')
    kept = {used.request_id for used in RequestIdLog(tmp_path, keep_s=100.0).load(1000.0)}
    assert kept == {f"id-{unix_s}" for unix_s in range(910, 1000, 10)}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2000


def test_ids_that_a_disk_error_loses_are_warned_of_and_not_each_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay of such an id is carried out after a restart, so somebody must be able to know."""
    log = RequestIdLog(tmp_path, keep_s=1000.0)
    log.load(0.0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with caplog.at_level(logging.WARNING), mock.patch.object(os, "write", side_effect=full):
        for index in range(5):
            log.append(UsedId("k", f"lost-{index}", float(index)))
        log.append(UsedId("k", "lost-later", WARN_EVERY_S + 1.0))
    assert [record.getMessage() for record in caplog.records] == [
        "request ids are not remembered across a restart (1 so far): [Errno 28] No space left on device",
        "request ids are not remembered across a restart (6 so far): [Errno 28] No space left on device",
    ]
    log.append(UsedId("k", "kept", WARN_EVERY_S + 2.0))
    log.close()
    assert [used.request_id for used in RequestIdLog(tmp_path, keep_s=1000.0).load(100.0)] == ["kept"]


def test_a_line_that_the_disk_took_in_part_spoils_no_other(tmp_path: Path) -> None:
    log = RequestIdLog(tmp_path, keep_s=1000.0)
    log.load(0.0)
    whole_write = os.write
    with mock.patch.object(os, "write", lambda fd, line: whole_write(fd, line[:7])):
        log.append(UsedId("k", "torn", 1.0))
    log.append(UsedId("k", "kept", 2.0))
    log.close()
    assert [used.request_id for used in RequestIdLog(tmp_path, keep_s=1000.0).load(100.0)] == ["kept"]


def test_a_log_that_could_not_be_opened_is_opened_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error may have been of the moment: no ids would be kept until a restart."""
    log = RequestIdLog(tmp_path / "gone", keep_s=1000.0)
    with caplog.at_level(logging.WARNING):
        log.load(0.0)
        log.append(UsedId("k", "lost", 1.0))
    assert len(caplog.records) == 1
    (tmp_path / "gone").mkdir()
    log.append(UsedId("k", "kept", 2.0))
    log.close()
    assert [used.request_id for used in RequestIdLog(tmp_path / "gone", keep_s=1000.0).load(100.0)] == ["kept"]
