"""A pass of the lifecycle rules lets the event loop go on, whatever one owner makes of buckets and rules."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from descriptors.lifecycle import DAY_S, LifecycleRule
from descriptors.lifecycle import expiry as expiry_of
from descriptors.objects import ListRequest, ReadRequest
from storage_server.home.embedded import EmbeddedStore
from storage_server.kernel.index import queries
from storage_server.kernel.rules.rows import rules_of
from storage_server.kernel.upkeep import lifecycle
from tests.support.store_bed import opened, put

BUCKET = "bbb"
LATER_S = 9 * DAY_S


async def keys_of(store: EmbeddedStore, bucket: str = BUCKET) -> list[str]:
    return [info.key for info in (await store.objects.list_objects("k", ListRequest(bucket))).objects]


async def test_many_rules_are_compared_with_objects_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand rules of ten tags kept the event loop for a second for each 500 objects of their bucket."""
    threads = set[int]()

    def recorded(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return expiry_of(*given)

    monkeypatch.setattr(lifecycle, "expiry", recorded)
    store = await opened(tmp_path)
    try:
        await store.objects.create_bucket("k", BUCKET)
        for number in range(50):
            await put(store, f"key{number}", b"data")
        rules = [LifecycleRule(f"rule{number}", prefix="key4", expire_days=1) for number in range(50)]
        assert await store.lifecycle.carry_out(BUCKET, rules, time.time() + LATER_S, DAY_S) == (11, 0)
        assert len(await keys_of(store)) == 39
    finally:
        store.close()
    assert threads
    assert threading.get_ident() not in threads


async def test_a_pass_looks_at_buckets_with_rules_only_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """250,000 buckets without rules kept the event loop for four seconds. A bucket that is deleted meanwhile ended the
    pass for those behind it.
    """
    monkeypatch.setattr(lifecycle, "BUCKETS_PER_STEP", 2)
    store = await opened(tmp_path)
    looked_at: list[str] = []
    rules_of_bucket = queries.lifecycle

    def recorded(db: Any, name: str) -> list[LifecycleRule]:
        looked_at.append(name)
        return rules_of_bucket(db, "gone" if name == "bbb3" else name)

    try:
        for number in range(9):
            await store.objects.create_bucket("k", f"bbb{number}")
        await store.objects.create_bucket("k", BUCKET)
        await put(store, "key", b"data")
        rules = [LifecycleRule("rule", expire_days=1)]
        for bucket in (BUCKET, "bbb3", "bbb5", "bbb7"):
            await store.objects.set_lifecycle("k", bucket, rules)
        monkeypatch.setattr(queries, "lifecycle", recorded)
        await store.lifecycle.carry_all_out(time.time() + LATER_S, DAY_S)
        assert await keys_of(store) == []
    finally:
        store.close()
    assert looked_at == [BUCKET, "bbb3", "bbb5", "bbb7"]


@pytest.mark.parametrize("count", [2, 200])
async def test_many_rules_of_a_bucket_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """HEADs of a hundred buckets with a thousand rules each, over 64 connections, had every call of others wait for
    three seconds.
    """
    threads = set[int]()

    def recorded(text: str) -> tuple[LifecycleRule, ...]:
        threads.add(threading.get_ident())
        return rules_of(text)

    monkeypatch.setattr(queries, "rules_of", recorded)
    store = await opened(tmp_path)
    try:
        await store.objects.create_bucket("k", BUCKET)
        await put(store, "key", b"data")
        rules = [LifecycleRule(f"rule{number}", expire_days=5 + number) for number in range(count)]
        await store.objects.set_lifecycle("k", BUCKET, rules)
        threads.clear()
        asked = ReadRequest(BUCKET, "key")
        head = await store.objects.head_object("k", asked)
        async with store.objects.open_object("k", asked) as read:
            assert read.head == head
        assert await store.objects.own_lifecycle("k", BUCKET) == rules
    finally:
        store.close()
    assert head.expiry is not None
    assert head.expiry[1] == "rule0"
    assert (threading.get_ident() in threads) == (count == 2)
