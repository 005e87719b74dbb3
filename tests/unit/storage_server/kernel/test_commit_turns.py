"""The committer's transactions: callers take turns, and one that is long enough takes no further change."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from objectcache.adapters.caller import CALLER
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.index import committer as committer_module
from storage_server.kernel.index.commit_queue import BATCH_MAX, CommitQueue, Job
from tests.support.store_bed import content, get, opened, put
from tests.support.waiting import LIMIT_S

MANY = 40


def job(caller: str) -> Job:
    job = object.__new__(Job)
    job.caller = caller
    return job


def taken(queue: CommitQueue) -> list[str]:
    return [job.caller for job in queue.take(0.0).jobs]


def test_callers_take_turns() -> None:
    queue = CommitQueue()
    for caller in "aaaabbc":
        queue.put(job(caller))
    assert taken(queue) == [*"abcabaa"]
    assert taken(queue) == []


def test_a_callers_changes_keep_their_order_also_when_they_are_put_back() -> None:
    queue = CommitQueue()
    jobs = [job(caller) for caller in "aaab"]
    for each in jobs:
        queue.put(each)
    batch = queue.take(0.0).jobs
    assert batch == [jobs[0], jobs[3], jobs[1], jobs[2]]
    queue.put(job("c"))
    queue.put_back(batch[1:])
    again = queue.take(0.0).jobs
    assert [each.caller for each in again] == [*"baca"]
    assert [each for each in again if each.caller == "a"] == jobs[1:3]


def test_one_callers_many_changes_leave_each_batch_room_for_others() -> None:
    queue = CommitQueue()
    for _ in range(3 * BATCH_MAX):
        queue.put(job("greedy"))
    queue.put(job("other"))
    assert taken(queue)[:2] == ["greedy", "other"]
    assert len(taken(queue)) == BATCH_MAX


def test_a_queue_is_over_when_all_that_came_before_its_end_was_taken() -> None:
    queue = CommitQueue()
    for _ in range(BATCH_MAX + 1):
        queue.put(job("a"))
    queue.end()
    queue.consider("file")
    assert queue.take(None).files == {"file"}
    assert not queue.is_over
    assert len(taken(queue)) == 1
    assert queue.is_over


async def carried_out(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In which order the changes of two callers were carried out; the second one's came last."""
    monkeypatch.setattr(committer_module, "TRANSACTION_S", 0.0)
    order, go_on = list[str](), threading.Event()

    def change_of(caller: str) -> asyncio.Task[Any]:
        CALLER.set(caller)
        return asyncio.create_task(store.committer.commit(lambda tx: order.append(caller)))

    first = asyncio.create_task(store.committer.commit(lambda tx: go_on.wait(LIMIT_S)))
    await asyncio.sleep(0)
    changes = [change_of("greedy") for _ in range(MANY)] + [change_of("other")]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, *changes)
    return order


async def test_no_change_waits_for_all_that_another_caller_has_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 copies of an object of 1,000 parts had another key's PUT of 4 KiB wait for 20 s."""
    store = await opened(tmp_path)
    order = await carried_out(store, monkeypatch)
    store.close()
    assert len(order) == MANY + 1
    assert order.index("other") <= 2


async def test_a_transaction_that_is_long_enough_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is carried out and durable, with bytes that were written once."""
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    before = store.committer.transaction_count
    monkeypatch.setattr(committer_module, "TRANSACTION_S", 0.0)
    written, write = list[str](), committer_module._write

    def noted(pending: Any, disk: Any) -> Any:
        written.append(pending.file.file_id)
        return write(pending, disk)

    monkeypatch.setattr(committer_module, "_write", noted)
    keys = {f"key{number}": content(1000, number) for number in range(MANY)}
    await asyncio.gather(*(put(store, key, data) for key, data in keys.items()))
    assert store.committer.transaction_count - before == MANY
    assert len(written) == MANY
    store.close()
    store = await opened(tmp_path)
    assert {key: await get(store, key) for key in keys} == keys
    store.close()


async def test_what_is_left_when_the_committer_closes_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(tmp_path)
    monkeypatch.setattr(committer_module, "TRANSACTION_S", 0.0)
    changes = [asyncio.create_task(store.committer.commit(lambda tx: None)) for _ in range(MANY)]
    await asyncio.sleep(0)
    store.close()
    assert await asyncio.gather(*changes) == [None] * MANY


async def test_a_key_that_is_put_meanwhile_is_opened_in_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload of a dirty chunk found the object before a put, and the extents behind it: none."""
    store = await opened(tmp_path)
    await store.objects.create_bucket("k", "bbb")
    await put(store, "key", b"old")
    here, was_asked = store.reader.here, list[bool]()

    def replace_behind(query: Any) -> Any:
        found = here(query)
        if not was_asked:
            with closing(sqlite3.connect(tmp_path / "index.sqlite3")) as db, db:
                db.execute("UPDATE extents SET version = version + 1000")
                db.execute("UPDATE objects SET version = version + 1000")
        was_asked.append(True)
        return found

    monkeypatch.setattr(store.reader, "here", replace_behind)
    async with store.objects.open_stored("bbb", "key") as (stored, extents):
        assert stored is not None
        assert len(extents) == 1
    store.close()


async def test_one_callers_changes_that_wait_leave_room_for_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,300 copies of one key had all writes of others refused, or wait for a minute."""
    monkeypatch.setattr(committer_module, "PENDING_MAX", 64)
    store = await opened(tmp_path)
    go_on = threading.Event()

    def change_of(caller: str) -> asyncio.Task[Any]:
        CALLER.set(caller)
        return asyncio.create_task(store.committer.commit(lambda tx: go_on.wait(LIMIT_S)))

    changes = [change_of(caller) for caller in ("one", "two", "three", "four") for _ in range(64)]
    others = [change_of(caller) for caller in ("five", "")]
    await asyncio.sleep(0)
    refused = [change.done() for change in changes]
    assert [refused[at : at + 64].count(False) for at in range(0, 256, 64)] == [32, 16, 8, 4]
    assert not any(change.done() for change in others)
    go_on.set()
    await asyncio.gather(*changes, return_exceptions=True)
    assert await asyncio.gather(*others) == [True, True]
    assert not store.committer.is_used
    store.close()
