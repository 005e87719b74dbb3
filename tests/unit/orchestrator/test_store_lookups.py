"""Lookups whose prompts cannot be named, or not in time, and a store that is not there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from descriptors.descriptor import Accept
from descriptors.errors import CallerError, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.recompute import Advice, AdviceRequest, Choice, DeliveryCosts, PrefillCosts
from nixl_client.client import Client
from nixl_client.connectors.vllm.naming import Deployment, KeyChain
from nixl_client.connectors.vllm_tier.rules.published import TierNames
from objectcache.orchestrator.rules.engine_metrics import Published
from objectcache.orchestrator.rules.prediction import StoredPrefix
from objectcache.orchestrator.settings import StoreSettings
from objectcache.orchestrator.store_lookups import (
    ENDPOINTS_MAX,
    FAILURES_MAX,
    KEYS_MAX,
    RANKS_ASKED_MAX,
    StoreLookups,
    lookup_key,
    named_chunks,
)

TOKENS = list(range(64))


def published() -> Published:
    """Chunks of 16 tokens."""
    return Published(Deployment("model", "bfloat16", 16), ChunkLayout(2, 16, 4096), "http://127.0.0.1:1", "bucket")


def lookups(timeout_s: float) -> StoreLookups:
    return StoreLookups(StoreSettings(access_key="a", secret_key="b", timeout_s=timeout_s))


async def test_prompts_that_take_long_to_name_do_not_switch_the_store_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's long prompts would otherwise take the store from all."""
    ended = threading.Event()

    def keys(self: KeyChain, tokens: Sequence[int], count: int) -> tuple[str, ...]:
        ended.wait(60)
        return ()

    monkeypatch.setattr(KeyChain, "keys", keys)
    store = lookups(0.02)
    try:
        for _ in range(2 * FAILURES_MAX):
            assert await store.find(["engine"], published(), TOKENS, "") is None
        assert (store.count, store.failure_count) == (0, 0)
    finally:
        ended.set()
        store.close()


async def test_engines_with_other_chunks_take_turns_at_having_prompts_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine that publishes chunks of one token would otherwise keep the thread from all others."""
    named: list[int] = []
    go_on = threading.Event()

    def keys(self: KeyChain, tokens: Sequence[int], count: int) -> tuple[str, ...]:
        go_on.wait(60)
        named.append(count)
        return ()

    monkeypatch.setattr(KeyChain, "keys", keys)
    store, costly, other = lookups(60.0), published(), published()
    costly = replace(costly, names=Deployment("model", "bfloat16", 1), layout=ChunkLayout(2, 1, 4096))
    try:
        asked = [
            asyncio.create_task(store.find([name], each, TOKENS, ""))
            for name, each in (("costly", costly), ("costly", costly), ("costly", costly), ("other", other))
        ]
        await asyncio.sleep(0)  # all of them have asked
        go_on.set()
        await asyncio.gather(*asked)
        assert named == [64, 4, 64, 64]
    finally:
        go_on.set()
        store.close()


async def test_prompts_without_names_are_no_failures_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(self: KeyChain, tokens: Sequence[int], count: int) -> tuple[str, ...]:
        raise ValueError("a token is no token")

    monkeypatch.setattr(KeyChain, "keys", keys)
    store = lookups(60.0)
    try:
        assert [await store.find(["engine"], published(), TOKENS, "") for _ in range(2 * FAILURES_MAX)] == [None] * 6
        assert (store.count, store.failure_count) == (0, 0)
    finally:
        store.close()


async def test_a_store_that_fails_is_left_alone_after_some_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def advise(self: Client, *_: object, **__: object) -> None:
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(Client, "advise", advise)
    store = lookups(60.0)
    try:
        for _ in range(3 * FAILURES_MAX):
            assert await store.find(["engine"], published(), TOKENS, "") is None
        assert store.count == store.failure_count == FAILURES_MAX
    finally:
        store.close()


async def test_a_refusal_is_no_failure_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine that published a bucket that is not there switched the store off for all engines."""

    def advise(self: Client, *_: object, **__: object) -> None:
        raise CallerError(ErrorCode.NO_SUCH_BUCKET, "the bucket does not exist", field="bucket")

    monkeypatch.setattr(Client, "advise", advise)
    store = lookups(60.0)
    try:
        for _ in range(3 * FAILURES_MAX):
            assert await store.find(["engine"], published(), TOKENS, "") is None
        assert store.count == store.failure_count == 3 * FAILURES_MAX
    finally:
        store.close()


async def test_the_store_is_asked_for_what_the_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def advise(self: Client, *_: object, accept: Accept | None) -> tuple[int, Advice]:
        asked.append(accept)
        return 2, Advice(Choice.PREFIX, 2, None, {}, None, 1e9)

    monkeypatch.setattr(Client, "advise", advise)
    store, accept = lookups(60.0), Accept(("kivi4-1",), "bfloat16", 0.12)
    lossy = replace(published(), accept=accept)
    try:
        for each in (published(), lossy):
            found = await store.find(["engine"], each, TOKENS, "")
            assert found is not None
        assert asked == [None, accept]
        assert lookup_key(published()) != lookup_key(lossy)
    finally:
        store.close()


def test_engines_share_a_lookup_only_if_their_chunks_have_one_shape() -> None:
    """The first engine's shape would otherwise be everybody's: its answer times its bytes, at its costs."""
    other = replace(published(), layout=ChunkLayout(2, 16, 8192))
    assert lookup_key(published()) != lookup_key(other)
    costly = replace(published(), prefill=PrefillCosts(1e6), loads=DeliveryCosts(9.0, 9.0, 9.0, 1.0))
    assert lookup_key(published()) == lookup_key(costly)


async def test_an_engines_costs_decide_no_lookup_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AdviceRequest] = []

    def advise(self: Client, keys: object, request: AdviceRequest, *_: object, **__: object) -> object:
        asked.append(request)
        return 2, Advice(Choice.PREFIX, 2, None, {}, None, 1e9)

    monkeypatch.setattr(Client, "advise", advise)
    store = lookups(60.0)
    try:
        costly = replace(published(), prefill=PrefillCosts(1e6), loads=DeliveryCosts(9.0, 9.0, 9.0, 1.0))
        found = [await store.find(["engine"], each, TOKENS, "") for each in (published(), costly)]
        assert found[0] == found[1]
        assert asked[0] == asked[1]
    finally:
        store.close()


async def test_a_store_that_fails_takes_no_other_store_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may publish an endpoint where nobody is, or none that can be one."""

    def look_up(self: StoreLookups, store: object, published: Published, *_: object) -> StoredPrefix:
        if published.endpoint.endswith(":1"):
            raise ConnectionRefusedError("nobody is there")
        return StoredPrefix(2, published.layout)

    monkeypatch.setattr(StoreLookups, "_look_up", look_up)
    store, good = lookups(60.0), replace(published(), endpoint="http://127.0.0.1:2")
    try:
        for wrong in (published(), replace(published(), endpoint="nonsense")):
            for _ in range(2 * FAILURES_MAX):
                assert await store.find(["wrong"], wrong, TOKENS, "") is None
        found = await store.find(["engine"], good, TOKENS, "")
        assert found is not None
        assert found.chunk_count == 2
        for number in range(3, 3 + 2 * ENDPOINTS_MAX):
            assert (
                await store.find(["engine"], replace(good, endpoint=f"http://127.0.0.1:{number}"), TOKENS, "")
                is not None
            )
        assert len(store._stores) == ENDPOINTS_MAX
    finally:
        store.close()


async def test_an_engine_that_publishes_ever_new_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures counted for each name, so every prompt waited for the store of a name that was new."""

    def look_up(self: StoreLookups, store: object, published: Published, *_: object) -> StoredPrefix:
        if published.bucket != "bucket":
            raise ConnectionRefusedError("nobody is there")
        return StoredPrefix(2, published.layout)

    monkeypatch.setattr(StoreLookups, "_look_up", look_up)
    store = lookups(60.0)
    try:
        for number in range(3 * FAILURES_MAX):
            assert await store.find(["hostile"], replace(published(), bucket=str(number)), TOKENS, "") is None
        assert store.count == FAILURES_MAX
        assert await store.find(["hostile", "other"], published(), TOKENS, "") is not None
        assert await store.find(["other"], published(), TOKENS, "") is not None
    finally:
        store.close()


async def test_a_lookup_for_which_nobody_waits_asks_for_no_further_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store kept a thread for the time of all ranks, one after the other."""
    asked: list[object] = []
    go_on = threading.Event()

    def advise(self: Client, keys: Sequence[str], *_: object, **__: object) -> tuple[int, Advice]:
        asked.append(keys)
        go_on.wait(60)
        return 0, Advice(Choice.PREFIX, 0, None, {}, None, 1e9)

    monkeypatch.setattr(Client, "advise", advise)
    store = lookups(0.02)
    try:
        wide = replace(published(), names=replace(published().names, tp_size=8))
        assert await store.find(["engine"], wide, TOKENS, "") is None
        go_on.set()
        store._threads.shutdown()
        assert len(asked) == 1
    finally:
        go_on.set()
        store.close()


async def test_all_ranks_of_a_deployment_share_the_bound_on_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 ranks of a prompt of 20,000 chunks would be 20 million keys."""
    counts: list[int] = []

    def advise(self: Client, keys: Sequence[str], *_: object, **__: object) -> tuple[int, Advice]:
        counts.append(len(keys))
        return 0, Advice(Choice.PREFIX, 0, None, {}, None, 1e9)

    monkeypatch.setattr(Client, "advise", advise)
    monkeypatch.setattr("objectcache.orchestrator.store_lookups.KEYS_MAX", 64)
    store = lookups(60.0)
    try:
        wide = replace(published(), names=replace(published().names, tp_size=8, pp_size=4))
        assert await store.find(["engine"], wide, list(range(16 * 1000)), "") is not None
        assert counts == [2] * RANKS_ASKED_MAX
    finally:
        store.close()


def test_an_engine_cannot_have_any_number_of_chunks_named() -> None:
    """It says how many tokens a chunk has, how many are hashed at a time, and how many ranks write its parts."""
    deployment = Deployment("m", "bfloat16", 1, tp_size=1024)
    greedy = Published(deployment, ChunkLayout(2, 1, 4096), "http://127.0.0.1:1", "bucket")
    keys = named_chunks(greedy, list(range(100_000)), "")
    assert len(keys) <= RANKS_ASKED_MAX
    assert sum(map(len, keys)) * deployment.rank_count / len(keys) <= KEYS_MAX
    tier = Published(
        TierNames("vllm/m/0/", bytes(32), 0, 1), ChunkLayout(1, 1000, 4096), "http://127.0.0.1:1", "bucket"
    )
    (keys,) = named_chunks(tier, list(range(1_000_000)), "")
    assert len(keys) == KEYS_MAX // 1000
