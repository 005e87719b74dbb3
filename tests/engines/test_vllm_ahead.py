"""vLLM with overlapping steps, its default: loads are over before their requests run, and failures cost time alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.failing import (
    HANG_S,
    ONE,
    ONE_TOKENS,
    PROMPTS,
    RECOMPUTED,
    SLOW_LINK,
    expect_recomputed,
    has_loaded,
    layerwise,
    warm_store,
)
from tests.engines.messages import Json, Moment
from tests.engines.prompts import unrelated
from tests.engines.store import Store

pytestmark = pytest.mark.timeout(300)
FULL = pytest.mark.engines_full
CASES: dict[str, tuple[dict[str, Json], dict[str, Json]]] = {
    "two chunks to a block": ({"chunk_tokens": 16}, {}),
    "four blocks to a chunk, http": ({"chunk_tokens": 128, "transport": "http"}, {}),
    "without prefix caching": ({}, {"enable_prefix_caching": False}),
    "chunked prefill": ({}, {"max_num_batched_tokens": 128, "max_num_seqs": 4}),
    "room for one prompt": ({"staging_bytes": 4 << 20}, {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[FULL] * (name != "two chunks to a block")) for name in CASES]
)
def test_tokens_of_a_warm_store_are_those_without_one(
    engines: Engines, reference: Reference, store: Store, name: str
) -> None:
    """Across a restart, one by one and all at once. What one request loads others find in the engine's blocks."""
    connector, options = CASES[name]
    wanted = reference.tokens(PROMPTS)
    with engines.cached(store.connector(**connector), is_asynchronous=True, **options) as engine:
        assert engine.generate_each(PROMPTS).tokens == wanted
        engine.stop()
    with engines.cached(store.connector(**connector), is_asynchronous=True, **options) as engine:
        each = engine.generate_each(PROMPTS)
        engine.forget()
        together = engine.generate(PROMPTS)
        for warm in (each, together):
            assert warm.tokens == wanted
            assert warm.count("loaded_tokens") == warm.count("store_hit_tokens") > 0
            assert (warm.count("stored_chunks"), warm.count("load_failures"), warm.lost_blocks) == (0, 0, 0)
            assert (warm.count("load_wait_s"), warm.count("load_copy_s")) == (0, 0)
        assert together.count("loaded_tokens") <= each.count("loaded_tokens")
        engine.stop()


@pytest.mark.parametrize("transport", ["shm", pytest.param("http", marks=FULL)])
def test_a_server_killed_during_a_load_costs_a_recomputation(
    engines: Engines, reference: Reference, copied: Path, transport: str
) -> None:
    """After the first layer has arrived, and been copied."""
    with (
        warm_store(copied, SLOW_LINK) as store,
        engines.cached(layerwise(store, transport), is_asynchronous=True) as engine,
    ):
        outcome = engine.generate(ONE, at=Moment.LAYER, do=store.server.kill)
        assert outcome.has_happened
        expect_recomputed(outcome, reference.tokens(ONE))
        assert engine.has_said(RECOMPUTED)
        others = engine.generate(PROMPTS)
        assert others.tokens == reference.tokens(PROMPTS)
        assert others.lost_blocks == 0
        engine.stop()


@pytest.mark.parametrize("transport", ["shm", pytest.param("http", marks=FULL)])
def test_a_server_that_hangs_during_a_load_holds_its_own_request_only(
    engines: Engines, reference: Reference, copied: Path, transport: str
) -> None:
    """Until the deadline. The others give tokens meanwhile, and the engine can be shut down while the server hangs."""
    others = unrelated(11, 3, 100)
    with (
        warm_store(copied, SLOW_LINK) as store,
        engines.cached(layerwise(store, transport, HANG_S), is_asynchronous=True) as engine,
    ):
        outcome = engine.generate([*ONE, *others], at=Moment.LAYER, do=store.stop)
        assert outcome.has_happened
        expect_recomputed(outcome, reference.tokens([*ONE, *others]))
        engine.stop()


@pytest.mark.parametrize(
    ("name", "break_chunk"),
    [
        ("deleted", lambda store, keys: store.delete(keys[7])),
        pytest.param("damaged on disk", lambda store, keys: store.damage(keys[7], 100_000), marks=FULL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_chunk_lost_between_lookup_and_load_is_recomputed_and_written_again(
    engines: Engines, reference: Reference, copied: Path, name: str, break_chunk: Callable[[Store, list[str]], None]
) -> None:
    """Chunks before it are loaded. Those after it are not, since their KV would stand on nothing."""
    with (
        warm_store(copied) as store,
        engines.cached(store.connector(retry_s=0.0), is_asynchronous=True) as engine,
    ):
        keys = engine.keys(ONE[0])
        outcome = engine.generate(ONE, at=Moment.MATCHED, do=lambda: break_chunk(store, keys))
        assert outcome.has_happened
        expect_recomputed(outcome, reference.tokens(ONE), 7 * 32)
        engine.forget()
        assert has_loaded(engine, reference.tokens(ONE), ONE, ONE_TOKENS)
        engine.stop()


@FULL
def test_preempted_requests_give_the_same_tokens(engines: Engines, reference: Reference, store: Store) -> None:
    """They are looked up again, and load what they had written."""
    prompts = unrelated(3, 4, 310)
    wanted = reference.tokens(prompts, 90)
    for _ in range(2):
        with engines.cached(store.connector(), is_asynchronous=True, num_gpu_blocks_override=44) as engine:
            outcome = engine.generate(prompts, 90)
            assert outcome.tokens == wanted
            assert outcome.preemptions > 0
            assert outcome.lost_blocks == 0
            engine.stop()
