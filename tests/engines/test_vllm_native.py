"""`native`: the layerwise connector and the tier read and write the same objects."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.engine import Engine
from tests.engines.messages import Json, Prompt
from tests.engines.multi_models import RANK, make_adapter
from tests.engines.prompts import shared_prefixes
from tests.engines.store import Store, every_key, object_keys
from tests.engines.tier_models import make_deepseek

pytestmark = pytest.mark.timeout(300)
PROMPTS = shared_prefixes()
FULL = pytest.mark.engines_full
Maker = Callable[[], AbstractContextManager[Engine]]


def makers(engines: Engines, store: Store, model: Path | None = None, **options: bool) -> dict[str, Maker]:
    """An engine of each kind."""
    return {
        "tier": lambda: engines.tiered(store.tier(epoch="tiny"), model, is_asynchronous=True),
        "connector": lambda: engines.cached(store.connector(native=True), model, **options),
    }


@pytest.mark.parametrize("is_asynchronous", [False, pytest.param(True, marks=FULL)])
@pytest.mark.parametrize(("writer", "reader"), [("tier", "connector"), ("connector", "tier")])
def test_what_one_stores_the_other_loads(
    engines: Engines, reference: Reference, store: Store, writer: str, reader: str, is_asynchronous: bool
) -> None:
    wanted = reference.tokens(PROMPTS)
    made = makers(engines, store, is_asynchronous=is_asynchronous)
    with made[writer]() as engine:
        cold = engine.generate_each(PROMPTS)
        assert cold.tokens == wanted
        stored = object_keys(store)
        assert cold.count("stored_chunks") == len(stored) > 20
        keys = [engine.keys(prompt) for prompt in PROMPTS]
        engine.stop()
    with made[reader]() as engine:
        warm = engine.generate_each(PROMPTS)
        assert [engine.keys(prompt) for prompt in PROMPTS] == keys
        assert warm.tokens == wanted
        assert warm.count("loaded_chunks") > 20
        assert (warm.count("load_failures"), warm.lost_blocks) == (0, 0)
        engine.stop()
    assert {key for each in keys for key in each} <= stored
    assert len(object_keys(store) - stored) == warm.count("stored_chunks") <= len(PROMPTS)  # ends of answers
    assert len(store.sizes(stored)) == 1


@FULL
def test_salts_have_names_of_their_own_and_a_reset_new_ones(
    engines: Engines, reference: Reference, store: Store
) -> None:
    of_tenant = {salt: [Prompt(PROMPTS[0].tokens, salt)] for salt in ("", "one")}
    with engines.cached(store.connector(native=True)) as engine:
        loaded = []
        for salt in ("one", "", "one", ""):
            outcome = engine.generate(of_tenant[salt])
            assert outcome.tokens == reference.tokens(of_tenant[""])
            loaded.append(outcome.count("loaded_tokens"))
            engine.forget()
        assert loaded == [0, 0, 672, 672]
        engine.forget(is_store_too=True)
        assert engine.generate(of_tenant[""]).count("loaded_tokens") == 0
        engine.stop()


@FULL
@pytest.mark.parametrize("is_native", [True, False])
def test_latents_are_the_tiers_too(engines: Engines, store: Store, tmp_path: Path, is_native: bool) -> None:
    """Bytes are the oracle. Without `native` the two share nothing."""
    make_deepseek(tmp_path / "deepseek")
    model = tmp_path / "deepseek"
    with engines.tiered(store.tier(epoch="tiny"), model, is_asynchronous=True) as engine:
        engine.generate_each(PROMPTS[:3])
        engine.stop()
    stored = object_keys(store)
    with engines.cached(store.connector(native=is_native), model) as engine:
        engine.watch()
        warm = engine.generate_each(PROMPTS[:3])
        loaded = engine.loaded()
        engine.stop()
    assert bool(set(loaded) & stored) == is_native
    assert warm.count("load_failures") == 0
    assert loaded == {key: hashlib.sha256(store.get(key)).hexdigest() for key in loaded}


@FULL
@pytest.mark.timeout(600)
def test_one_copy_of_latents_serves_both_with_two_ranks(engines: Engines, store: Store, tmp_path: Path) -> None:
    make_deepseek(tmp_path / "deepseek")
    model, prompts = tmp_path / "deepseek", PROMPTS[:2]
    with engines.multiprocess(store.connector(native=True), model, tensor_parallel_size=2) as engine:
        engine.generate_each(prompts)
        assert not engine.has_said("not layer by layer")
        engine.stop()
    stored = object_keys(store)
    assert len(stored) > 20
    assert {key.split("/")[0] for key in stored} == {"vllm"}
    with engines.tiered_apart(store.tier(epoch="tiny"), model, tensor_parallel_size=2) as engine:
        loaded = engine.generate_each(prompts).prometheus["tier_loaded_chunks"]
        engine.stop()
    assert loaded > 20


LORA: dict[str, Json] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


@FULL
def test_an_adapter_is_known_by_its_contents_to_both(engines: Engines, store: Store, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "copy-of-one", "two")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        make_adapter(folder, seed)
    one, copy, two = (
        replace(PROMPTS[0], lora=(folder.name, number, str(folder))) for number, folder in enumerate(folders, 1)
    )
    with engines.cached(store.tier(epoch="tiny"), is_asynchronous=True, **LORA) as engine:
        wanted = engine.generate([one]).tokens
        assert len(object_keys(store)) > 20
        engine.stop()
    with engines.cached(store.connector(native=True), **LORA) as engine:
        shared, other = engine.generate([copy]), engine.generate([two])
        assert (shared.tokens, shared.count("loaded_tokens")) == (wanted, 672)
        assert (other.tokens == wanted, other.count("loaded_tokens")) == (False, 0)
        engine.stop()


@FULL
def test_parts_of_several_ranks_come_over_the_tier(engines: Engines, reference: Reference, store: Store) -> None:
    for _ in range(2):
        with engines.multiprocess(store.connector(native=True), tensor_parallel_size=2) as engine:
            assert engine.generate_each(PROMPTS[:3]).tokens == reference.tokens(PROMPTS[:3])
            assert engine.has_said("parts of several ranks in one object")
            engine.stop()
    assert {key.split("/")[0] for key in every_key(store)} == {"vllm"}
