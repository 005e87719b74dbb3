"""Engines of several workers: each keeps its part of the KV under keys of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import Reference
from tests.engines.messages import Json
from tests.engines.model import TOKEN_BYTES, make_model
from tests.engines.multi_engine import Launch, live_engines, object_cache
from tests.engines.prompts import shared_prefixes
from tests.engines.store import Store

pytestmark = [pytest.mark.engines_full, pytest.mark.timeout(600)]
PROMPT = shared_prefixes()[:1]
CHUNKS = 21
"""Whole chunks of the prompt's 680 tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the reference."""
    folder = tmp_path_factory.mktemp("ranks") / "model"
    make_model(folder)
    return folder


def split(model: Path, connector: dict[str, Json]) -> Launch:
    """An engine of two workers. (Two pipeline stages fail on CPUs in vLLM 0.32, with a connector or without.)"""
    transfer = object_cache(connector)
    return Launch(
        model,
        {"kv_transfer_config": transfer, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    )


def test_every_rank_loads_its_own_part_and_the_hit_is_what_all_ranks_have(
    model: Path, reference: Reference, store: Store
) -> None:
    """Another split of the same model finds nothing: its bytes lie otherwise."""
    wanted = reference.tokens(PROMPT)
    with live_engines(split(model, store.connector())) as (engine,):
        assert engine.generate(PROMPT).tokens == wanted
        assert engine.count("stored_chunks", chunks=2 * CHUNKS) == 2 * CHUNKS
        assert engine.held_blocks() == 0
        keys = engine.ask("keys", tokens=list(PROMPT[0].tokens))
    assert [len(of_rank) for of_rank in keys] == [CHUNKS, CHUNKS]
    assert store.keys() == {key for of_rank in keys for key in of_rank}
    assert store.sizes() == {32 * TOKEN_BYTES // 2}

    store.delete(keys[1][8])
    reading = store.connector(store=False)
    whole = Launch(model, {"kv_transfer_config": object_cache(reading)})
    with live_engines(split(model, reading), whole) as (engine, single):
        assert engine.generate(PROMPT).tokens == wanted
        assert engine.count("store_hit_tokens") == 8 * 32
        assert engine.count("loaded_tokens") == 2 * 8 * 32
        assert single.generate(PROMPT).tokens == wanted
        assert (single.count("lookups"), single.count("store_hit_tokens")) == (1, 0)
