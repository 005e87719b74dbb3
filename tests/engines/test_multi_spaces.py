"""What KV bytes depend on beside tokens: adapters, the cache's type, windows. Each has keys of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines.messages import Json
from tests.engines.model import make_model
from tests.engines.multi_engine import Launch, live_engines, object_cache
from tests.engines.multi_models import RANK, make_adapter, make_gemma
from tests.engines.prompts import shared_prefixes
from tests.engines.store import Store

pytestmark = [pytest.mark.engines_full, pytest.mark.timeout(600)]
PROMPT = shared_prefixes()[:1]
HIT_TOKENS = 672
"""All 21 whole chunks of the prompt's 680 tokens."""
WINDOW = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama."""
    folder = tmp_path_factory.mktemp("spaces") / "model"
    make_model(folder)
    return folder


def test_adapters_share_nothing_and_one_that_was_replaced_is_not_taken_for_the_old(
    model: Path, store: Store, tmp_path: Path
) -> None:
    """Also under the same name and path: an adapter that is trained on is written over the last one."""
    for number in (1, 2, 3):
        make_adapter(tmp_path / f"adapter-{number}", number)
    adapters: list[Json] = [None]
    adapters += [[f"name-{number}", number, str(tmp_path / f"adapter-{number}")] for number in (1, 2, 3)]
    arguments: dict[str, Json] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
    cached = Launch(model, {**arguments, "kv_transfer_config": object_cache(store.connector())})
    with live_engines(Launch(model, arguments), cached) as (plain, engine):
        wanted = [plain.generate(PROMPT, lora=adapter).tokens for adapter in adapters]
        assert len({str(tokens) for tokens in wanted}) == 4
        for count, adapter in enumerate(adapters[:3], 1):
            assert engine.generate(PROMPT, lora=adapter).tokens == wanted[count - 1]
            assert engine.count("stored_chunks", chunks=21 * count) == 21 * count
        assert engine.count("store_hit_tokens") == 0
        assert len(store.keys()) == 63
        for count, adapter in enumerate(adapters[:3], 1):
            engine.ask("forget")
            assert engine.generate(PROMPT, lora=adapter).tokens == wanted[count - 1]
            assert engine.count("loaded_tokens") == HIT_TOKENS * count
        assert engine.held_blocks() == 0

    shutil.copytree(tmp_path / "adapter-3", tmp_path / "adapter-1", dirs_exist_ok=True)
    with live_engines(cached) as (engine,):
        assert engine.generate(PROMPT, lora=adapters[1]).tokens == wanted[3]
        assert engine.count("store_hit_tokens") == 0
        assert engine.generate(PROMPT, lora=adapters[2]).tokens == wanted[2]
        assert engine.count("loaded_tokens") == HIT_TOKENS


def test_a_quantised_cache_is_stored_as_it_is_and_not_taken_for_one_that_is_not(model: Path, store: Store) -> None:
    """Half of float16's bytes, or a quarter of float32's; loaded bit by bit, tokens are those of the same engine."""
    quantised: dict[str, Json] = {"kv_cache_dtype": "fp8"}
    cached = Launch(model, {**quantised, "kv_transfer_config": object_cache(store.connector())})
    other = Launch(model, {"kv_transfer_config": object_cache(store.connector())})
    with live_engines(Launch(model, quantised), cached, other) as (plain, engine, unquantised):
        wanted = plain.generate(PROMPT).tokens
        assert engine.generate(PROMPT).tokens == wanted
        assert engine.count("stored_chunks", chunks=21) == 21
        engine.ask("forget")
        assert engine.generate(PROMPT).tokens == wanted
        assert engine.count("loaded_tokens") == HIT_TOKENS
        unquantised.generate(PROMPT)
        assert (unquantised.count("lookups"), unquantised.count("store_hit_tokens")) == (1, 0)


def test_windows_come_layer_by_layer_where_the_engine_is_told_to_keep_all_tokens_for_them(
    store: Store, tmp_path: Path
) -> None:
    """`--disable-hybrid-kv-cache-manager`: vLLM then has one group."""
    make_gemma(tmp_path / "model", WINDOW)
    arguments: dict[str, Json] = {
        "disable_hybrid_kv_cache_manager": True,
        "kv_transfer_config": object_cache(store.connector()),
    }
    with live_engines(Launch(tmp_path / "model"), Launch(tmp_path / "model", arguments)) as (plain, engine):
        prompts = shared_prefixes()[:4]
        wanted = plain.generate(prompts).tokens
        assert engine.generate(prompts).tokens == wanted
        assert len(engine.ask("groups")) == 1
        engine.count("stored_chunks", chunks=25)
        engine.ask("forget")
        loaded = engine.count("loaded_tokens")
        assert engine.generate(prompts[:1]).tokens == wanted[:1]
        assert engine.count("loaded_tokens") - loaded == HIT_TOKENS
        assert engine.held_blocks() == 0
