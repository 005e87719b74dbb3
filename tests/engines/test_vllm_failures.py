"""vLLM over an ObjectCache that fails: tokens stay right, requests end, no block leaks, the log says what happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.beds.processes import free_port
from descriptors.errors import ObjectCacheError
from tests.engines.conftest import Engines, Reference
from tests.engines.engine import await_true
from tests.engines.failing import (
    CRAWLING_LINK,
    HANG_S,
    LOOKUP_FAILED,
    NOT_STORED,
    ONE,
    ONE_TOKENS,
    PROMPTS,
    QUICK,
    RECOMPUTED,
    SLOW_LINK,
    expect_recomputed,
    has_loaded,
    layerwise,
    warm_store,
)
from tests.engines.messages import Moment
from tests.engines.prompts import unrelated
from tests.engines.small_disk import small_disk
from tests.engines.store import Store, connector_options, running_store

pytestmark = pytest.mark.timeout(300)
TRANSPORTS = ["shm", pytest.param("http", marks=pytest.mark.engines_full)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_killed_during_a_load_costs_a_recomputation(
    engines: Engines, reference: Reference, copied: Path, transport: str
) -> None:
    """After the first layer has arrived: attention over it has run, the layers after it never come."""
    with warm_store(copied, SLOW_LINK) as store, engines.cached(layerwise(store, transport)) as engine:
        outcome = engine.generate(ONE, at=Moment.LAYER, do=store.server.kill)
        assert outcome.has_happened
        expect_recomputed(outcome, reference.tokens(ONE))
        assert engine.has_said(RECOMPUTED)
        others = engine.generate(PROMPTS)
        assert others.tokens == reference.tokens(PROMPTS)
        assert others.lost_blocks == 0
        engine.stop()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_hangs_during_a_load_is_waited_for_until_the_deadline(
    engines: Engines, reference: Reference, copied: Path, transport: str
) -> None:
    """And an engine can be shut down while it hangs."""
    with warm_store(copied, SLOW_LINK) as store, engines.cached(layerwise(store, transport, HANG_S)) as engine:
        outcome = engine.generate(ONE, at=Moment.LAYER, do=store.stop)
        assert outcome.has_happened
        expect_recomputed(outcome, reference.tokens(ONE))
        assert engine.has_said(RECOMPUTED)
        engine.stop()


def test_a_server_that_hangs_during_a_lookup_is_a_miss_and_is_used_again_later(
    engines: Engines, reference: Reference, copied: Path
) -> None:
    with warm_store(copied) as store, engines.cached(store.connector(**(QUICK | {"lookup_timeout_s": 2.0}))) as engine:
        outcome = engine.generate(ONE, at=Moment.LOOKUP, do=store.stop)
        assert outcome.has_happened
        assert outcome.tokens == reference.tokens(ONE)
        assert (outcome.count("lookup_failures"), outcome.count("loaded_tokens"), outcome.lost_blocks) == (1, 0, 0)
        assert engine.has_said(LOOKUP_FAILED)
        store.go_on()
        await_true(lambda: has_loaded(engine, reference.tokens(ONE), ONE, ONE_TOKENS))
        engine.stop()


def test_a_server_that_is_down_at_the_start_is_a_miss_and_is_used_once_it_is_there(
    engines: Engines, reference: Reference, copied: Path
) -> None:
    port = free_port()
    with engines.cached(connector_options(f"http://127.0.0.1:{port}", **QUICK)) as engine:
        outcome = engine.generate(PROMPTS)
        assert outcome.tokens == reference.tokens(PROMPTS)
        assert (outcome.count("loaded_tokens"), outcome.lost_blocks) == (0, 0)
        assert engine.has_said(LOOKUP_FAILED)
        with running_store(copied, port=port):
            await_true(lambda: has_loaded(engine, reference.tokens(ONE), ONE, ONE_TOKENS))
            engine.stop()


@pytest.mark.parametrize(
    ("name", "break_chunk"),
    [
        ("deleted", lambda store, keys: store.delete(keys[7])),
        ("damaged on disk", lambda store, keys: store.damage(keys[7], 100_000)),
        ("replaced by one of another size", lambda store, keys: store.put(keys[7], bytes(100))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_chunk_lost_between_lookup_and_load_is_recomputed_and_written_again(
    engines: Engines, reference: Reference, copied: Path, name: str, break_chunk: Callable[[Store, list[str]], None]
) -> None:
    """Chunks before it are loaded. Those after it are not, since their KV would stand on nothing."""
    with warm_store(copied) as store, engines.cached(store.connector(retry_s=0.0)) as engine:
        keys = engine.keys(ONE[0])
        outcome = engine.generate(ONE, at=Moment.MATCHED, do=lambda: break_chunk(store, keys))
        assert outcome.has_happened
        expect_recomputed(outcome, reference.tokens(ONE), 7 * 32)
        assert engine.has_said(RECOMPUTED)
        engine.forget()
        repaired = engine.generate(ONE)
        assert repaired.tokens == reference.tokens(ONE)
        assert (repaired.count("loaded_tokens"), repaired.count("load_failures")) == (ONE_TOKENS, 0)
        engine.stop()


def test_a_load_over_a_link_that_crawls_ends_at_its_deadline(
    engines: Engines, reference: Reference, copied: Path
) -> None:
    with warm_store(copied, CRAWLING_LINK) as store, engines.cached(store.connector(**QUICK)) as engine:
        outcome = engine.generate(ONE)
        expect_recomputed(outcome, reference.tokens(ONE))
        assert engine.has_said(RECOMPUTED)
        engine.stop()


def test_a_full_store_takes_no_more_and_serves_what_it_has(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """Chunks that do not fit are not there in part, and prefixes written once there is room are whole."""
    (tmp_path / "disk").mkdir()
    later = unrelated(5, 2, 200)
    with (
        small_disk(tmp_path / "disk", 48 << 20) as disk,
        running_store(tmp_path / "s", data=disk.inside, prefix=disk.prefix) as store,
        engines.cached(store.connector(**QUICK)) as engine,
    ):
        engine.generate(ONE)
        before = store.keys()
        ballast = fill(store)
        outcome = engine.generate(later)
        assert outcome.tokens == reference.tokens(later)
        assert outcome.count("store_failures") >= 1
        assert outcome.lost_blocks == 0
        assert engine.has_said(NOT_STORED)
        assert before <= store.keys() - ballast  # a chunk for which the log made room may be there, whole
        assert len({len(store.get(key)) for key in store.keys() - ballast}) == 1
        assert has_loaded(engine, reference.tokens(ONE), ONE, ONE_TOKENS)
        store.delete(*ballast)
        await_true(lambda: has_loaded(engine, reference.tokens(later), later, 2 * 192))
        engine.stop()


def fill(store: Store) -> set[str]:
    """Put until nothing goes in any more, also when the index's log has given space back; the keys."""
    stored: set[str] = set()
    while True:
        before = len(stored)
        for nbytes in (1 << 20, 64 << 10, 4 << 10):
            for number in range(1000):
                key = f"ballast/{nbytes}/{len(stored)}-{number}"
                try:
                    store.put(key, bytes(nbytes))
                except ObjectCacheError:
                    break
                stored.add(key)
            else:
                raise AssertionError("the store does not fill up")
        if len(stored) == before:
            return stored
        time.sleep(1.5)  # files are synced, and logs are shortened, once a second


@pytest.mark.engines_full
def test_a_server_that_hangs_during_a_put_keeps_no_blocks(engines: Engines, reference: Reference, store: Store) -> None:
    with engines.cached(store.connector(**QUICK)) as engine:
        outcome = engine.generate(PROMPTS, at=Moment.PUT, do=store.stop)
        assert outcome.has_happened
        assert outcome.tokens == reference.tokens(PROMPTS)
        assert outcome.lost_blocks == 0
        assert engine.has_said(NOT_STORED)
        engine.stop()
