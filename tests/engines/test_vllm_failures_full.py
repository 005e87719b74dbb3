"""Variations of the failures in test_vllm_failures, and servers that come and go for minutes."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from bench.beds.processes import free_port
from tests.engines.conftest import Engines, Reference
from tests.engines.engine import await_true
from tests.engines.failing import (
    HANG_S,
    NOT_STORED,
    ONE,
    ONE_TOKENS,
    PROMPTS,
    QUICK,
    RECOMPUTED,
    SLOW_LINK,
    expect_recomputed,
    has_loaded,
    layerwise,
    warm_store,
)
from tests.engines.messages import Json, Moment
from tests.engines.prompts import batches, prefix_tree
from tests.engines.slow_proxy import slow_proxy
from tests.engines.store import Store, connector_options, running_store

pytestmark = [pytest.mark.engines_full, pytest.mark.timeout(900)]
PROXY_BYTES_PER_S = 50_000.0


def test_a_load_through_a_network_that_crawls_ends_at_its_deadline(
    engines: Engines, reference: Reference, copied: Path
) -> None:
    """Bytes come all the time, too few of them: no wait for the next byte ends this."""
    with warm_store(copied) as store, slow_proxy(store.endpoint, PROXY_BYTES_PER_S) as endpoint:
        options = connector_options(endpoint, transport="http", **QUICK)
        with engines.cached(options) as engine:
            expect_recomputed(engine.generate(ONE), reference.tokens(ONE))
            assert engine.has_said(RECOMPUTED)
            engine.forget()
            assert engine.generate(ONE).tokens == reference.tokens(ONE)
            engine.stop()


@pytest.mark.parametrize("transport", ["shm", "http"])
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "hangs"])
def test_several_loads_at_once_fail_together(
    engines: Engines, reference: Reference, copied: Path, is_killed: bool, transport: str
) -> None:
    """They share a staging buffer that is given up, and their requests share blocks."""
    with (
        warm_store(copied, SLOW_LINK) as store,
        engines.cached(layerwise(store, transport, 60.0 if is_killed else HANG_S)) as engine,
    ):
        outcome = engine.generate(PROMPTS, at=Moment.LAYER, do=store.server.kill if is_killed else store.stop)
        assert outcome.has_happened
        assert outcome.tokens == reference.tokens(PROMPTS)
        assert (outcome.count("load_failures") > 0, outcome.lost_blocks) == (True, 0)
        assert engine.has_said(RECOMPUTED)
        if not is_killed:
            store.go_on()
            await_true(lambda: has_loaded(engine, reference.tokens(ONE), ONE, ONE_TOKENS))
        engine.stop()


@pytest.mark.parametrize(
    ("connector", "options", "lost_index", "loaded_tokens"),
    [
        ({"chunk_tokens": 128}, {}, 3, 384),
        ({"chunk_tokens": 16}, {}, 7, 96),
        ({}, {"enable_prefix_caching": False}, 7, 224),
        ({}, {"max_num_batched_tokens": 128}, 7, 224),
        ({"transport": "http", "delivery": "layer-major"}, {}, 7, 224),
        ({"delivery": "layer-major"}, {}, 0, 0),
    ],
)
def test_a_chunk_lost_after_the_lookup_costs_its_blocks_and_those_after_it(
    engines: Engines,
    reference: Reference,
    store: Store,
    connector: dict[str, Json],
    options: dict[str, Json],
    lost_index: int,
    loaded_tokens: int,
) -> None:
    """Whatever G, a block is loaded if all of it is there."""
    extra = store.connector(**connector, retry_s=0.0)
    with engines.cached(extra, **options) as engine:
        engine.generate(ONE)
        engine.stop()
    with engines.cached(extra, **options) as engine:
        keys = engine.keys(ONE[0])
        outcome = engine.generate(ONE, at=Moment.MATCHED, do=lambda: store.delete(keys[lost_index]))
        assert outcome.tokens == reference.tokens(ONE)
        assert (outcome.count("loaded_tokens"), outcome.lost_blocks) == (loaded_tokens, 0)
        assert engine.has_said(RECOMPUTED)
        assert set(keys) <= store.keys()
        engine.stop()


def test_a_server_killed_during_a_put_leaves_whole_prefixes(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """Another engine finds what was written, gapless, and nothing that is wrong."""
    with running_store(tmp_path / "store") as store, engines.cached(store.connector(**QUICK)) as engine:
        engine.generate(PROMPTS[4:6])
        outcome = engine.generate(PROMPTS, at=Moment.PUT, do=store.server.kill)
        assert outcome.tokens == reference.tokens(PROMPTS)
        assert (outcome.has_happened, outcome.lost_blocks) == (True, 0)
        assert engine.has_said(NOT_STORED)
        engine.stop()
    with running_store(tmp_path / "store") as store, engines.cached(store.connector(**QUICK)) as engine:
        outcome = engine.generate(PROMPTS)
        assert outcome.tokens == reference.tokens(PROMPTS)
        assert outcome.count("loaded_tokens") >= 256
        assert (outcome.count("load_failures"), outcome.lost_blocks) == (0, 0)
        engine.stop()


def test_servers_that_come_and_go_under_churn_cost_no_token(
    engines: Engines, reference: Reference, tmp_path: Path
) -> None:
    """Killed before and after lookups, during loads and puts, and started again on the same data and port."""
    port, source = free_port(), random.Random(8)
    waits = QUICK | {"retry_s": 0.0}  # no moment passes by while the engine leaves the store alone
    extra = connector_options(f"http://127.0.0.1:{port}", delivery="layer-major", **waits)
    groups = batches(8, prefix_tree(8, 200), 10)
    moments = [None, *Moment]
    happened, loaded = set(), 0
    options: dict[str, Json] = {"num_gpu_blocks_override": 64, "max_num_seqs": 8}
    with contextlib.ExitStack() as servers, engines.cached(extra, **options) as engine:
        store: Store | None = None
        for group in groups:
            if store is None:
                store = servers.enter_context(running_store(tmp_path / "store", config=SLOW_LINK, port=port))
            moment = source.choice(moments)
            counts = [source.choice((1, 8, 40)) for _ in group]
            kill = store.server.kill
            outcome = engine.generate(group, counts, at=moment, do=kill) if moment else engine.generate(group, counts)
            assert outcome.tokens == reference.tokens(group, counts)
            assert outcome.lost_blocks == 0
            loaded += outcome.count("loaded_tokens")
            if outcome.has_happened:
                happened.add(moment)
                store = None
        engine.stop()
    assert happened == set(Moment)
    assert loaded > 0
