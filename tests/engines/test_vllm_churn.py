"""Long runs: prefixes come, grow, are evicted and lost, requests are batched and preempted; tokens stay right."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.conftest import Engines, Reference
from tests.engines.engine import Engine
from tests.engines.messages import Json, Outcome, Prompt
from tests.engines.prompts import batches, prefix_tree
from tests.engines.store import Store, running_store

SMALL_CACHE: dict[str, Json] = {"num_gpu_blocks_override": 56, "max_num_batched_tokens": 512, "max_num_seqs": 8}
SALTS = ("", "a tenant")
SAID_OF_LOADS = ("lookups", "lookup_failures", "load_failures", "stored_chunks", "store_failures", "store_hit_tokens")


@dataclass(frozen=True, slots=True)
class Churn:
    """How long, and with what connector and engine."""

    seed: int
    prompt_count: int
    restarts: int
    connector: dict[str, Json]
    options: dict[str, Json]
    is_asynchronous: bool = False


SHORT = Churn(1, 48, 1, {}, {})
LONG = {
    "one chunk to a block": Churn(2, 300, 3, {}, {}),
    "four blocks to a chunk, http": Churn(3, 200, 2, {"chunk_tokens": 128, "transport": "http"}, {}),
    "two chunks to a block": Churn(4, 200, 2, {"chunk_tokens": 16}, {}),
    "without prefix caching": Churn(5, 200, 2, {}, {"enable_prefix_caching": False}),
    "layer by layer": Churn(6, 200, 2, {"delivery": "layer-major"}, {}),
    "ahead of requests": Churn(8, 200, 2, {"chunk_tokens": 16}, {}, is_asynchronous=True),
    "ahead of requests, little room to load": Churn(9, 200, 2, {"staging_bytes": 1 << 20}, {}, is_asynchronous=True),
    "little room to load, a short queue": Churn(7, 200, 2, {"staging_bytes": 1 << 20, "store_queue_chunks": 8}, {}),
}


@pytest.mark.timeout(300)
@pytest.mark.engines_full
def test_prefixes_that_churn_through_a_small_cache_give_the_same_tokens(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    expect_right_tokens(SHORT, engines, reference, tmp_path)


@pytest.mark.engines_full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LONG)
def test_long_churn_gives_the_same_tokens(engines: Engines, reference: Reference, tmp_path: Path, name: str) -> None:
    """With every G, restarts between, and chunks that somebody deletes or damages meanwhile. So many prompts preempt
    each other; the few of the short test may come too slowly for that, on a loaded machine.
    """
    outcomes = expect_right_tokens(LONG[name], engines, reference, tmp_path)
    assert sum(outcome.preemptions for outcome in outcomes) > 0


def expect_right_tokens(churn: Churn, engines: Engines, reference: Reference, folder: Path) -> list[Outcome]:
    """Each batch is compared; between batches a few stored chunks are lost, so that loads fail in the middle."""
    source = random.Random(churn.seed)
    groups = batches(churn.seed, prefix_tree(churn.seed, churn.prompt_count, SALTS), 12)
    outcomes: list[Outcome] = []
    per_engine = -(-len(groups) // (churn.restarts + 1))
    with running_store(folder / "store", options=("--dram-bytes", "0")) as store:
        for first in range(0, len(groups), per_engine):
            options = SMALL_CACHE | churn.options
            connector = store.connector(**churn.connector)
            with engines.cached(connector, is_asynchronous=churn.is_asynchronous, **options) as engine:
                for group in groups[first : first + per_engine]:
                    outcomes.append(expect_batch(engine, reference, source, group))
                    lose_some(store, source)
                engine.stop()
    loaded = sum(outcome.count("loaded_tokens") for outcome in outcomes)
    assert loaded > 0, {name: [each.count(name) for each in outcomes] for name in SAID_OF_LOADS}
    return outcomes


def expect_batch(engine: Engine, reference: Reference, source: random.Random, group: list[Prompt]) -> Outcome:
    """All of a group at once."""
    counts = [source.choice((1, 8, 24, 70)) for _ in group]
    outcome = engine.generate(group, counts)
    assert outcome.tokens == reference.tokens(group, counts)
    assert outcome.lost_blocks == 0
    return outcome


def lose_some(store: Store, source: random.Random) -> None:
    """One chunk is deleted, and one damaged on disk."""
    keys = sorted(store.keys())
    if keys:
        store.damage(source.choice(keys), 1000)
        store.delete(source.choice(keys))
