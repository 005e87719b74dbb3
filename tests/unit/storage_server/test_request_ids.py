"""Request ids: taken once, bounded by key, remembered across starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from descriptors.errors import CallerError, ObjectCacheError
from storage_server.request_id_log import RequestIdLog, UsedId
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
