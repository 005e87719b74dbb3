"""vLLM's tier: each family of models answers from a store as it does without one, whatever happens to the store."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.beds.processes import free_port
from tests.engines.conftest import Engines, Reference
from tests.engines.engine import Engine, await_true
from tests.engines.messages import Json, Moment, Prompt
from tests.engines.multi_models import RANK, make_adapter
from tests.engines.prompts import batches, prefix_tree, shared_prefixes, unrelated
from tests.engines.store import Store, every_key, object_keys, running_store, tier_options
from tests.engines.tier_models import MODELS

pytestmark = pytest.mark.timeout(300)
PROMPTS = shared_prefixes()
ONE = PROMPTS[:1]
APART = unrelated(5, 6, 700)
SMOLLM2 = Path.home() / ".cache/objectcache/models/SmolLM2-135M-Instruct"
SEEDS = itertools.count(1000)
OPTIONS: dict[str, dict[str, Json]] = {"qwen3-next": {"dtype": "bfloat16", "max_num_batched_tokens": 2048}}


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("families")
    for name, make in MODELS.items():
        make(folder / name)
    return folder


def restarted(engines: Engines, store: Store, model: Path | None, **options: Json) -> Iterator[Engine]:
    """An engine that fills the store, and one that finds it filled."""
    for _ in range(2):
        with engines.tiered(store.tier(), model, is_asynchronous=True, **options) as engine:
            yield engine
            engine.stop()


FULL = pytest.mark.engines_full


@pytest.mark.parametrize("is_asynchronous", [pytest.param(False, marks=FULL), True])
def test_tokens_of_a_warm_store_are_those_without_one(
    engines: Engines, reference: Reference, store: Store, is_asynchronous: bool
) -> None:
    wanted = reference.tokens(PROMPTS)
    with engines.tiered(store.tier(), is_asynchronous=is_asynchronous) as engine:
        cold = engine.generate_each(PROMPTS)
        assert cold.tokens == wanted
        assert cold.count("stored_chunks") == len(object_keys(store))
        engine.stop()
    with engines.tiered(store.tier(), is_asynchronous=is_asynchronous) as engine:
        warm = engine.generate(PROMPTS)
        assert warm.tokens == wanted
        assert warm.count("loaded_chunks") > 20
        assert (warm.count("lost_chunks"), warm.count("load_failures"), warm.lost_blocks) == (0, 0, 0)
        assert warm.prometheus["tier_loaded_chunks"] == warm.count("loaded_chunks")
        engine.stop()


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "lfm2", "qwen3-next"])
def test_each_family_answers_from_the_store_as_without_one(
    engines: Engines, store: Store, families: Path, family: str
) -> None:
    """Windows, states and convolutions, with overlapping steps; all groups of a prompt come in few requests. Lfm2 gets
    prompts that share nothing: vLLM's own prefix caching changes its tokens.
    """
    model, options = families / family, OPTIONS.get(family, {})
    prompts = APART if family == "lfm2" else PROMPTS
    with engines.plain_of(model, **options) as engine:
        wanted = engine.generate_each(prompts).tokens
    outcomes, named = [], set[str]()
    for engine in restarted(engines, store, model, **options):
        outcomes.append(engine.generate_each(prompts))
        named |= set(engine.keys(prompts[0]))
    assert [outcome.tokens for outcome in outcomes] == [wanted, wanted]
    assert named <= object_keys(store), "a router looks for other objects than the engine stores"
    warm = outcomes[1]
    assert warm.count("loaded_chunks") > 0
    assert warm.count("fetches") <= 2 * warm.count("loads")
    assert warm.count("lookups") <= len(prompts)


@FULL
def test_latents_are_stored_and_loaded(engines: Engines, store: Store, families: Path) -> None:
    """Their tokens are no oracle: on CPUs vLLM's kernel for DeepSeek answers differently after any load."""
    cold, warm = (engine.generate_each(PROMPTS) for engine in restarted(engines, store, families / "deepseek"))
    assert cold.count("stored_chunks") == len(object_keys(store)) > 0
    assert warm.count("loaded_chunks") > 0
    assert (warm.count("lost_chunks"), warm.count("load_failures"), warm.lost_blocks) == (0, 0, 0)


@FULL
def test_unused_bytes_of_a_row_are_not_stored(engines: Engines, store: Store, families: Path) -> None:
    """States use 2 KiB of rows of 32 KiB, which hold what other requests have left there."""
    with engines.tiered(store.tier(cpu_bytes_to_use=2 << 20), families / "lfm2") as engine:
        engine.generate_each(unrelated(9, 8, 300))
        engine.stop()
    by_group: dict[str, set[int]] = {}
    for key in object_keys(store):
        by_group.setdefault(key.split("/")[-2], set()).update(store.sizes({key}))
    assert sorted(size for sizes in by_group.values() for size in sizes) == [2048, 2048, 2048, 32768]


@pytest.mark.parametrize("transport", ["auto", pytest.param("http", marks=FULL)])
@pytest.mark.parametrize("is_asynchronous", [pytest.param(False, marks=FULL), True])
def test_a_server_that_dies_in_a_load_costs_a_recomputation(
    engines: Engines, reference: Reference, tmp_path: Path, transport: str, is_asynchronous: bool
) -> None:
    """And the slots come back: over shared memory once the kernel says that the server has ended."""
    with (
        filled_tier(engines, tmp_path) as store,
        engines.tiered(store.tier(transport=transport), is_asynchronous=is_asynchronous) as engine,
    ):
        outcome = engine.generate(ONE, at=Moment.LAYER, do=store.server.kill)
        assert outcome.has_happened
        assert outcome.tokens == reference.tokens(ONE)
        assert outcome.lost_blocks == 0
        others = engine.generate(PROMPTS)
        assert others.tokens == reference.tokens(PROMPTS)
        engine.stop()


def test_a_server_that_hangs_in_a_lookup_is_a_miss_and_is_used_again_later(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    quick: Json = {"lookup_timeout_s": 1.0, "store_timeout_s": 2.0}
    with filled_tier(engines, tmp_path) as store, engines.tiered(store.tier(internals=quick)) as engine:
        outcome = engine.generate(ONE, at=Moment.LOOKUP, do=store.stop)
        assert outcome.tokens == reference.tokens(ONE)
        assert (outcome.count("loaded_chunks"), outcome.lost_blocks) == (0, 0)
        assert engine.has_said("lookup: ")
        store.go_on()

        await_true(lambda: engine.generate(unrelated(next(SEEDS), 1, 300), 1).count("stored_chunks") > 0)
        engine.stop()


def test_a_server_that_hangs_in_a_load_gives_its_slots_back_when_it_goes_on(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """It may still write into them: until then they are nobody else's. Over http a hang ends at the deadline."""
    with (
        filled_tier(engines, tmp_path) as store,
        engines.tiered(store.tier(transport="http", load_timeout_s=2.0)) as engine,
    ):
        outcome = engine.generate(ONE, at=Moment.LAYER, do=store.stop)
        assert outcome.has_happened
        assert outcome.tokens == reference.tokens(ONE)
        assert outcome.lost_blocks == 0
        store.go_on()
        engine.stop()


def test_chunks_that_are_lost_are_computed_and_stored_again(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """One deleted and one damaged after they were found; the others of the prompt are loaded."""
    with filled_tier(engines, tmp_path) as store, engines.tiered(store.tier()) as engine:
        keys = sorted(object_keys(store))

        def lose() -> None:
            for key in keys[::9]:
                store.delete(key)
            for key in keys[4::9]:
                store.damage(key, 1000)

        outcome = engine.generate(PROMPTS, at=Moment.MATCHED, do=lose)
        assert outcome.has_happened
        assert outcome.tokens == reference.tokens(PROMPTS)
        assert outcome.lost_blocks == 0
        engine.forget()
        again = engine.generate(PROMPTS)
        assert again.tokens == reference.tokens(PROMPTS)
        engine.stop()


@FULL
def test_an_engine_starts_without_a_store_and_uses_it_when_it_comes(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    port = free_port()
    options = tier_options(f"http://127.0.0.1:{port}")
    with engines.tiered(options) as engine:
        assert engine.generate(PROMPTS).tokens == reference.tokens(PROMPTS)
        await_true(lambda: engine.has_said("IS NOT USED until this is mended"))
        with running_store(tmp_path / "store", port=port) as store:

            def is_used() -> bool:
                engine.forget()
                outcome = engine.generate(unrelated(next(SEEDS), 1, 300))
                return outcome.count("stored_chunks") > 0

            await_true(is_used)
            assert object_keys(store)
        engine.stop()


@FULL
def test_two_tenants_share_nothing(engines: Engines, reference: Reference, store: Store) -> None:
    """The salt is in vLLM's hash."""
    ours, theirs = ([Prompt(prompt.tokens, salt) for prompt in PROMPTS[:1]] for salt in ("ours", "theirs"))
    with engines.tiered(store.tier()) as engine:
        engine.generate(ours)
        engine.stop()
    with engines.tiered(store.tier()) as engine:
        assert engine.generate(theirs).count("loaded_chunks") == 0
        engine.forget()
        assert engine.generate(ours).count("loaded_chunks") > 0
        engine.stop()


@FULL
def test_other_weights_under_the_same_name_share_nothing(
    engines: Engines, store: Store, tmp_path: Path, families: Path
) -> None:
    model = tmp_path / "gemma3"
    shutil.copytree(families / "gemma3", model)
    with engines.tiered(store.tier(), model) as engine:
        engine.generate(PROMPTS[:2])
        engine.stop()
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096] + os.urandom(4096))
    with engines.tiered(store.tier(), model) as engine:
        assert engine.generate(PROMPTS[:2]).count("found_chunks") == 0
        engine.stop()
    assert len({key.split("/")[2] for key in every_key(store)}) == 2


def test_prefixes_that_churn_through_small_caches_give_the_same_tokens(
    engines: Engines, reference: Reference, store: Store
) -> None:
    """Slots are reused and scattered, requests preempt each other, and somebody deletes and damages chunks."""
    source = random.Random(3)
    groups = batches(3, prefix_tree(3, 60, ("", "tenant")), 8)
    options: dict[str, Json] = {"num_gpu_blocks_override": 60}
    loaded = 0
    for half in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
        with engines.tiered(store.tier(cpu_bytes_to_use=8 << 20), is_asynchronous=True, **options) as engine:
            for group in half:
                outcome = engine.generate(group)
                assert outcome.tokens == reference.tokens(group)
                assert outcome.lost_blocks == 0
                loaded += outcome.count("loaded_chunks")
                keys = sorted(object_keys(store))
                if keys:
                    store.damage(source.choice(keys), 1000)
                    store.delete(source.choice(keys))
            engine.stop()
    assert loaded > 0


LORA: dict[str, Json] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def test_adapters_are_told_apart_by_their_contents(
    engines: Engines, reference: Reference, store: Store, tmp_path: Path
) -> None:
    """The same weights are shared under another name, and others under the same name and path are not. Without an
    adapter an engine shares with engines that have none.
    """
    folders = [tmp_path / name for name in ("one", "two", "copy-of-one")]
    for folder, seed in zip(folders, (1, 2, 1), strict=True):
        make_adapter(folder, seed)
    base = ONE[0]
    one, two, copy = (
        replace(base, lora=(folder.name, number, str(folder))) for number, folder in enumerate(folders, 1)
    )
    with engines.plain(enable_prefix_caching=False, **LORA) as engine:
        wanted = {each: engine.generate([each]).tokens for each in (base, one, two)}
    assert len({str(tokens) for tokens in wanted.values()}) == 3
    assert wanted[base] == reference.tokens(ONE)

    with engines.cached(store.tier(), is_asynchronous=True, **LORA) as engine:
        outcomes = [engine.generate([each]) for each in (base, one)]
        assert [each.tokens for each in outcomes] == [wanted[base], wanted[one]]
        assert [each.count("found_chunks") for each in outcomes] == [0, 0]
        assert sum(each.count("stored_chunks") for each in outcomes) == len(object_keys(store)) > 40
        engine.stop()
    with engines.cached(store.tier(), is_asynchronous=True, **LORA) as engine:
        shared, other = engine.generate([copy]), engine.generate([two])
        assert (shared.tokens, other.tokens) == (wanted[one], wanted[two])
        assert shared.count("loaded_chunks") > 20
        assert other.count("found_chunks") == 0
        engine.stop()
    make_adapter(folders[0], 2)
    with engines.cached(store.tier(), is_asynchronous=True, **LORA) as engine:
        replaced = engine.generate([one])
        assert (replaced.tokens, replaced.count("loaded_chunks") > 20) == (wanted[two], True)
        make_adapter(folders[0], 1)
        again = engine.generate([replace(one, lora=("one", 9, str(folders[0])))])
        assert engine.has_said("is not cached any more")
        assert (again.count("looked_up_chunks"), again.count("stored_chunks")) == (0, 0)
        engine.stop()
    with engines.tiered(store.tier()) as engine:
        plain = engine.generate([base])
        assert (plain.tokens, plain.count("loaded_chunks") > 20) == (wanted[base], True)
        engine.stop()


@pytest.mark.parametrize("is_tier", [True, pytest.param(False, marks=FULL)])
def test_a_request_may_bound_what_is_loaded_and_stored(engines: Engines, store: Store, is_tier: bool) -> None:
    """By its `kv_transfer_params`, as with vLLM's own tiers; the layerwise connector keeps to the same."""
    asked = unrelated(31, 3, 300)
    with engines.plain(enable_prefix_caching=False) as engine:
        wanted = [engine.generate([each]).tokens for each in asked]

    def engine_of_ours() -> contextlib.AbstractContextManager[Engine]:
        if is_tier:
            return engines.tiered(store.tier(), is_asynchronous=True)
        return engines.cached(store.connector(), is_asynchronous=True)

    def limited(prompt: Prompt, **limits: Json) -> Prompt:
        return replace(prompt, transfer=json.dumps(limits))

    with engine_of_ours() as engine:
        unstored = engine.generate([limited(asked[0], max_offload_tokens=0)])
        assert (unstored.tokens, unstored.count("stored_chunks")) == (wanted[0], 0)
        engine.forget()
        partly = engine.generate([limited(asked[0], max_offload_tokens=100)])
        assert (partly.tokens, partly.count("stored_chunks"), len(object_keys(store))) == (wanted[0], 3, 3)
        for number in (1, 2):
            assert engine.generate([asked[number]]).tokens == wanted[number]
        engine.stop()
    with engine_of_ours() as engine:
        found = [
            engine.generate([limited(asked[0], kv_load_tiers=[{"medium": "CPU"}])]),
            engine.generate([limited(asked[1], max_load_tokens=70)]),
            engine.generate([limited(asked[2], kv_load_tiers=[{"medium": "STORAGE", "locality": "REMOTE"}])]),
        ]
        assert [each.tokens for each in found] == wanted
        assert [each.count("loaded_chunks") for each in found] == [0, 2, len(asked[2].tokens) // 32]
        engine.stop()


def test_under_vllms_own_connector_adapters_are_not_cached(engines: Engines, store: Store) -> None:
    """It does not tell a tier which adapter a request has, and names their KV by the adapter's path."""
    with engines.tiered(store.tier(), **LORA) as engine:
        engine.generate(PROMPTS[:1])
        assert engine.has_said("IS NOT USED: with LoRA .* use kv_connector ObjectCacheConnector")
        engine.stop()
    assert not object_keys(store)


@FULL
def test_an_engine_that_hashes_otherwise_is_told(engines: Engines, store: Store) -> None:
    with engines.tiered(store.tier()) as engine:
        await_true(lambda: engine.has_said("shared with all engines of"))
        await_true(lambda: any(key.endswith("/about") for key in every_key(store)))
        engine.stop()
    with engines.tiered(store.tier(), prefix_caching_hash_algo="sha256_cbor") as engine:
        await_true(lambda: engine.has_said("they share nothing"))
        engine.stop()


@FULL
def test_vllms_own_spec_stores_what_one_group_uses(engines: Engines, reference: Reference, store: Store) -> None:
    """The tier beside TieringOffloadingSpec has no memory that servers fill, and its loads come over http. On CPUs
    that spec has no worker, so that ours stands in.
    """
    stock: dict[str, Json] = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "bench.experiments.engine.connectors",
        "cpu_bytes_to_use": 128 << 20,
        "secondary_tiers": [
            {
                "type": "ObjectCacheTier",
                "module_path": "nixl_client.connectors.vllm_tier",
                "endpoint": store.endpoint,
                "internals": {"lookup_timeout_s": 30.0},
            }
        ],
    }
    for is_warm in (False, True):
        with engines.cached(stock) as engine:
            outcome = engine.generate(PROMPTS[:3])
            assert outcome.tokens == reference.tokens(PROMPTS[:3])
            assert (outcome.count("loaded_chunks") > 0) == is_warm
            engine.stop()
    with engines.tiered(stock) as engine:
        engine.generate(ONE)
        assert engine.has_said("IS NOT USED: with LoRA, which this engine may have")
        engine.stop()


@FULL
@pytest.mark.timeout(600)
def test_two_ranks_store_and_one_or_two_load(engines: Engines, reference: Reference, store: Store) -> None:
    """As `vllm serve` runs them. With vLLM's canonical layout an engine of one rank reads what two have stored; without
    it the numbers of ranks share nothing.
    """
    wanted = reference.tokens(PROMPTS[:2])
    for is_canonical in (False, True):
        tier = store.tier(canonical_layout=is_canonical)
        for ranks in (2, 2, 1):
            with engines.tiered_apart(tier, tensor_parallel_size=ranks) as engine:
                outcome = engine.generate(PROMPTS[:2])
                assert outcome.tokens == wanted
                engine.stop()
    assert len({key.split("/")[2] for key in object_keys(store)}) == 3


@FULL
@pytest.mark.timeout(600)
def test_a_real_model_answers_word_by_word(engines: Engines, store: Store) -> None:
    """SmolLM2, where `objectcache demo` has fetched it."""
    if not (SMOLLM2 / "config.json").exists():
        pytest.skip("objectcache demo has not fetched SmolLM2")
    options: dict[str, Json] = {"max_model_len": 4096}
    prompts = [Prompt(tuple(range(100 + index, 1700))) for index in (0, 1)]
    with engines.plain_of(SMOLLM2, **options) as engine:
        wanted = engine.generate_each(prompts).tokens
    outcomes = [engine.generate_each(prompts) for engine in restarted(engines, store, SMOLLM2, **options)]
    assert [outcome.tokens for outcome in outcomes] == [wanted, wanted]
    assert outcomes[1].count("loaded_chunks") > 40


@contextlib.contextmanager
def filled_tier(engines: Engines, folder: Path) -> Iterator[Store]:
    """A store that has what the prompts need. Nothing is kept in memory, so that damage on disk is met."""
    with running_store(folder / "tier", options=("--dram-bytes", "0")) as store:
        with engines.tiered(store.tier()) as engine:
            engine.generate_each(PROMPTS)
            engine.stop()
        yield store
