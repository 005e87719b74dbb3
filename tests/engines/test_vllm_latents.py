"""MLA in the layerwise connector: a latent in place of keys and values, the same on all tensor-parallel ranks. Bytes
are the oracle, for on CPUs vLLM's kernel for it answers differently after any load.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.engines.conftest import Engines
from tests.engines.prompts import shared_prefixes
from tests.engines.store import Store
from tests.engines.tier_models import make_deepseek

pytestmark = pytest.mark.timeout(300)
PROMPTS = shared_prefixes()[:3]
LATENT_BYTES = 576 * 4
LAYERS = 3
BLOCK_TOKENS = 16
"""vLLM's choice for MLA on CPUs."""


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of DeepSeek-V2's kind."""
    folder = tmp_path_factory.mktemp("latents") / "deepseek"
    make_deepseek(folder)
    return folder


@pytest.mark.parametrize("is_asynchronous", [False, pytest.param(True, marks=pytest.mark.engines_full)])
def test_latents_lie_in_the_blocks_as_they_were_stored(
    engines: Engines, store: Store, deepseek: Path, is_asynchronous: bool
) -> None:
    with engines.cached(store.connector(), deepseek, is_asynchronous=is_asynchronous) as engine:
        assert engine.generate_each(PROMPTS).count("stored_chunks") == len(store.keys())
        engine.stop()
    assert store.sizes() == {LAYERS * BLOCK_TOKENS * LATENT_BYTES}
    with engines.cached(store.connector(), deepseek, is_asynchronous=is_asynchronous) as engine:
        engine.watch()
        warm = engine.generate_each(PROMPTS)
        loaded = engine.loaded()
        engine.stop()
    assert warm.count("loaded_chunks") >= len(loaded) > 40
    assert (warm.count("load_failures"), warm.lost_blocks) == (0, 0)
    assert loaded == {key: hashlib.sha256(store.get(key)).hexdigest() for key in loaded}


@pytest.mark.engines_full
@pytest.mark.timeout(600)
def test_two_ranks_store_one_copy_and_one_rank_reads_it(engines: Engines, store: Store, deepseek: Path) -> None:
    for ranks in (2, 2):
        with engines.multiprocess(store.connector(), deepseek, tensor_parallel_size=ranks) as engine:
            engine.generate(PROMPTS)
            engine.stop()
    stored = store.keys()
    assert all("/tp0of1-" in key for key in stored)
    assert store.sizes() == {LAYERS * BLOCK_TOKENS * LATENT_BYTES}
    with engines.cached(store.connector(), deepseek) as engine:
        warm = engine.generate_each(PROMPTS)
        assert warm.count("loaded_chunks") > 40
        engine.stop()
    assert store.keys() >= stored  # its answers are others, and are stored behind
