"""Loads that are over before their requests run, against a played store, without vLLM."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from descriptors.errors import ChunkUnavailable, ErrorCode
from descriptors.layer_forms import EXACT, FormRun, LayerForms
from descriptors.layout import ChunkLayout
from descriptors.recompute import PrefillCosts
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.vllm.blocks import plain_layer
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.loads import Loads
from nixl_client.connectors.vllm.loads_ahead import LoadsAhead
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.steps import Grown, LoadJob, Report, StoreJob
from nixl_client.lossy import Lossy
from tests.support.vllm_played import PlayedStore

GRID = Grid(8, 8)
HEADS, HEAD_DIM, LAYERS = 2, 8, 3
LAYOUT = ChunkLayout(LAYERS, 8, 2 * 8 * HEADS * HEAD_DIM * 4)
LATE = (0.0, 100.0, 100.0)
"""Seconds after which layers are there: in a test, never."""


class Ahead:
    """A worker's loads, over made-up memory of eight blocks and a store with four chunks."""

    def __init__(self, chunks_at_once: int = 8, lossy: Lossy = Lossy.OFF, load_timeout_s: float = 60.0) -> None:
        self.caches = [torch.randn(8, HEADS, 8, 2 * HEAD_DIM) for _ in range(LAYERS)]
        self.store = PlayedStore(LAYOUT)
        self.chunks = torch.randn(4, LAYERS, 2, 8, HEADS, HEAD_DIM)
        self.store.chunks = {f"key{index}": chunk.numpy().tobytes() for index, chunk in enumerate(self.chunks)}
        options = VllmOptions(
            "http://127.0.0.1:1",
            "b",
            staging_bytes=chunks_at_once * LAYOUT.chunk_bytes,
            lossy=lossy,
            load_timeout_s=load_timeout_s,
        )
        self.counters = Counters()
        self.told = threading.Semaphore(0)
        client: Any = self.store
        loads = Loads(
            client=client,
            rank=0,
            grid=GRID,
            layout=LAYOUT,
            layers=[plain_layer(cache) for cache in self.caches],
            dtype=torch.float32,
            options=options,
            counters=self.counters,
            is_ahead=True,
            on_end=self.ended,
        )
        self.loads = LoadsAhead(loads, torch.device("cpu"))

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.loads.close(30.0)

    def ended(self, job: LoadJob) -> None:
        self.loads.ended(job)
        self.told.release()

    def job(self, job_id: int, blocks: tuple[int, ...], first: int = 0) -> LoadJob:
        """Chunks from `first` on into these blocks, for a request of its own."""
        span = GRID.load_range(first * 8, len(blocks) * 8, (0,) * first + blocks)
        keys = tuple(f"key{index}" for index in range(first, first + len(blocks)))
        return LoadJob(job_id, f"r{job_id}", span, (keys,))

    def over(self, count: int = 1) -> set[str]:
        """So many loads have ended; which requests are told."""
        for _ in range(count):
            assert self.told.acquire(timeout=60)
        return self.loads.take_over()

    def holds(self, block: int, chunk: int) -> bool:
        """Whether the block has the KV of the chunk, in all layers."""
        return all(
            torch.equal(plain_layer(cache).keys[block, :, 0, :, :, 0], self.chunks[chunk, layer, 0])
            for layer, cache in enumerate(self.caches)
        )


def test_a_request_is_told_once_all_of_its_load_is_in_its_blocks() -> None:
    with Ahead() as ahead:
        ahead.loads.start([ahead.job(1, (5, 2, 7))])
        assert ahead.over() == {"r1"}
        assert [ahead.holds(block, chunk) for chunk, block in enumerate((5, 2, 7))] == [True] * 3
        assert (ahead.loads.take_lost_blocks(), ahead.loads.take_report()) == (set(), Report(ended_loads={1: 1}))
        assert ahead.over(0) == set()
        assert "load_wait_s" not in ahead.counters.totals


def test_what_was_lost_is_told_with_its_request_and_not_before() -> None:
    """vLLM takes blocks that are told later for loaded."""
    with Ahead() as ahead:
        ahead.store.failure = ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, "played", index=2)
        ahead.loads.start([ahead.job(1, (5, 2, 7))])
        assert ahead.told.acquire(timeout=60)
        assert (ahead.loads.take_lost_blocks(), ahead.loads.take_report()) == (set(), Report())
        assert ahead.loads.take_over() == {"r1"}
        assert ahead.loads.take_lost_blocks() == {7}
        assert ahead.loads.take_report().bad_chunks == {1: 2}
        assert ahead.holds(5, 0)
        assert ahead.holds(2, 1)


def test_loads_that_the_buffer_does_not_hold_at_once_come_one_after_the_other() -> None:
    with Ahead(chunks_at_once=2) as ahead:
        for number, block in enumerate((1, 3, 5)):
            ahead.loads.start([ahead.job(number, (block, block + 1), first=number % 2)])
        assert ahead.over(3) == {"r0", "r1", "r2"}
        assert [ahead.holds(*pair) for pair in ((1, 0), (2, 1), (3, 1), (4, 2), (5, 0), (6, 1))] == [True] * 6
        assert ahead.counters.totals["loaded_chunks"] == 6


def test_a_load_that_cannot_be_started_is_lost_and_stores_go_on() -> None:
    with Ahead() as ahead:
        ahead.loads.start([ahead.job(1, (5, 2), first=9)])  # the played store raises
        assert ahead.over() == {"r1"}
        assert ahead.loads.take_lost_blocks() == {5, 2}
        assert ahead.loads.take_report().failed_loads == 1
        assert ahead.loads.is_idle.wait(60)
        ahead.loads.start([ahead.job(2, (5, 2))])
        assert ahead.over() == {"r2"}
        assert ahead.holds(5, 0)


def test_the_time_of_a_load_runs_from_when_it_was_asked_for() -> None:
    """However long those before it took, its request does not wait longer."""
    with Ahead(load_timeout_s=60.0) as ahead:
        ahead.loads._loads.start([ahead.job(1, (1,))], since_s=time.monotonic() - 61)
        assert ahead.over() == {"r1"}
        assert ahead.loads.take_lost_blocks() == {1}
        assert not ahead.store.fetched


def test_a_load_that_is_sooner_computed_is_given_up() -> None:
    with Ahead() as ahead:
        ahead.store.layers_s = [LATE]
        ahead.loads.start([ahead.job(1, (5, 2))], costs=PrefillCosts(token_us=1000.0))
        assert ahead.over() == {"r1"}
        assert ahead.loads.take_lost_blocks() == {5, 2}
        assert (ahead.loads.late_count, ahead.loads.take_report().failed_loads) == (1, 0)


def test_a_shutdown_gives_up_what_is_under_way_and_what_waits() -> None:
    with Ahead(chunks_at_once=1) as ahead:
        ahead.store.layers_s = [(0.0, 0.1, 0.2)]
        ahead.loads.start([ahead.job(1, (1,))])
        ahead.loads.start([ahead.job(2, (2,))])
        ahead.loads.close(30.0)
        assert ahead.loads._thread is not None
        assert not ahead.loads._thread.is_alive()
        assert not ahead.loads.take_over() & {"r2"}


@pytest.mark.parametrize("is_exact", [True, False])
def test_what_is_computed_behind_a_lossy_load_is_never_stored(is_exact: bool) -> None:
    """Its request runs, and has new blocks, in a step after the load."""
    with Ahead(lossy=Lossy.BOUNDED) as ahead:
        first = "kivi4-1" if not is_exact else EXACT
        ahead.store.forms = LayerForms((FormRun(EXACT, 1, 512), FormRun(first, 1, 200)), 0.1, 0.02)
        lossy = ahead.loads.lossy_blocks
        lossy.begin([], frozenset((5, 2)))
        ahead.loads.start([ahead.job(1, (5, 2))])
        assert ahead.over() == {"r1"}
        lossy.begin([Grown(2, (6,))], frozenset((6,)))

        def covers(block: int) -> bool:
            return lossy.covers(StoreJob(7, "r1", GRID.store_range(0, 1, (block,)), (("key",),)))

        assert [covers(block) for block in (5, 2, 6)] == [False, not is_exact, not is_exact]
