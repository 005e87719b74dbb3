"""The connector with models that it does not load layer by layer: windows, states and convolutions beside attention. It
runs them over the tier, and answers from a store as without one, whatever happens to the store.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.engine import await_true
from tests.engines.messages import Json, Moment
from tests.engines.prompts import batches, prefix_tree, shared_prefixes, unrelated
from tests.engines.store import Store, running_store
from tests.engines.tier_models import MODELS

pytestmark = pytest.mark.timeout(300)
FULL = pytest.mark.engines_full
PROMPTS = shared_prefixes()
APART = unrelated(5, 6, 700)
"""A block of Qwen3-Next has 544 tokens. Lfm2 gets these, too: vLLM's own prefix caching changes its tokens."""
OPTIONS: dict[str, dict[str, Json]] = {"qwen3-next": {"dtype": "bfloat16", "max_num_batched_tokens": 2048}}
FAMILIES = {"gemma3": PROMPTS, "gpt-oss": PROMPTS, "mistral": PROMPTS, "lfm2": APART, "qwen3-next": APART}
IN_CI = {"gpt-oss", "qwen3-next"}
HOST_BYTES = 64 << 20
SMALL: dict[str, Json] = {"num_gpu_blocks_override": 100, "max_num_batched_tokens": 128, "max_model_len": 800}
"""Blocks for the longest prompt and little more."""


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        MODELS[name](folder / name)
    return folder


@pytest.fixture(scope="session")
def gemma3(families: Path) -> Path:
    """Five layers with a window, then one that sees everything."""
    return families / "gemma3"


@pytest.fixture(scope="session")
def gemma3_reference(engines: Engines, gemma3: Path) -> Iterator[Reference]:
    """The tokens that it gives without a store."""
    with engines.plain_of(gemma3, enable_prefix_caching=False) as engine:
        yield Reference(engine)


def connector(store: Store, **options: Json) -> dict[str, Json]:
    """The connector's options; `staging_bytes` is vLLM's host memory here."""
    return store.connector(**{"staging_bytes": HOST_BYTES, **options})


@pytest.mark.parametrize(
    ("family", "is_asynchronous"),
    [
        pytest.param(family, is_asynchronous, marks=[FULL] * (family not in IN_CI or not is_asynchronous))
        for family in FAMILIES
        for is_asynchronous in (True, False)
    ],
)
def test_each_family_answers_from_the_store_as_without_one(
    engines: Engines, store: Store, families: Path, family: str, is_asynchronous: bool
) -> None:
    model, options, prompts = families / family, OPTIONS.get(family, {}), FAMILIES[family]
    with engines.plain_of(model, **options) as engine:
        wanted = engine.generate_each(prompts).tokens
    for is_warm in (False, True):
        with engines.cached(connector(store), model, is_asynchronous=is_asynchronous, **options) as engine:
            outcome = engine.generate_each(prompts)
            assert outcome.tokens == wanted
            assert (outcome.count("loaded_chunks") > 0) == is_warm
            assert (outcome.count("lost_chunks"), outcome.count("load_failures"), outcome.lost_blocks) == (0, 0, 0)
            assert outcome.prometheus.get("tier_loaded_chunks", 0) == outcome.count("loaded_chunks")
            assert engine.has_said("not layer by layer: groups of layers: ")
            engine.stop()


@FULL
def test_the_tier_and_the_connector_load_what_each_other_stores(
    engines: Engines, store: Store, gemma3: Path, gemma3_reference: Reference
) -> None:
    """Whichever of them an engine names, its objects have the same names."""
    tier = store.tier(epoch="tiny")  # as the connector's `model` is in tests
    wanted = gemma3_reference.tokens(PROMPTS)
    with engines.tiered(tier, gemma3) as engine:
        assert engine.generate_each(PROMPTS[:4]).tokens == wanted[:4]
        engine.stop()
    with engines.cached(connector(store), gemma3) as engine:
        outcome = engine.generate_each(PROMPTS)
        assert (outcome.tokens, outcome.count("loaded_chunks") > 0) == (wanted, True)
        engine.stop()
    stored = store.keys()
    with engines.tiered(tier, gemma3) as engine:
        again = engine.generate_each(PROMPTS)
        assert (again.tokens, again.count("stored_chunks")) == (wanted, 0)
        engine.stop()
    assert store.keys() == stored


@pytest.mark.parametrize("transport", ["auto", pytest.param("http", marks=FULL)])
@pytest.mark.parametrize("is_asynchronous", [pytest.param(False, marks=FULL), True])
def test_a_server_that_dies_in_a_load_costs_a_recomputation(
    engines: Engines,
    gemma3: Path,
    gemma3_reference: Reference,
    tmp_path: Path,
    transport: str,
    is_asynchronous: bool,
) -> None:
    """With several groups vLLM cannot be told of blocks that were not loaded, so that none may be counted before."""
    wanted = gemma3_reference.tokens(PROMPTS)
    with (
        filled(engines, gemma3, tmp_path) as store,
        engines.cached(connector(store, transport=transport), gemma3, is_asynchronous=is_asynchronous) as engine,
    ):
        outcome = engine.generate(PROMPTS[:1], at=Moment.LAYER, do=store.server.kill)
        assert outcome.has_happened
        assert (outcome.tokens, outcome.lost_blocks) == (wanted[:1], 0)
        assert engine.generate(PROMPTS).tokens == wanted
        engine.stop()


@FULL
def test_chunks_that_are_lost_are_computed_and_stored_again(
    engines: Engines, gemma3: Path, gemma3_reference: Reference, tmp_path: Path
) -> None:
    """Some of all groups are deleted or damaged after they were found; the others of the prompt are loaded."""
    wanted = gemma3_reference.tokens(PROMPTS)
    with (
        filled(engines, gemma3, tmp_path) as store,
        engines.cached(connector(store), gemma3, is_asynchronous=True) as engine,
    ):
        keys = chunks(store)

        def lose() -> None:
            for key in keys[::9]:
                store.delete(key)
            for key in keys[4::9]:
                store.damage(key, 1000)

        outcome = engine.generate(PROMPTS, at=Moment.MATCHED, do=lose)
        assert outcome.has_happened
        assert (outcome.tokens, outcome.lost_blocks) == (wanted, 0)
        engine.forget()
        assert engine.generate(PROMPTS).tokens == wanted
        engine.stop()


@FULL
def test_prefixes_that_churn_through_small_caches_give_the_same_tokens(
    engines: Engines, store: Store, gemma3: Path, gemma3_reference: Reference
) -> None:
    """Blocks and host memory are reused, requests preempt each other, and somebody deletes and damages chunks."""
    source = random.Random(4)
    groups = batches(4, prefix_tree(4, 60, ("", "tenant")), 8)
    loaded = preempted = 0
    for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
        small = connector(store, staging_bytes=8 << 20)
        with engines.cached(small, gemma3, is_asynchronous=True, **SMALL) as engine:
            for group in half:
                outcome = engine.generate(group, 60)
                assert outcome.tokens == gemma3_reference.tokens(group, 60)
                assert outcome.lost_blocks == 0
                loaded += outcome.count("loaded_chunks")
                preempted += outcome.preemptions
                keys = chunks(store)
                if keys:
                    store.damage(source.choice(keys), 1000)
                    store.delete(source.choice(keys))
            engine.stop()
    assert loaded > 0
    assert preempted > 0


@FULL
def test_after_a_reset_nothing_is_taken_from_before_and_nothing_is_written_under_old_names(
    engines: Engines, store: Store, gemma3: Path, gemma3_reference: Reference
) -> None:
    """The weights may be others: vLLM's own connector goes on with what its tiers have."""
    wanted = gemma3_reference.tokens(PROMPTS[:1])
    with engines.cached(connector(store), gemma3) as engine:
        assert engine.generate(PROMPTS[:1]).tokens == wanted
        before = store.keys()
        engine.forget(is_store_too=True)
        again = engine.generate(PROMPTS[:1])
        assert (again.tokens, again.count("loaded_chunks")) == (wanted, 0)
        new = store.keys() - before
        assert len({key.split("/")[2] for key in new}) == 1
        assert {key.split("/")[2] for key in new}.isdisjoint(key.split("/")[2] for key in before)
        engine.stop()


@FULL
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_role_that_only_stores_or_only_loads_does_no_more(
    engines: Engines, gemma3: Path, gemma3_reference: Reference, tmp_path: Path, role: str
) -> None:
    others = unrelated(8, 1, 300)
    with filled(engines, gemma3, tmp_path) as store:
        transfer: Json = {
            "kv_connector": "ObjectCacheConnector",
            "kv_connector_module_path": "nixl_client.connectors.vllm",
            "kv_role": role,
            "kv_connector_extra_config": connector(store),
        }
        with engines.cached(connector(store), gemma3, kv_transfer_config=transfer) as engine:
            outcome = engine.generate_each([*PROMPTS[:1], *others])
            assert outcome.tokens == gemma3_reference.tokens([*PROMPTS[:1], *others])
            assert (outcome.count("loaded_chunks") > 0) == (role == "kv_consumer")
            assert (outcome.count("stored_chunks") > 0) == (role == "kv_producer")
            engine.stop()


@FULL
def test_beside_another_connector_its_counts_are_found(
    engines: Engines, store: Store, gemma3: Path, gemma3_reference: Reference
) -> None:
    """As `vllm serve` runs it: MultiConnector finds the statistics of a connector by the name of its class."""
    ours: Json = {
        "kv_connector": "ObjectCacheConnector",
        "kv_connector_module_path": "nixl_client.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": connector(store),
    }
    transfer: Json = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours]},
    }
    with engines.cached(connector(store), gemma3) as engine:
        engine.generate(PROMPTS[:1])
        engine.stop()
    with engines.multiprocess(connector(store), gemma3, kv_transfer_config=transfer) as engine:
        outcome = engine.generate(PROMPTS[:1])
        assert outcome.tokens == gemma3_reference.tokens(PROMPTS[:1])
        assert outcome.prometheus["tier_loaded_chunks"] > 0
        engine.stop()


@FULL
@pytest.mark.timeout(600)
def test_two_ranks_load_what_two_have_stored(
    engines: Engines, store: Store, gemma3: Path, gemma3_reference: Reference
) -> None:
    """And nothing that one has stored: its rows are others."""
    wanted = gemma3_reference.tokens(PROMPTS[:2])
    with engines.cached(connector(store), gemma3) as engine:
        engine.generate_each(PROMPTS[:2])
        engine.stop()
    stored_by_one = len(chunks(store))
    for is_warm in (False, True):
        with engines.multiprocess(connector(store), gemma3, tensor_parallel_size=2) as engine:
            outcome = engine.generate_each(PROMPTS[:2])
            assert outcome.tokens == wanted
            assert (outcome.prometheus.get("tier_loaded_chunks", 0) > 0) == is_warm
            await_true(lambda: len(chunks(store)) == 2 * stored_by_one)
            engine.stop()


@FULL
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_states_of_the_last_token_alone_are_not_cached_and_the_engine_says_so(
    engines: Engines, store: Store, families: Path, is_asynchronous: bool
) -> None:
    """Without its own prefix caching vLLM keeps no state that a prefix could go on from."""
    options = OPTIONS["qwen3-next"] | {"enable_prefix_caching": False}
    with engines.plain_of(families / "qwen3-next", **options) as engine:
        wanted = engine.generate_each(APART[:2]).tokens
    with engines.cached(
        connector(store), families / "qwen3-next", is_asynchronous=is_asynchronous, **options
    ) as engine:
        assert engine.generate_each(APART[:2]).tokens == wanted
        assert engine.has_said("ObjectCache is not used: states are kept for the last token alone")
        engine.stop()
    assert not store.keys()


@FULL
def test_host_memory_that_holds_no_row_is_refused(engines: Engines, store: Store, gemma3: Path) -> None:
    with (
        pytest.raises(AssertionError, match="staging_bytes"),
        engines.cached(connector(store, staging_bytes=1000), gemma3),
    ):
        pass


def chunks(store: Store) -> list[str]:
    """The objects that are stored, but for the tier's note to other engines."""
    return sorted(key for key in tuple(store.keys()) if not key.endswith("/about"))


@contextlib.contextmanager
def filled(engines: Engines, model: Path, folder: Path) -> Iterator[Store]:
    """A store that has what the prompts need. Nothing is kept in memory, so that damage on disk is met."""
    with running_store(folder / "families", options=("--dram-bytes", "0")) as store:
        with engines.cached(connector(store), model) as engine:
            engine.generate_each(PROMPTS)
            engine.stop()
        yield store
