"""A real engine that takes encoded chunks, beside one that does not, over one store that keeps them encoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.messages import Prompt
from tests.engines.model import LAYERS
from tests.engines.prompts import unrelated
from tests.engines.store import running_store
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.engines_full]
PROMPT = unrelated(41, 1, 640)
CONFIG = """
[compression]
policy = "adaptive"
alpha_s = 0
memory_bytes_per_s = 1e8
home_bytes_per_s = 5e7
"""
"""Quality counts for nothing here, so that everything is encoded that somebody takes so."""
ATTEMPTS = 20
LONGER = [Prompt((*PROMPT[0].tokens, *unrelated(42, 1, 128)[0].tokens))]
REPLACING = """
[compression]
policy = "adaptive"

[[buckets]]
name = "kv-cache"
capacity_bytes = "16MiB"
eviction = "lru"
lossy = "replace"
"""


def test_an_engine_that_accepts_loss_gets_encoded_chunks_and_another_gets_exact_ones(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """The exact engine's tokens are those of the reference before, and after, chunks lie encoded in memory."""
    tokens = reference.tokens(PROMPT)
    with running_store(tmp_path / "store", config=CONFIG) as store:
        with engines.cached(store.connector()) as engine:
            assert engine.generate(PROMPT).tokens == tokens
            engine.stop()
        with engines.cached(store.connector(lossy="adaptive", load="all", transport="shm")) as engine:
            encoded = 0.0
            for _ in range(ATTEMPTS):
                engine.forget()
                outcome = engine.generate(PROMPT)
                assert outcome.lost_blocks == 0
                assert outcome.count("loaded_chunks") > 0
                encoded = outcome.count("lossy_chunks")
                if encoded:
                    assert 0 < outcome.counters["lossy_error"] < encoded
                    break
            assert encoded
            before = store.keys()
            outcome = engine.generate(LONGER)
            assert outcome.count("lossy_unstored_chunks") > 0
            engine.stop()
            assert store.keys() == before  # what was computed from encoded chunks is in nobody's store
        with engines.cached(store.connector(load="all")) as engine:
            engine.forget()
            outcome = engine.generate(PROMPT)
            assert outcome.tokens == tokens
            assert outcome.count("loaded_chunks") > 0
            assert outcome.count("lossy_chunks") == 0
            engine.stop()


def test_an_engine_bounds_the_loss_by_what_was_measured_on_its_model(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """Its keys name the model. An engine with a tighter bound gets exact chunks from the same store."""
    tokens = reference.tokens(PROMPT)
    figures = {"kl": 0.125, "kl_high": 0.25, "recall_loss": 0.0, "recall_loss_high": 0.0}
    model = {
        "model": "tiny", "layers": LAYERS, "width": 128, "element": "float32", "chunk_tokens": 64, "texts": "",
        "text_count": 2, "release": "1", "forms": dict.fromkeys(("kivi8-1", "k8v4-1", "kivi4-1"), figures),
    }  # fmt: skip
    losses = tmp_path / "losses.json"
    losses.write_text(json.dumps({"version": 1, "models": [model]}))
    with running_store(tmp_path / "store", config=f'{CONFIG}losses = "{losses}"\n') as store:
        with engines.cached(store.connector(lossy={"max_loss": 0.25}, load="all")) as engine:
            assert engine.generate(PROMPT).tokens == tokens

            def has_come_encoded() -> bool:
                engine.forget()
                return engine.generate(PROMPT).count("lossy_chunks") > 0

            assert eventually(has_come_encoded, 120)
            engine.stop()
        with engines.cached(store.connector(lossy={"max_loss": 0.2}, load="all")) as engine:
            outcome = engine.generate(PROMPT)
            assert outcome.tokens == tokens
            assert outcome.count("loaded_chunks") > 0
            assert outcome.count("lossy_chunks") == 0
            engine.stop()


def test_an_engine_loads_chunks_that_the_store_has_replaced_if_it_accepts_them(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """To the exact engine they are missing: it computes them again, and so they are exact again."""
    tokens = reference.tokens(PROMPT)
    with running_store(tmp_path / "store", config=REPLACING) as store:
        with engines.cached(store.connector()) as engine:
            assert engine.generate(PROMPT).tokens == tokens
            (chunk_bytes,) = store.sizes()
            first = store.keys()
            for seed in range(60):
                engine.generate(unrelated(100 + seed, 1, 640))
                if eventually(lambda: min(store.sizes(first)) < chunk_bytes / 2, 1.0):
                    break
            assert min(store.sizes(first)) < chunk_bytes / 2
            engine.stop()
        with engines.cached(store.connector(lossy="bounded", load="all")) as engine:
            outcome = engine.generate(PROMPT)
            assert 0 < outcome.count("lossy_chunks") <= outcome.count("loaded_chunks")
            assert outcome.lost_blocks == 0
            engine.stop()
        with engines.cached(store.connector(load="all")) as engine:
            outcome = engine.generate(PROMPT)
            assert outcome.tokens == tokens
            assert outcome.count("lossy_chunks") == 0
            engine.stop()
        assert store.sizes(first) == {chunk_bytes}
