"""The vLLM connector without vLLM: names, plans, books, memory layouts, and loads against a played store."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from descriptors.errors import ChunkUnavailable, ErrorCode, ServerError  # noqa: E402
from descriptors.layout import ChunkLayout  # noqa: E402
from descriptors.prefix_keys import chunk_keys  # noqa: E402
from nixl_client.connectors.counters import Counters  # noqa: E402
from nixl_client.connectors.vllm.blocks import Blocks, Packing, Run, find_packings, find_runs, packed_layer, plain_layer  # noqa: E402
from nixl_client.connectors.vllm.ledger import Ledger  # noqa: E402
from nixl_client.connectors.vllm.loads import Loads  # noqa: E402
from nixl_client.connectors.vllm.naming import Deployment, KeyChain  # noqa: E402
from nixl_client.connectors.vllm.options import Options  # noqa: E402
from nixl_client.connectors.vllm.plan import Grid  # noqa: E402
from nixl_client.connectors.vllm.scheduling import SchedulerSide  # noqa: E402
from nixl_client.connectors.vllm.steps import LoadJob, Report, Step, StoreJob  # noqa: E402
from nixl_client.connectors.vllm.store_book import StoreBook  # noqa: E402
from nixl_client.connectors.vllm.weights import Adapters, fingerprint  # noqa: E402
from nixl_client.connectors.vllm.working import IdleWorker  # noqa: E402
from nixl_client.connectors.vllm.writer import Writer  # noqa: E402
from nixl_client.transport import Transport  # noqa: E402

ONE_RANK = Deployment("m", "bf16", 32)
OPTIONS = Options("http://127.0.0.1:1", "b")


class TestOptions:
    def test_types_and_unknown_names_are_refused(self) -> None:
        """A misspelt option must not be silently without effect."""
        for extra in ({"endpoint": "e"}, {"bucket": "b", "endpoint": "e", "chunktokens": 1}):
            with pytest.raises(ValueError, match=r"endpoint|chunktokens"):
                Options.of(extra)
        for name, value in {"chunk_tokens": "32", "store": 1, "lease_s": "1", "load_timeout_s": 0.0}.items():
            with pytest.raises(ValueError, match=name):
                Options.of({"endpoint": "e", "bucket": "b", name: value})

    def test_values_are_taken(self) -> None:
        options = Options.of({"endpoint": "e", "bucket": "b", "transport": "shm", "lease_s": 5, "chunk_tokens": 64})
        assert (options.transport, options.lease_s, options.chunk_tokens) == (Transport.SHM, 5, 64)


class TestNaming:
    def test_chain_gives_the_protocols_keys_whatever_the_steps(self) -> None:
        tokens = list(range(100))
        wanted = chunk_keys(ONE_RANK.namespace(0, "", ""), tokens, 16)
        chain = KeyChain(ONE_RANK.namespace(0, "", ""), 16)
        assert [chain.keys(tokens, count) for count in (0, 1, 4, 2, 6)] == [
            tuple(wanted[:count]) for count in (0, 1, 4, 2, 6)
        ]
        with pytest.raises(ValueError, match="chunks"):
            chain.keys(tokens, 7)

    def test_everything_that_decides_bytes_is_in_the_namespace(self) -> None:
        texts = {
            ONE_RANK.namespace(0, "", ""),
            ONE_RANK.namespace(0, "adapter", ""),
            ONE_RANK.namespace(0, "", "tenant"),
            Deployment("m2", "bf16", 32).namespace(0, "", ""),
            Deployment("m", "fp16", 32).namespace(0, "", ""),
            Deployment("m", "bf16", 64).namespace(0, "", ""),
            *(Deployment("m", "bf16", 32, 2, 3).namespace(rank, "", "") for rank in range(6)),
        }
        assert len(texts) == 12


class TestPlan:
    def test_sizes_must_divide(self) -> None:
        with pytest.raises(ValueError, match="multiple"):
            Grid(48, 32)

    @pytest.mark.parametrize(
        ("grid", "prompt", "computed", "matched", "room", "wanted"),
        [
            (Grid(32, 32), 64, 0, 2, 9, 32),  # one token is left to compute
            (Grid(32, 32), 65, 0, 2, 9, 64),
            (Grid(32, 32), 100, 64, 3, 9, 32),
            (Grid(32, 32), 100, 96, 3, 9, 0),
            (Grid(128, 32), 300, 64, 2, 9, 192),
            (Grid(128, 32), 200, 0, 1, 9, 128),
            (Grid(128, 32), 128, 0, 1, 9, 96),  # a part of a chunk, in whole blocks
            (Grid(16, 32), 100, 0, 5, 9, 64),  # five half blocks fill two blocks
            (Grid(32, 32), 1000, 0, 30, 4, 128),  # what fits the staging buffer
            (Grid(32, 32), 100, 7, 3, 9, 0),
        ],
    )
    def test_loadable_tokens(
        self, grid: Grid, prompt: int, computed: int, matched: int, room: int, wanted: int
    ) -> None:
        assert grid.loadable_tokens(prompt, computed, matched, room) == wanted

    def test_load_that_starts_within_a_chunk(self) -> None:
        """Blocks that HBM holds are not written again, though their chunk is fetched."""
        span = Grid(128, 32).load_span(64, 128, [10, 11, 12, 13, 14, 15, 16])
        assert (span.first_chunk, span.end_chunk, span.chunk_skip, span.blocks) == (0, 2, 64, (12, 13, 14, 15))
        lost = [Grid(128, 32).first_lost_block(span, count) for count in (0, 1, 2)]
        assert lost == [0, 2, 4]

    def test_store_that_starts_within_a_block(self) -> None:
        span = Grid(16, 32).store_span(3, 6, [10, 11, 12, 13])
        assert (span.block_skip, span.token_count, span.blocks) == (16, 48, (11, 12))

    def test_tokens_outside_the_blocks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="blocks"):
            Grid(32, 32).load_span(0, 96, [1, 2])


class TestLedger:
    def ledger(self, deployment: Deployment = ONE_RANK, room: int = 100) -> Ledger:
        return Ledger(deployment, Grid(32, 32), room, is_storing=True)

    def test_a_load_takes_room_from_the_step_and_the_next_step_has_it_again(self) -> None:
        ledger = self.ledger(room=3)
        tokens = list(range(129))
        for request_id, wanted in (("a", 96), ("b", 0)):
            tracked = ledger.track(request_id, "", "")
            ledger.matched(tracked, 4, 0.0)
            assert ledger.loadable(tracked, len(tokens), 0) == wanted
            if wanted:
                ledger.load(request_id, tokens, wanted, [1, 2, 3, 4, 5])
        step = ledger.take_step(frozenset())
        assert [job.request_id for job in step.loads] == ["a"]
        assert step.loads[0].keys[0] == tuple(chunk_keys(ONE_RANK.namespace(0, "", ""), tokens, 32)[:3])
        assert ledger.loadable(ledger.track("b", "", ""), len(tokens), 0) == 96

    def test_each_missing_chunk_is_given_to_be_written_once(self) -> None:
        ledger = self.ledger()
        tokens = list(range(200))
        ledger.matched(ledger.track("a", "", ""), 2, 0.0)
        ledger.admit("a", 0)
        for count in (64, 100, 100, 170, 200):
            ledger.computed("a", tokens, count, list(range(7)))
        spans = [(job.span.first_chunk, job.span.end_chunk) for job in ledger.take_step(frozenset()).stores]
        assert spans == [(2, 3), (3, 5), (5, 6)]

    def test_a_chunk_that_could_not_be_read_is_written_again(self) -> None:
        """Or every later request would lose time on it."""
        ledger = self.ledger()
        tokens = list(range(200))
        ledger.matched(ledger.track("a", "", ""), 5, 0.0)
        ledger.load("a", tokens, 160, list(range(7)))
        (job,) = ledger.take_step(frozenset()).loads
        ledger.report(Report(bad_chunks={job.job_id: 2}), 0.0)
        ledger.admit("a", 0)
        ledger.computed("a", tokens, 64, list(range(7)))
        assert not ledger.take_step(frozenset()).stores
        ledger.computed("a", tokens, 200, list(range(7)))
        spans = [
            (job.span.first_chunk, job.span.end_chunk, job.is_repair) for job in ledger.take_step(frozenset()).stores
        ]
        assert spans == [(2, 3, True), (3, 6, False)]

    def test_what_a_request_was_let_in_with_is_not_written_before_its_first_step_is_over(self) -> None:
        """Blocks found in HBM may be those another request is loading in this very step, in vain."""
        ledger = self.ledger()
        tokens = list(range(200))
        tracked = ledger.track("a", "", "")
        ledger.matched(tracked, 0, 0.0)
        ledger.loadable(tracked, 200, 128)
        ledger.load("a", tokens, 0, list(range(7)))
        assert ledger.admit("a", 128)
        ledger.computed("a", tokens, 128, list(range(7)))
        assert not ledger.take_step(frozenset()).stores
        ledger.computed("a", tokens, 192, list(range(7)))
        (job,) = ledger.take_step(frozenset()).stores
        assert (job.span.first_chunk, job.span.end_chunk) == (0, 6)

    def test_blocks_are_loading_until_every_rank_has_said_that_they_are_not(self) -> None:
        ledger = self.ledger(Deployment("m", "bf16", 32, tp_size=2))
        tokens = list(range(129))
        ledger.matched(ledger.track("a", "", ""), 4, 0.0)
        ledger.load("a", tokens, 64, [1, 2, 3, 4, 5], [b"x", b"y"])
        (job,) = ledger.take_step(frozenset()).loads
        for _ in range(2):
            assert ledger.is_loading([b"q", b"y"])
            assert not ledger.is_loading([b"q"])
            ledger.report(Report(ended_loads={job.job_id: 1}), 0.0)
        assert not ledger.is_loading([b"x"])

    def test_a_report_that_never_comes_is_not_waited_for_for_ever(self) -> None:
        ledger = self.ledger()
        ledger.matched(ledger.track("a", "", ""), 4, 0.0)
        ledger.load("a", list(range(129)), 64, [1, 2, 3, 4, 5], [b"x", b"y"])
        steps = 0
        while ledger.is_loading([b"x"]):
            ledger.take_step(frozenset())
            steps += 1
        assert steps > 64

    def test_after_a_reset_nothing_is_known_and_names_are_new(self) -> None:
        """The weights may have been replaced: what is stored belongs to the old ones."""
        ledger = self.ledger()
        tokens = list(range(64))
        before = ledger.lookup_keys(ledger.track("a", "", ""), tokens)
        ledger.matched(ledger.track("a", "", ""), 0, 0.0)
        ledger.admit("a", 0)
        ledger.reset("epoch")
        ledger.computed("a", tokens, 64, [1, 2])
        assert not ledger.take_step(frozenset()).stores
        after = ledger.lookup_keys(ledger.track("a", "", ""), tokens)
        ledger.reset("another")
        assert len({before, after, ledger.lookup_keys(ledger.track("a", "", ""), tokens)}) == 3

    def test_no_lookup_no_store(self) -> None:
        """Without an answer it is not known what is missing; a store that is down must not be written to."""
        ledger = self.ledger()
        ledger.track("a", "", "")
        ledger.computed("a", list(range(64)), 64, [1, 2])
        assert not ledger.take_step(frozenset()).stores
        assert not ledger.finish("a")

    def test_blocks_are_kept_until_every_rank_has_read_them(self) -> None:
        ledger = self.ledger(Deployment("m", "bf16", 32, tp_size=2))
        for request_id, reports, is_kept in (("a", 1, True), ("b", 2, False)):
            ledger.matched(ledger.track(request_id, "", ""), 0, 0.0)
            ledger.admit(request_id, 0)
            ledger.computed(request_id, list(range(64)), 64, [1, 2])
            (job,) = ledger.take_step(frozenset()).stores
            ledger.report(Report({job.job_id: 1}).add(Report({job.job_id: reports - 1})), 0.0)
            assert ledger.finish(request_id) is is_kept
            assert ledger.take_step(frozenset()).awaited == ({request_id} if is_kept else set())


def store_job(job_id: int, request_id: str, blocks: tuple[int, ...]) -> StoreJob:
    span = Grid(32, 32).store_span(0, len(blocks), blocks)
    return StoreJob(job_id, request_id, span, (tuple(f"k{index}" for index in range(len(blocks))),))


class TestStoreBook:
    def test_a_full_queue_drops_and_breaks_the_prefix_off(self) -> None:
        book = StoreBook(3, 10.0)
        assert book.add(store_job(1, "a", (1, 2)), 0.0)
        assert not book.add(store_job(2, "b", (3, 4)), 0.0)
        assert not book.add(store_job(3, "b", (5,)), 0.0)
        assert book.take_report().read_jobs == {2: 1, 3: 1}
        assert book.take_dropped() == 3

    def test_rewritten_blocks_void_what_waits_and_what_is_under_way(self) -> None:
        book = StoreBook(100, 10.0)
        for job_id, request_id, blocks in ((1, "a", (1,)), (2, "b", (2,)), (3, "c", (3,))):
            book.add(store_job(job_id, request_id, blocks), 0.0)
        entry = book.take()
        assert entry is not None
        assert book.void(frozenset({1, 2})) is entry
        assert entry.is_void
        book.end(entry)
        following = book.take()
        assert following is not None
        assert following.job.request_id == "c"

    def test_a_job_that_has_been_read_is_not_void(self) -> None:
        book = StoreBook(100, 10.0)
        book.add(store_job(1, "a", (1,)), 0.0)
        entry = book.take()
        assert entry is not None
        book.end_read(entry)
        assert book.void(frozenset({1})) is None

    def test_blocks_are_freed_once_when_the_last_job_is_read(self) -> None:
        book = StoreBook(100, 10.0)
        book.add(store_job(1, "a", (1,)), 0.0)
        book.await_free(["a", "z"])
        assert book.take_freed() == {"z"}
        entry = book.take()
        assert entry is not None
        book.end_read(entry)
        assert (book.take_freed(), book.take_freed()) == ({"a"}, set())

    def test_stores_that_wait_too_long_let_go_of_their_blocks(self) -> None:
        """A store that hangs must not keep the engine's memory."""
        book = StoreBook(100, 10.0)
        book.add(store_job(1, "a", (1,)), 0.0)
        book.add(store_job(2, "b", (2,)), 5.0)
        entry = book.take()
        book.expire(11.0, is_gathering=True)
        assert entry is not None
        assert not entry.is_void
        book.expire(16.0, is_gathering=False)
        assert entry.is_void
        assert book.take_report().read_jobs == {1: 1, 2: 1}

    def test_a_failed_chunk_stops_its_prefix_until_the_request_ends(self) -> None:
        book = StoreBook(100, 10.0)
        book.fail("a")
        assert not book.add(store_job(1, "a", (1,)), 0.0)
        book.forget(["a"])
        assert not book.add(store_job(2, "a", (1,)), 0.0)
        book.forget([])
        assert book.add(store_job(3, "a", (1,)), 0.0)


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


class PlayedFetch:
    """A fetch whose layers are there at once, but for what is to go wrong."""

    def __init__(
        self, payload: Any, chunk_count: int, failure: Exception | None, failing_layer: int, settles: bool
    ) -> None:
        self._payload = payload
        self._chunk_count = chunk_count
        self._failure = failure
        self._failing_layer = failing_layer
        self.is_settled = settles
        self.request_id = "played"

    def cancel(self) -> None:
        self.is_settled = True

    def wait_layer(self, layer_index: int, timeout_s: float) -> Any:
        if self._failure is not None and layer_index >= self._failing_layer:
            raise self._failure
        return SimpleNamespace(chunk_count=self._chunk_count, data=self._payload[layer_index])

    def wait(self, timeout_s: float) -> None:
        if self._failure is not None:
            raise self._failure

    def wait_settled(self, timeout_s: float) -> None:
        pass


class PlayedStore:
    """What a client does here, in memory: chunks by key; the first fetch fails as told."""

    def __init__(self, layout: ChunkLayout) -> None:
        self.layout = layout
        self.chunks: dict[str, bytes] = {}
        self.failure: Exception | None = None
        self.failing_layer = 0
        self.fetched: list[int] = []
        self.put_failure: Exception | None = None
        self.lookup_failure: Exception | None = None
        self.settles = True
        self.released = threading.Event()
        self.is_out_of_memory = False

    def allocate_buffer(self, nbytes: int) -> Any:
        if self.is_out_of_memory:
            raise OSError("no memory")
        return np.zeros(nbytes, np.uint8)

    def release_buffer(self, array: Any) -> None:
        self.released.set()

    def lookup(self, keys: Sequence[str], lease_s: float = 0.0) -> int:
        if self.lookup_failure is not None:
            raise self.lookup_failure
        return next((index for index, key in enumerate(keys) if key not in self.chunks), len(keys))

    def put_chunks(self, keys: Sequence[str], chunks: Sequence[Any]) -> None:
        if self.put_failure is not None:
            raise self.put_failure
        self.chunks.update((key, bytes(chunk)) for key, chunk in zip(keys, chunks, strict=True))

    def fetch(self, keys: Sequence[str], layout: ChunkLayout, buffer: Any, **options: Any) -> PlayedFetch:
        self.fetched.append(len(keys))
        count = self.lookup(keys)
        rows = [np.frombuffer(self.chunks[key], np.uint8) for key in keys[:count]]
        payload = np.stack(rows).reshape(count, layout.num_layers, -1).transpose(1, 0, 2).copy()
        failure, self.failure = self.failure, None
        return PlayedFetch(payload, count, failure, self.failing_layer, failure is None or self.settles)


HEADS, HEAD_DIM, LAYERS = 2, 8, 3


class Worker:
    """Loads and a writer over one made-up engine memory."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.layout = ChunkLayout(LAYERS, grid.chunk_tokens, 2 * grid.chunk_tokens * HEADS * HEAD_DIM * 4)
        self.caches = [torch.randn(8, HEADS, grid.block_tokens, 2 * HEAD_DIM) for _ in range(LAYERS)]
        layers = [plain_layer(cache) for cache in self.caches]
        self.store = PlayedStore(self.layout)
        self.counters = Counters()
        client: Any = self.store
        options = Options("http://127.0.0.1:1", "b", staging_bytes=1 << 20, load_timeout_s=5.0)
        self.loads = Loads(client, 0, grid, self.layout, layers, torch.float32, options, self.counters)
        self.book = StoreBook(100, 10.0)
        self.writer = Writer(client, 0, grid, self.layout, layers, self.book, threading.Event(), self.counters)
        self.writer._loads_idle.set()

    def save(self, blocks: tuple[int, ...], first_chunk: int, end_chunk: int) -> tuple[str, ...]:
        keys = tuple(f"key{index}" for index in range(first_chunk, end_chunk))
        span = self.grid.store_span(first_chunk, end_chunk, blocks)
        self.writer.add([StoreJob(1, "r", span, (keys,))])
        self.writer.close(5.0)
        return keys

    def load(self, blocks: tuple[int, ...], computed: int, count: int) -> set[int]:
        span = self.grid.load_span(computed, count, blocks)
        keys = tuple(f"key{index}" for index in range(span.first_chunk, span.end_chunk))
        self.loads.start([LoadJob(1, "r", span, (keys,))])
        for layer_index in range(LAYERS):
            self.loads.wait_layer(layer_index)
        self.loads.finish()
        return self.loads.take_lost_blocks()

    def same(self, left: Sequence[int], right: Sequence[int]) -> bool:
        return all(torch.equal(cache[list(left)], cache[list(right)]) for cache in self.caches)


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

    @pytest.mark.parametrize(
        "failure", [ServerError(ErrorCode.INTERNAL_ERROR, "gone"), TimeoutError("slow"), RuntimeError("whatever")]
    )
    def test_a_load_that_fails_loses_all_its_blocks_and_the_next_works(self, failure: Exception) -> None:
        worker = Worker(Grid(16, 16))
        worker.save((1, 2), 0, 2)
        worker.store.failure = failure
        worker.store.failing_layer = 2
        assert worker.load((7, 6), 0, 32) == {7, 6}
        assert worker.load((7, 6), 0, 32) == set()
        assert worker.same((1, 2), (7, 6))

    def load_two(self, worker: Worker) -> set[int]:
        """Two loads in one step, of which the first fails."""
        span = worker.grid.load_span(0, 32, (7, 6)), worker.grid.load_span(0, 32, (5, 4))
        jobs = [LoadJob(index, f"r{index}", span[index], (("key0", "key1"),)) for index in (0, 1)]
        worker.loads.start(jobs)
        for layer_index in range(LAYERS):
            worker.loads.wait_layer(layer_index)
        worker.loads.finish()
        assert worker.loads.take_report().ended_loads == {0: 1, 1: 1}
        return worker.loads.take_lost_blocks()

    @pytest.mark.parametrize("failing_layer", [0, 2, LAYERS])
    def test_a_load_whose_server_may_still_write_costs_the_others_nothing(self, failing_layer: int) -> None:
        """Its buffer is not used again, but what others of the same step get in it is good."""
        worker = Worker(Grid(16, 16))
        worker.save((1, 2), 0, 2)
        worker.store.failure, worker.store.failing_layer = TimeoutError("slow"), failing_layer
        worker.store.settles = False
        assert self.load_two(worker) == ({7, 6} if failing_layer < LAYERS else set())
        assert worker.same((1, 2), (5, 4))
        assert worker.store.released.wait(10)
        assert worker.load((7, 6), 0, 32) == set()
        assert worker.same((1, 2), (7, 6))

    def test_without_memory_for_another_buffer_loads_are_lost_until_there_is(self) -> None:
        worker = Worker(Grid(16, 16))
        worker.save((1, 2), 0, 2)
        worker.store.failure, worker.store.settles = TimeoutError("slow"), False
        worker.load((7, 6), 0, 32)
        worker.store.is_out_of_memory = True
        assert self.load_two(worker) == {7, 6, 5, 4}
        worker.store.is_out_of_memory = False
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


class Request:
    """A request as vLLM shows it."""

    def __init__(self, tokens: list[int], **changes: Any) -> None:
        self.request_id = "r"
        self.all_token_ids = tokens
        self.prompt_token_ids = tokens
        self.num_tokens = len(tokens)
        self.block_hashes = [bytes([index]) for index in range(len(tokens) // 32)]
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.lora_request = None
        self.cache_salt: str | None = None
        self.mm_features: list[object] = []
        self.prompt_embeds = None
        self.__dict__.update(changes)


class TestIdleWorker:
    def test_every_load_is_lost_and_every_store_dropped(self) -> None:
        """The scheduler does not see that a worker cannot: blocks must not pass for loaded, nor be kept for ever."""
        worker = IdleWorker()
        span = Grid(32, 32).load_span(0, 64, [4, 5])
        worker.start_loads([LoadJob(7, "a", span, (("k", "l"),))])
        worker.end_step(Step(stores=(store_job(8, "b", (1,)),), awaited=frozenset({"b"})))
        assert worker.take_freed(set()) == {"b"}
        assert worker.take_lost_blocks() == {4, 5}
        assert worker.take_report() == Report({8: 1}, {7: 1}, {}, 1)
        assert worker.take_report().is_empty


class TestWeights:
    def weights(self, path: Path, fill: int, names: Sequence[str] = ("a", "b")) -> Path:
        path.mkdir(exist_ok=True)
        starts = [index * 8192 for index in range(len(names))]
        entries = {name: {"data_offsets": [start, start + 8192]} for name, start in zip(names, starts, strict=True)}
        header = json.dumps(entries).encode()
        body = bytes(8192 * (len(names) - 1)) + bytes([fill]) * 8192
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        return path

    def test_the_same_weights_are_the_same_wherever_they_are(self, tmp_path: Path) -> None:
        assert fingerprint(self.weights(tmp_path / "x", 1)) == fingerprint(self.weights(tmp_path / "y", 1))

    def test_other_weights_are_others(self, tmp_path: Path) -> None:
        """Of the same size, with the same header, at the same path."""
        first = fingerprint(self.weights(tmp_path / "x", 1))
        assert fingerprint(self.weights(tmp_path / "x", 2)) != first
        assert fingerprint(self.weights(tmp_path / "y", 1, ("a", "c"))) != first

    def test_an_adapter_replaced_under_its_number_is_not_cached(self, tmp_path: Path) -> None:
        """The engine may still hold the old one."""
        adapters = Adapters()
        path = self.weights(tmp_path / "x", 1)
        (path / "adapter_config.json").write_text('{"lora_alpha": 8}')
        first = adapters.fingerprint(1, path)
        assert first is not None
        assert adapters.fingerprint(1, path) == first
        (path / "adapter_config.json").write_text('{"lora_alpha": 16}')
        assert adapters.fingerprint(1, path) is None
        assert adapters.fingerprint(1, path) is None
        assert adapters.fingerprint(2, path) not in (None, first)

    @pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 64, (20).to_bytes(8, "little") + b"[1]" + bytes(40)])
    def test_files_that_are_no_safetensors_are_taken_as_bytes(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        before = fingerprint(path)
        path.write_bytes(content + b"x")
        assert fingerprint(path) != before

    def test_a_folder_without_weights_has_none(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no weights"):
            fingerprint(tmp_path)


class TestSchedulerSide:
    def side(self, options: Options = OPTIONS) -> tuple[SchedulerSide, PlayedStore, Ledger]:
        store = PlayedStore(ChunkLayout(1, 32, 64))
        ledger = Ledger(ONE_RANK, Grid(32, 32), 100, is_storing=True)
        client: Any = store
        return SchedulerSide(client, options, Grid(32, 32), ledger, Counters()), store, ledger

    def fill(self, store: PlayedStore, tokens: list[int], salt: str = "") -> None:
        store.chunks.update((key, b"") for key in chunk_keys(ONE_RANK.namespace(0, "", salt), tokens, 32))

    def test_offers_what_is_stored_beyond_what_the_engine_has(self) -> None:
        side, store, _ = self.side()
        tokens = list(range(200))
        self.fill(store, tokens[:128])
        assert side.match(Request(tokens), 0) == 128
        assert side.match(Request(tokens), 96) == 32
        assert side.match(Request(tokens), 128) == 0

    def test_who_finds_blocks_that_are_being_loaded_waits(self) -> None:
        """Should the load fail, vLLM has only one of the requests compute the blocks again."""
        side, store, ledger = self.side()
        first, second = Request(list(range(200))), Request(list(range(200)))
        second.request_id = "s"
        store.chunks.update((key, b"") for key in chunk_keys(ONE_RANK.namespace(0, "", ""), range(200), 32))
        assert side.match(first, 0) == 192
        side.allocated(first, list(range(7)), 192)
        (job,) = ledger.take_step(frozenset()).loads
        assert side.match(second, 192) is None
        ledger.report(Report(ended_loads={job.job_id: 1}), 0.0)
        assert side.match(second, 192) == 0

    def test_another_salt_is_a_miss(self) -> None:
        side, store, _ = self.side()
        tokens = list(range(100))
        self.fill(store, tokens, salt="one")
        assert side.match(Request(tokens, cache_salt="two"), 0) == 0
        assert side.match(Request(tokens, cache_salt="one", request_id="q"), 0) == 96

    def test_requests_that_are_not_only_tokens_are_left_alone(self) -> None:
        side, store, ledger = self.side()
        tokens = list(range(100))
        self.fill(store, tokens)
        for request in (Request(tokens, mm_features=[1]), Request(tokens, prompt_embeds=1)):
            assert side.match(request, 0) == 0
            side.allocated(request, [1, 2, 3, 4], 0)
            assert not side.finished(request, [1, 2, 3, 4])
        assert not ledger.take_step(frozenset()).stores

    @pytest.mark.parametrize("answer", [KeyError("matched"), ValueError("JSON"), OverflowError("token")])
    def test_whatever_a_lookup_meets_is_a_miss(self, answer: Exception) -> None:
        """Another server may answer there."""
        side, store, _ = self.side()
        store.lookup_failure = answer
        assert side.match(Request(list(range(200))), 0) == 0

    def test_a_lookup_that_fails_is_a_miss_and_is_not_repeated_at_once(self) -> None:
        """A store that is down must not slow every request by the lookup's deadline."""
        side, store, _ = self.side()
        calls: list[int] = []

        def fail(keys: Sequence[str], lease_s: float = 0.0) -> int:
            calls.append(len(keys))
            raise ServerError(ErrorCode.INTERNAL_ERROR, "down", retryable=True)

        store.lookup = fail  # type: ignore[method-assign]
        assert [side.match(Request(list(range(100))), 0) for _ in range(3)] == [0, 0, 0]
        assert calls == [3]

    def test_only_tokens_of_steps_that_are_known_to_be_good_are_written(self) -> None:
        """Tokens of a step in flight may yet turn out to stand on blocks that were not loaded."""
        side, _, ledger = self.side()
        request = Request(list(range(200)))
        side.match(request, 0)
        side.scheduled("r", list(range(7)))
        assert ledger.take_step(frozenset()).stores == ()
        request.num_computed_tokens, request.num_in_flight_tokens = 128, 64
        side.scheduled("r", list(range(7)))
        (job,) = ledger.take_step(frozenset()).stores
        assert job.span.end_chunk == 2
        request.num_in_flight_tokens = 0
        assert side.finished(request, list(range(4)))
        (job,) = ledger.take_step(frozenset()).stores
        assert (job.span.first_chunk, job.span.end_chunk) == (2, 4)

    def test_what_another_connector_loads_is_written_only_once_a_token_more_is_computed(self) -> None:
        """Its bytes may be on their way in the very step in which the engine counts them as computed."""
        side, _, ledger = self.side()
        request = Request(list(range(200)))
        side.match(request, 0)
        side.allocated(request, list(range(7)), 0)
        request.num_computed_tokens = 128
        side.scheduled("r", list(range(7)))
        assert ledger.take_step(frozenset()).stores == ()
        request.num_computed_tokens = 160
        side.scheduled("r", list(range(7)))
        (job,) = ledger.take_step(frozenset()).stores
        assert (job.span.first_chunk, job.span.end_chunk) == (0, 5)
