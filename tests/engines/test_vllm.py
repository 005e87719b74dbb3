"""vLLM over ObjectCache: greedy tokens with a warm store equal those without one, and what was hit was loaded."""

from __future__ import annotations

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.engine import await_true
from tests.engines.expected import Caches
from tests.engines.messages import Json, Prompt
from tests.engines.model import TOKEN_BYTES
from tests.engines.prompts import shared_prefixes, unrelated
from tests.engines.store import Store

pytestmark = pytest.mark.timeout(300)
PROMPTS = shared_prefixes()
CASES: dict[str, tuple[int, dict[str, Json], dict[str, Json]]] = {
    "one chunk to a block": (32, {}, {}),
    "four blocks to a chunk": (128, {"chunk_tokens": 128}, {}),
    "two chunks to a block": (16, {"chunk_tokens": 16}, {}),
    "without prefix caching": (32, {"transport": "http"}, {"enable_prefix_caching": False}),
    "chunked prefill": (32, {}, {"max_num_batched_tokens": 128, "max_num_seqs": 4}),
    "blocks of 64, over http": (64, {"transport": "http"}, {"block_size": 64}),
}
LONG_SET = {"without prefix caching", "blocks of 64, over http", "two chunks to a block", "one chunk to a block"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.engines_full] if name in LONG_SET else []) for name in CASES]
)
def test_tokens_of_a_warm_store_are_those_without_one_and_were_loaded(
    engines: Engines, reference: Reference, store: Store, name: str
) -> None:
    """Across a restart, one by one and all at once. What is loaded is computed from the tokens, to the token."""
    chunk_tokens, connector, options = CASES[name]
    wanted = reference.tokens(PROMPTS)
    block_tokens = int(str(options.get("block_size", 32)))
    caches = Caches(chunk_tokens, block_tokens, bool(options.get("enable_prefix_caching", True)))
    with engines.cached(store.connector(**connector), **options) as engine:
        cold = engine.generate_each(PROMPTS)
        assert cold.tokens == wanted
        found, loaded = caches.run(PROMPTS, wanted)
        assert (cold.count("hbm_hit_tokens"), cold.count("loaded_tokens")) == (found, loaded)
        assert cold.count("stored_chunks") == len(caches.chunks) == len(store.keys())
        assert store.sizes() == {chunk_tokens * TOKEN_BYTES}
        assert cold.lost_blocks == 0
        engine.stop()
    with engines.cached(store.connector(**connector), **options) as engine:
        found, loaded = caches.restarted().run(PROMPTS, wanted)
        for is_at_once in (False, True):
            warm = engine.generate(PROMPTS) if is_at_once else engine.generate_each(PROMPTS)
            assert warm.tokens == wanted
            assert warm.count("loaded_tokens") == warm.prometheus["loaded_tokens"] == loaded
            assert (warm.count("hbm_hit_tokens"), warm.count("store_hit_tokens")) == (found, loaded)
            assert (warm.count("stored_chunks"), warm.count("load_failures"), warm.lost_blocks) == (0, 0, 0)
            engine.forget()
        engine.stop()


def test_a_chunk_replaced_by_another_changes_tokens(engines: Engines, reference: Reference, store: Store) -> None:
    """With checksums that are right for the wrong bytes. Else equal tokens would prove nothing about what is loaded."""
    with engines.cached(store.connector(store=False)) as reader, engines.cached(store.connector()) as writer:
        writer.generate(PROMPTS[:1])
        keys = reader.keys(PROMPTS[0])
        assert reader.generate(PROMPTS[:1]).tokens == reference.tokens(PROMPTS[:1])
        reader.forget()
        store.put(keys[1], store.get(keys[2]))
        wrong = reader.generate(PROMPTS[:1])
        assert wrong.count("loaded_tokens") == 672
        assert wrong.tokens != reference.tokens(PROMPTS[:1])


def test_preempted_requests_give_the_same_tokens(engines: Engines, reference: Reference, store: Store) -> None:
    """Requests that outgrow the cache lose their blocks, are looked up again, and load what they had written, which
    may be less than all: what waits to be written is dropped when its blocks are taken.
    """
    prompts = unrelated(3, 4, 310)
    wanted = reference.tokens(prompts, 90)
    for _ in range(2):
        with engines.cached(store.connector(), num_gpu_blocks_override=44) as engine:
            stored = store.keys()
            stored_tokens = sum(32 * count_leading(engine.keys(prompt), stored) for prompt in prompts)
            outcome = engine.generate(prompts, 90)
            assert outcome.tokens == wanted
            assert outcome.preemptions > 0
            assert outcome.lost_blocks == 0
            assert outcome.count("loaded_tokens") >= stored_tokens
            engine.stop()
    assert stored_tokens > 0


def count_leading(keys: list[str], stored: set[str]) -> int:
    """Chunks of a prefix that are stored without a gap."""
    return next((index for index, key in enumerate(keys) if key not in stored), len(keys))


def test_another_salt_does_not_hit(engines: Engines, reference: Reference, store: Store) -> None:
    """Tenants must not learn from a shorter TTFT what others have asked."""
    of_tenant = {salt: [Prompt(PROMPTS[0].tokens, salt)] for salt in ("", "one", "two")}
    loaded = []
    with engines.cached(store.connector()) as engine:
        for salt in ("one", "two", "", "one", "two", ""):
            outcome = engine.generate(of_tenant[salt])
            assert outcome.tokens == reference.tokens(of_tenant[""])
            loaded.append(outcome.count("loaded_tokens"))
            engine.forget()
        assert loaded == [0, 0, 0, 672, 672, 672]
        keys = [set(engine.keys(of_tenant[salt][0])) for salt in of_tenant]
        assert len(set.union(*keys)) == sum(len(each) for each in keys)
        assert set.union(*keys) <= store.keys()


@pytest.mark.engines_full
def test_an_engine_in_a_process_of_its_own_loads_and_counts(
    engines: Engines, reference: Reference, store: Store
) -> None:
    """As `vllm serve` runs it: scheduler and worker apart from the front end, counters through Prometheus."""
    wanted = reference.tokens(PROMPTS)
    caches = Caches(32)
    caches.run(PROMPTS, wanted)
    with engines.multiprocess(store.connector()) as engine:
        assert engine.generate(PROMPTS).tokens == wanted
        await_true(lambda: len(store.keys()) == len(caches.chunks))
        engine.forget()
        warm = engine.generate(PROMPTS)
        assert warm.tokens == wanted
        assert warm.prometheus["loaded_tokens"] == caches.restarted().run(PROMPTS, wanted)[1]
        assert warm.prometheus["loaded_bytes"] == warm.prometheus["loaded_tokens"] * TOKEN_BYTES
        assert "load_failures" not in warm.prometheus
        engine.stop()
