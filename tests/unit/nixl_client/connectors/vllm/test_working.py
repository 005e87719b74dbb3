"""The vLLM connector's side in a worker, without vLLM: memory layouts, stores, and loads against a played store."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from descriptors.errors import ChunkUnavailable, ErrorCode, ServerError
from descriptors.layer_forms import EXACT, FormRun, LayerForms
from descriptors.layout import ChunkLayout
from descriptors.recompute import PrefillCosts
from nixl_client.connectors.counters import Counters
from nixl_client.connectors.vllm.blocks import Blocks, Packing, Run, find_packings, find_runs, packed_layer, plain_layer
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.loads import Loads
from nixl_client.connectors.vllm.lossy_blocks import LossyBlocks
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.steps import Grown, LoadJob, Report, Step, StoreJob
from nixl_client.connectors.vllm.worker_ledger import (
    CountDropped,
    FreeBlocks,
    StopReading,
    TellRead,
    WorkerLedger,
    WriteJob,
)
from nixl_client.connectors.vllm.working import IdleWorker
from nixl_client.connectors.vllm.writer import Writer
from nixl_client.lossy import Lossy
from tests.support.vllm_played import PlayedStore, store_job


class TestWorkerLedger:
    """Events in, instructions out."""

    def ledger(self, *jobs: StoreJob, queue_chunks: int = 100) -> WorkerLedger:
        ledger = WorkerLedger(queue_chunks, 10.0)
        for job in jobs:
            assert ledger.add(job, 0.0) == []
        return ledger

    def test_a_full_queue_drops_and_breaks_the_prefix_off(self) -> None:
        ledger = self.ledger(store_job(1, "a", (1, 2)), queue_chunks=3)
        assert ledger.add(store_job(2, "b", (3, 4)), 0.0) == [CountDropped(2), TellRead(2)]
        assert ledger.add(store_job(3, "b", (5,)), 0.0) == [CountDropped(1), TellRead(3)]
        assert ledger.waiting_chunks == 2

    def test_rewritten_blocks_void_what_waits_and_what_is_under_way(self) -> None:
        first, second, third = (store_job(1, "a", (1,)), store_job(2, "b", (2,)), store_job(3, "c", (3,)))
        ledger = self.ledger(first, second, third)
        assert ledger.begin_next() == [WriteJob(first)]
        assert ledger.may_read(1)
        assert ledger.void(frozenset({1, 2})) == [CountDropped(1), TellRead(2), StopReading(1)]
        assert not ledger.may_read(1)
        assert ledger.end(1) == [TellRead(1)]
        assert ledger.begin_next() == [WriteJob(third)]

    def test_with_every_block_rewritten_nothing_waits_any_more(self) -> None:
        """After a reset all bytes are others."""
        ledger = self.ledger(store_job(1, "a", (1,)), store_job(2, "b", (2,)))
        assert ledger.void(None) == [CountDropped(1), TellRead(1), CountDropped(1), TellRead(2)]
        assert ledger.is_idle

    def test_a_job_that_has_been_read_is_not_void(self) -> None:
        job = store_job(1, "a", (1,))
        ledger = self.ledger(job)
        assert ledger.begin_next() == [WriteJob(job)]
        assert ledger.end_read(1) == [TellRead(1)]
        assert ledger.void(frozenset({1})) == []
        assert ledger.end(1) == []
        assert ledger.is_idle

    def test_one_job_is_under_way_at_a_time(self) -> None:
        first, second = store_job(1, "a", (1,)), store_job(2, "a", (2,))
        ledger = self.ledger(first, second)
        assert ledger.begin_next() == [WriteJob(first)]
        assert ledger.begin_next() == []
        with pytest.raises(ValueError, match="not under way"):
            ledger.end(2)
        assert ledger.end(1) == [TellRead(1)]
        assert ledger.begin_next() == [WriteJob(second)]

    def test_blocks_are_freed_once_when_the_last_job_is_read(self) -> None:
        job = store_job(1, "a", (1,))
        ledger = self.ledger(job)
        assert ledger.await_free(["a", "z"]) == [FreeBlocks("z")]
        assert ledger.begin_next() == [WriteJob(job)]
        assert ledger.end_read(1) == [TellRead(1), FreeBlocks("a")]
        assert ledger.end(1) == []
        assert ledger.await_free([]) == []

    def test_stores_that_wait_too_long_let_go_of_their_blocks(self) -> None:
        """A store that hangs must not keep the engine's memory."""
        first, second = store_job(1, "a", (1,)), store_job(2, "b", (2,))
        ledger = self.ledger(first)
        assert ledger.add(second, 5.0) == []
        assert ledger.begin_next() == [WriteJob(first)]
        assert ledger.expire(11.0, is_reading=True) == []
        assert ledger.may_read(1)
        assert ledger.expire(16.0, is_reading=False) == [CountDropped(1), TellRead(2), TellRead(1)]
        assert not ledger.may_read(1)
        assert ledger.expire(17.0, is_reading=False) == []

    def test_a_failed_chunk_stops_its_prefix_until_the_request_ends(self) -> None:
        job = store_job(1, "a", (1,))
        ledger = self.ledger(job, store_job(2, "a", (2,)), store_job(3, "b", (3,)))
        assert ledger.begin_next() == [WriteJob(job)]
        assert ledger.fail(1) == [CountDropped(1), TellRead(2), TellRead(1)]
        assert ledger.add(store_job(4, "a", (4,)), 0.0) == [CountDropped(1), TellRead(4)]
        ledger.forget(["a"])
        assert ledger.add(store_job(5, "a", (1,)), 0.0) == [CountDropped(1), TellRead(5)]
        ledger.forget([])
        assert ledger.add(store_job(6, "a", (1,)), 0.0) == []

    def test_a_request_that_ended_before_its_chunk_failed_is_forgotten(self) -> None:
        """Or every such request would be remembered for ever."""
        job = store_job(1, "a", (1,))
        ledger = self.ledger(job)
        assert ledger.begin_next() == [WriteJob(job)]
        ledger.forget(["a"])
        ledger.forget([])
        assert ledger.fail(1) == [TellRead(1)]
        assert ledger.add(store_job(2, "a", (1,)), 0.0) == []


def engine_write(packing: Packing, values: Packing) -> Any:
    def write(keys: Any, value_states: Any, cache: Any) -> None:
        layer = packed_layer(cache, (packing, values))
        for part, states in enumerate((keys, value_states)):
            layer.write(Blocks([0]), states[None], 0, part)

    return write


class TestBlocks:
    @pytest.mark.parametrize("packing", [Packing(1, 1), Packing(32, 1), Packing(16, 2), Packing(2, 1)])
    def test_packings_are_found(self, packing: Packing) -> None:
        write = engine_write(packing, Packing(1, 1))
        assert find_packings(64, 2, 8, torch.bfloat16, write) == (packing, Packing(1, 1))

    def test_an_unknown_packing_is_refused(self) -> None:
        """Never wrong bytes: an engine that packs otherwise is not served."""

        def write(keys: Any, values: Any, cache: Any) -> None:
            cache.view(-1)[: keys.numel()] = keys.flatten().flip(0)

        with pytest.raises(ValueError, match="keys"):
            find_packings(32, 2, 8, torch.float32, write)

    @pytest.mark.parametrize("make", [plain_layer, lambda cache: packed_layer(cache, (Packing(32, 1), Packing(1, 1)))])
    def test_what_is_written_is_read_again_and_nothing_else_changes(self, make: Any) -> None:
        cache = torch.zeros((5, 2, 32, 16))
        layer = make(cache)
        states = torch.randn(2, 64, 2, 8)
        for part in (0, 1):
            layer.write(Blocks([3, 1]), states[part][None], 0, part)
        for part in (0, 1):
            assert torch.equal(layer.read(Blocks([3, 1]), 0, 64, part), states[part])
            assert torch.equal(layer.read(Blocks([1]), 16, 8, part), states[part][48:56])
        assert not cache[[0, 2, 4]].any()

    def test_plain_layers_are_keys_beside_values(self) -> None:
        cache = torch.arange(1 * 2 * 4 * 6).view(1, 2, 4, 6)
        values = plain_layer(cache).read(Blocks([0]), 0, 4, 1)
        assert torch.equal(values, cache[0, :, :, 3:].permute(1, 0, 2))


HEADS, HEAD_DIM, LAYERS = 2, 8, 3


class Worker:
    """Loads and a writer over one made-up engine memory."""

    def __init__(
        self, grid: Grid, load_timeout_s: float = 60.0, layer_count: int = LAYERS, lossy: Lossy = Lossy.OFF
    ) -> None:
        self.grid = grid
        self.layout = ChunkLayout(layer_count, grid.chunk_tokens, 2 * grid.chunk_tokens * HEADS * HEAD_DIM * 4)
        self.caches = [torch.randn(8, HEADS, grid.block_tokens, 2 * HEAD_DIM) for _ in range(layer_count)]
        layers = [plain_layer(cache) for cache in self.caches]
        self.store = PlayedStore(self.layout)
        self.counters = Counters()
        client: Any = self.store
        options = VllmOptions(
            "http://127.0.0.1:1", "b", staging_bytes=1 << 20, load_timeout_s=load_timeout_s, lossy=lossy
        )
        self.loads = Loads(client, 0, grid, self.layout, layers, torch.float32, options, self.counters)
        loads_idle = threading.Event()
        loads_idle.set()
        ledger = WorkerLedger(100, 10.0)
        self.writer = Writer(client, 0, grid, self.layout, layers, ledger, loads_idle, self.counters, options, "m")

    def wait_long(self) -> None:
        """From now on loads that go well have all the time that a loaded machine takes."""
        self.loads._options = replace(self.loads._options, load_timeout_s=60.0)

    def save(self, blocks: tuple[int, ...], first_chunk: int, end_chunk: int) -> tuple[str, ...]:
        keys = tuple(f"key{index}" for index in range(first_chunk, end_chunk))
        span = self.grid.store_range(first_chunk, end_chunk, blocks)
        self.writer.add([StoreJob(1, "r", span, (keys,))])
        self.writer.close(5.0)
        return keys

    def load(self, blocks: tuple[int, ...], computed: int, count: int) -> set[int]:
        span = self.grid.load_range(computed, count, blocks)
        keys = tuple(f"key{index}" for index in range(span.first_chunk, span.end_chunk))
        self.loads.start([LoadJob(1, "r", span, (keys,))])
        for layer_index in range(LAYERS):
            self.loads.wait_layer(layer_index)
        self.loads.finish()
        return self.loads.take_lost_blocks()

    def same(self, left: Sequence[int], right: Sequence[int]) -> bool:
        return all(torch.equal(cache[list(left)], cache[list(right)]) for cache in self.caches)


class TestLossyBlocks:
    """KV that came with a loss, or was computed from such KV, is never stored: others would take it for exact."""

    FORMS = LayerForms((FormRun(EXACT, 1, 512), FormRun("kivi4-1", 1, 200), FormRun(EXACT, 2, 512)), 0.1, 0.02)

    def loaded(self, forms: LayerForms | None) -> Worker:
        """Four chunks come into blocks 4 to 6 and 0; 1 is computed behind them in the same step."""
        worker = Worker(Grid(8, 8), lossy=Lossy.BOUNDED)
        worker.save((0, 1, 2, 3), 0, 4)
        worker.store.forms = forms
        worker.loads.lossy_blocks.begin([Grown(None, (4, 5, 6, 0, 1))], frozenset((4, 5, 6, 0, 1)))
        assert not worker.load((4, 5, 6, 0), 0, 32)
        return worker

    def job(self, *blocks: int) -> StoreJob:
        return StoreJob(7, "r", Grid(8, 8).store_range(0, len(blocks), blocks), (("key",) * len(blocks),))

    def test_chunks_before_the_first_encoded_one_are_exact(self) -> None:
        lossy = self.loaded(self.FORMS).loads.lossy_blocks
        assert [lossy.covers(self.job(block)) for block in (4, 5, 6, 0, 1, 2)] == [False, True, True, True, True, False]

    @pytest.mark.parametrize("forms", [None, LayerForms((FormRun(EXACT, 4, 512),))])
    def test_a_load_of_exact_chunks_leaves_no_trace(self, forms: LayerForms | None) -> None:
        assert not self.loaded(forms).loads.lossy_blocks.covers(self.job(4, 5, 6, 0, 1))

    def test_what_is_computed_from_a_lossy_prefix_is_lossy_and_so_on(self) -> None:
        """Also by another request, which found the prefix in the engine's blocks."""
        lossy = self.loaded(self.FORMS).loads.lossy_blocks
        lossy.begin([Grown(1, (2,)), Grown(4, (3,)), Grown(None, (7,))], frozenset((2, 3, 7)))
        assert [lossy.covers(self.job(block)) for block in (2, 3, 7)] == [True, False, False]
        lossy.begin([Grown(2, (3,))], frozenset((3,)))
        assert lossy.covers(self.job(3))

    def test_an_exact_load_behind_a_lossy_prefix_changes_nothing(self) -> None:
        lossy = self.loaded(self.FORMS).loads.lossy_blocks
        lossy.begin([Grown(1, (2, 3))], frozenset((2, 3)))
        lossy.loading((2, 3))
        lossy.loaded((2, 3), 2)
        assert lossy.covers(self.job(2))

    def test_blocks_that_hold_something_else_are_exact_again(self) -> None:
        lossy = self.loaded(self.FORMS).loads.lossy_blocks
        lossy.begin([Grown(None, (5, 6))], frozenset((5, 6)))
        assert not lossy.covers(self.job(5, 6))
        assert lossy.covers(self.job(0))
        lossy.begin([], None)
        assert not lossy.covers(self.job(0))

    def test_blocks_that_were_lost_are_computed(self) -> None:
        worker = Worker(Grid(8, 8), lossy=Lossy.BOUNDED)
        worker.save((0, 1, 2, 3), 0, 4)
        worker.store.failure = ServerError(ErrorCode.INTERNAL_ERROR, "played")
        worker.loads.lossy_blocks.begin([Grown(None, (4, 5, 6, 7, 2))], frozenset((4, 5, 6, 7, 2)))
        assert worker.load((4, 5, 6, 7), 0, 32) == {4, 5, 6, 7}
        assert not worker.loads.lossy_blocks.covers(self.job(4, 5, 6, 7, 2))

    @pytest.mark.parametrize("first", [None, FORMS])
    def test_layers_of_a_fetch_that_was_given_up_count_too(self, first: LayerForms | None) -> None:
        """Chunk 3 turns out bad after a layer; the second fetch comes exactly. Unknown forms may be any."""
        worker = Worker(Grid(8, 8), lossy=Lossy.BOUNDED)
        worker.save((0, 1, 2, 3), 0, 4)
        worker.store.all_forms = [first, LayerForms((FormRun(EXACT, 3, 512),))]
        worker.store.failure = ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, "played", index=3)
        worker.store.failing_layer = 1
        worker.loads.lossy_blocks.begin([Grown(None, (4, 5, 6, 7, 1))], frozenset((4, 5, 6, 7, 1)))
        assert worker.load((4, 5, 6, 7), 0, 32) == {7}
        covered = [worker.loads.lossy_blocks.covers(self.job(block)) for block in (4, 5, 6, 7, 1)]
        assert covered == [first is None, True, True, True, True]

    def test_beside_other_ranks_every_load_counts_as_lossy(self) -> None:
        lossy = LossyBlocks(is_alone=False)
        lossy.begin([Grown(None, (4, 5, 6))], frozenset((4, 5, 6)))
        lossy.loading((4, 5))
        lossy.loaded((4, 5), 2)
        assert lossy.covers(self.job(6))

    def test_such_jobs_are_refused_and_counted(self) -> None:
        worker = self.loaded(self.FORMS)
        stored = dict(worker.store.chunks)
        worker.writer.add([self.job(5)], {7})
        _, report = worker.writer.poll((), ())
        assert report.read_jobs == {1: 1, 7: 1}
        assert worker.counters.totals["lossy_unstored_chunks"] == 1
        assert worker.store.chunks == stored

    def test_lookups_of_the_writer_count_what_the_reader_takes(self) -> None:
        worker = self.loaded(self.FORMS)
        assert [accept is not None and accept.element for accept in worker.store.looked_up] == ["float32"]


class TestLoadsMeasure:
    def test_loads_state_the_steps_compute_and_know_what_they_moved(self) -> None:
        """Nobody paced them; what was waited for is not the engine's own time."""
        worker = Worker(Grid(8, 8))
        keys = worker.save((0, 1, 2, 3), 0, 4)
        span = worker.grid.load_range(0, 32, (4, 5, 6, 7))
        worker.loads.start([LoadJob(1, "r", span, (keys,))], layer_compute_us=250)
        for layer_index in range(LAYERS):
            worker.loads.wait_layer(layer_index)
        worker.loads.finish()
        assert worker.store.stated_us == [(250,)]
        assert worker.loads.waited_s > 0
        assert worker.loads.load_fit.costs(time.monotonic()) is not None
        worker.loads.start([])
        assert worker.loads.waited_s == 0


class TestLateLoads:
    """Three layers; a token costs a millisecond, four blocks of eight tokens 32."""

    COSTS = PrefillCosts(token_us=1000.0)
    BLOCKS = (4, 5, 6, 7)

    def load(
        self,
        worker: Worker,
        *layers_s: tuple[float, ...],
        costs: PrefillCosts | None = COSTS,
        layer_compute_us: int = 0,
    ) -> set[int]:
        keys = worker.save((0, 1, 2, 3), 0, 4)
        worker.store.layers_s = list(layers_s)
        span = worker.grid.load_range(0, 32, self.BLOCKS)
        worker.loads.start([LoadJob(1, "r", span, (keys,))], layer_compute_us, costs)
        for layer_index in range(worker.layout.num_layers):
            worker.loads.wait_layer(layer_index)
        worker.loads.finish()
        return worker.loads.take_lost_blocks()

    def test_a_load_whose_first_layer_does_not_come_is_given_up_once_computing_is_sooner(self) -> None:
        worker = Worker(Grid(8, 8))
        began_s = time.monotonic()
        assert self.load(worker, (4.0, 4.0, 4.0)) == set(self.BLOCKS)
        assert time.monotonic() - began_s < 3.0
        assert worker.counters.totals["late_loads"] == 1
        assert worker.loads.late_count == 1
        assert worker.loads.take_report().failed_loads == 0

    def test_a_load_that_slows_down_is_given_up(self) -> None:
        worker = Worker(Grid(8, 8))
        assert self.load(worker, (0.0, 0.001, 4.0)) == set(self.BLOCKS)
        way = worker.loads.load_fit.costs(time.monotonic())
        assert way is not None
        assert way.request_s + worker.layout.delivery_bytes(4) * (1 / way.bytes_per_s if way.bytes_per_s else 0) > 0.02

    def test_the_first_chunks_are_fetched_where_that_and_computing_the_rest_is_soonest(self) -> None:
        """What the step computes hides so much of a slow fetch, and no more. The layers that came stay."""
        worker = Worker(Grid(8, 8), layer_count=12)
        slow = tuple(0.1 * index for index in range(12))
        lost = self.load(worker, slow, (), costs=PrefillCosts(token_us=12_500.0), layer_compute_us=30_000)
        assert len(worker.store.fetched) == 2
        kept = worker.store.fetched[1]
        assert 0 < kept < 4
        assert lost == set(self.BLOCKS[kept:])
        assert worker.same(range(kept), self.BLOCKS[:kept])

    @pytest.mark.parametrize("costs", [None, PrefillCosts(token_us=1e6)])
    def test_a_load_that_is_sooner_than_computing_is_waited_for(self, costs: PrefillCosts | None) -> None:
        worker = Worker(Grid(8, 8))
        assert self.load(worker, (0.1, 0.2, 0.3), costs=costs) == set()
        assert worker.same((0, 1, 2, 3), self.BLOCKS)
        assert "late_loads" not in worker.counters.totals

    def test_past_the_deadline_a_load_is_late_where_layers_came_and_has_failed_where_none_did(self) -> None:
        for layers_s, failed in (((0.0, 9.0, 9.0), 0), ((9.0, 9.0, 9.0), 1)):
            worker = Worker(Grid(8, 8), load_timeout_s=0.3)
            assert self.load(worker, layers_s, costs=None) == set(self.BLOCKS)
            assert worker.loads.take_report().failed_loads == failed


class TestRuns:
    @pytest.mark.parametrize("chunk_tokens", [8, 16, 32, 64])
    @pytest.mark.parametrize(("skip_blocks", "ids"), [(0, [2, 3, 4]), (1, [7, 5, 6]), (3, [1])])
    def test_chunks_of_any_size_fill_blocks_wherever_they_begin(
        self, chunk_tokens: int, skip_blocks: int, ids: list[int]
    ) -> None:
        """The same tokens whether copied in runs, in pieces of chunks or token by token."""
        cache = torch.zeros((9, 2, 16, 8))
        tokens = torch.randn(128, 2, 4)
        chunks = torch.stack([tokens, tokens]).unflatten(1, (-1, chunk_tokens)).transpose(0, 1)[:, 0]
        plain_layer(cache).write(Blocks(ids), chunks, skip_blocks * 16, 0)
        read = plain_layer(cache).read(Blocks(ids), 0, 16 * len(ids), 0)
        assert torch.equal(read, tokens[skip_blocks * 16 :][: 16 * len(ids)])
        others = [block for block in range(9) if block not in ids]
        assert not cache[others].any()

    @pytest.mark.parametrize(
        ("ids", "runs"),
        [
            ((), ()),
            ((4,), ((0, 4, 1),)),
            ((4, 5, 6), ((0, 4, 3),)),
            ((4, 3, 5, 6, 6), ((0, 4, 1), (1, 3, 1), (2, 5, 2), (4, 6, 1))),
        ],
    )
    def test_neighbours_make_a_run(self, ids: tuple[int, ...], runs: tuple[tuple[int, int, int], ...]) -> None:
        assert find_runs(ids) == tuple(Run(*run) for run in runs)


class TestLoadsAndStores:
    @pytest.mark.parametrize("chunk_tokens", [8, 16, 32])
    def test_what_is_stored_from_some_blocks_is_loaded_into_others(self, chunk_tokens: int) -> None:
        worker = Worker(Grid(chunk_tokens, 16))
        worker.save((1, 2, 0, 0), 0, 32 // chunk_tokens)
        assert worker.load((7, 5, 0), 0, 32) == set()
        assert worker.same((1, 2), (7, 5))
        assert worker.counters.totals["loaded_tokens"] == 32

    def test_only_the_missing_blocks_of_a_chunk_are_written(self) -> None:
        worker = Worker(Grid(32, 16))
        worker.save((1, 2), 0, 1)
        before = worker.caches[0][6].clone()
        worker.load((6, 5), 16, 16)
        assert worker.same((2,), (5,))
        assert torch.equal(worker.caches[0][6], before)

    def test_chunk_objects_are_kv_l2td(self) -> None:
        """Any reader of the format can use them."""
        worker = Worker(Grid(16, 16))
        (key,) = worker.save((3,), 0, 1)
        chunk = np.frombuffer(worker.store.chunks[key], np.float32).reshape(LAYERS, 2, 16, HEADS, HEAD_DIM)
        for layer_index, cache in enumerate(worker.caches):
            block = cache[3].permute(1, 0, 2).numpy()
            assert (chunk[layer_index, 0] == block[..., :HEAD_DIM]).all()
            assert (chunk[layer_index, 1] == block[..., HEAD_DIM:]).all()

    def test_stored_chunks_are_not_written_again(self) -> None:
        worker = Worker(Grid(16, 16))
        worker.store.chunks["key0"] = b"kept"
        worker.save((1, 2), 0, 2)
        assert worker.store.chunks["key0"] == b"kept"
        assert worker.counters.totals["stored_chunks"] == 1

    def test_chunks_deleted_since_the_lookup_are_lost_and_those_before_loaded(self) -> None:
        worker = Worker(Grid(16, 16))
        worker.save((1, 2, 3), 0, 3)
        del worker.store.chunks["key1"]
        assert worker.load((7, 6, 5), 0, 48) == {6, 5}
        assert worker.same((1,), (7,))

    def test_a_chunk_found_bad_midway_costs_only_what_comes_after_it(self) -> None:
        worker = Worker(Grid(16, 16))
        worker.save((1, 2, 3), 0, 3)
        worker.store.failure = ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, "bad", index=2)
        worker.store.failing_layer = 1
        assert worker.load((7, 6, 5), 0, 48) == {5}
        assert worker.same((1, 2), (7, 6))
        assert worker.store.fetched == [3, 2]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "failure", [ServerError(ErrorCode.INTERNAL_ERROR, "gone"), TimeoutError("slow"), RuntimeError("whatever")]
    )
    def test_a_load_that_fails_loses_all_its_blocks_and_the_next_works(self, failure: Exception) -> None:
        worker = Worker(Grid(16, 16), load_timeout_s=0.3)
        worker.save((1, 2), 0, 2)
        worker.store.failure = failure
        worker.store.failing_layer = 2
        assert worker.load((7, 6), 0, 32) == {7, 6}
        worker.wait_long()
        assert worker.load((7, 6), 0, 32) == set()
        assert worker.same((1, 2), (7, 6))

    def load_two(self, worker: Worker) -> set[int]:
        """Two loads in one step, of which the first fails."""
        span = worker.grid.load_range(0, 32, (7, 6)), worker.grid.load_range(0, 32, (5, 4))
        jobs = [LoadJob(index, f"r{index}", span[index], (("key0", "key1"),)) for index in (0, 1)]
        worker.loads.start(jobs)
        for layer_index in range(LAYERS):
            worker.loads.wait_layer(layer_index)
        worker.loads.finish()
        assert worker.loads.take_report().ended_loads == {0: 1, 1: 1}
        return worker.loads.take_lost_blocks()

    @pytest.mark.slow
    @pytest.mark.parametrize("failing_layer", [0, 2, LAYERS])
    def test_a_load_whose_server_may_still_write_costs_the_others_nothing(self, failing_layer: int) -> None:
        """Its buffer is not used again, but what others of the same step get in it is good. The step waits until its
        deadline for the load that fails.
        """
        worker = Worker(Grid(16, 16), load_timeout_s=3.0)
        worker.save((1, 2), 0, 2)
        worker.store.failure, worker.store.failing_layer = TimeoutError("slow"), failing_layer
        worker.store.settles = False
        assert self.load_two(worker) == ({7, 6} if failing_layer < LAYERS else set())
        assert worker.same((1, 2), (5, 4))
        assert worker.store.released.wait(10)
        worker.wait_long()
        assert worker.load((7, 6), 0, 32) == set()
        assert worker.same((1, 2), (7, 6))

    @pytest.mark.slow
    def test_without_memory_for_another_buffer_loads_are_lost_until_there_is(self) -> None:
        worker = Worker(Grid(16, 16), load_timeout_s=0.3)
        worker.save((1, 2), 0, 2)
        worker.store.failure, worker.store.settles = TimeoutError("slow"), False
        worker.load((7, 6), 0, 32)
        worker.store.is_out_of_memory = True
        assert self.load_two(worker) == {7, 6, 5, 4}
        worker.store.is_out_of_memory = False
        worker.wait_long()
        assert worker.load((7, 6), 0, 32) == set()

    def test_chunks_that_fill_no_block_are_no_use(self) -> None:
        """Half a block came: the block is recomputed as a whole."""
        worker = Worker(Grid(8, 16))
        worker.save((1, 2), 0, 4)
        del worker.store.chunks["key1"]
        assert worker.load((7, 6), 0, 32) == {7, 6}

    def test_a_failed_put_writes_nothing_more_and_frees_the_blocks(self) -> None:
        worker = Worker(Grid(16, 16))
        worker.store.put_failure = ServerError(ErrorCode.INSUFFICIENT_STORAGE, "full")
        worker.save((1, 2), 0, 2)
        assert worker.store.chunks == {}
        freed, report = worker.writer.poll(["r"], ["r"])
        assert freed == {"r"}
        assert report.read_jobs == {1: 1}


class TestIdleWorker:
    def test_every_load_is_lost_and_every_store_dropped(self) -> None:
        """The scheduler does not see that a worker cannot: blocks must not pass for loaded, nor be kept for ever."""
        worker = IdleWorker()
        span = Grid(32, 32).load_range(0, 64, [4, 5])
        worker.start_loads(Step((LoadJob(7, "a", span, (("k", "l"),)),)))
        worker.end_step(Step(stores=(store_job(8, "b", (1,)),), awaited=frozenset({"b"})))
        assert worker.take_freed(set()) == {"b"}
        assert worker.take_lost_blocks() == {4, 5}
        assert worker.take_report() == Report({8: 1}, {7: 1}, {}, 1)
        assert worker.take_report().is_empty
