"""The scheduler's ledger: what is stored of each request, what to load and to write, which blocks get other bytes, and
which reads are outstanding.

Events come in as calls: a lookup was answered, the engine gave out blocks, a step was scheduled, workers reported.
Instructions go out as the `Step` that `take_step` returns. Pure: time and the engine's own counts are arguments.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nixl_client.connectors.compute_fit import NO_WORK, Work
from nixl_client.connectors.vllm.grid import Grid
from nixl_client.connectors.vllm.naming import ChunkChain, ChunkNames, Prefix
from nixl_client.connectors.vllm.steps import Grown, LoadJob, Report, Step, StoreJob

BAD_S = 300.0
"""A chunk that could not be read is offered to no request for this time. By then it may have been written again."""
BAD_KEYS_MAX = 4096
LOADING_STEPS_MAX = 256
"""No engine has so many steps under way: the report of a load that is older was lost, and nobody waits for it. Where
requests wait for their loads the engine waits for the report itself.
"""


@dataclass(slots=True)
class Tracked:
    """One request. Chunks are counted from the prompt's start.

    matched_chunks: how many the store has, from the first; None until it has been asked.
    rate_bytes_per_s: what the server offered when it was asked, at `looked_up_s`; 0 where it paces nothing.
    computed_tokens: tokens that were in the engine's own blocks when the request was last looked at.
    next_chunk: the first chunk that has not been given to be written yet.
    bad_chunk: a chunk that is stored and could not be read.
    admitted_tokens: what the engine counted as computed when the request first ran, found in its blocks or loaded by
        whatever connector; None until it runs.
    unread_jobs: store jobs whose blocks are still read.
    loaded_after: how often the engine had preempted the request when it was loaded last; None before.
    feature_count: the images that the chains know.
    """

    chains: tuple[ChunkChain, ...]
    feature_count: int = 0
    matched_chunks: int | None = None
    rate_bytes_per_s: float = 0.0
    looked_up_s: float = 0.0
    computed_tokens: int = 0
    next_chunk: int = 0
    bad_chunk: int | None = None
    admitted_tokens: int | None = None
    unread_jobs: set[int] = field(default_factory=set)
    loaded_after: int | None = None


class SchedulerLedger:
    """Requests from their first lookup to their end. A step loads at most `room_chunks` chunks. The engine has at most
    `steps_max` steps under way. Steps say which requests have new blocks if it `tells_growth`. `is_ahead` says that
    requests wait for their loads, over any number of steps.
    """

    def __init__(
        self,
        deployment: ChunkNames,
        grid: Grid,
        room_chunks: int,
        is_storing: bool,
        steps_max: int = 1,
        *,
        tells_growth: bool = False,
        is_ahead: bool = False,
    ) -> None:
        self._tells_growth = tells_growth
        self._is_ahead = is_ahead
        self._deployment = deployment
        self._grid = grid
        self._room_chunks = room_chunks
        self._room_left = room_chunks
        self._is_storing = is_storing
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadJob] = []
        self._loading: dict[int, tuple[LoadJob, frozenset[bytes], int]] = {}
        self._step = 0
        self._bad_until_s: OrderedDict[str, float] = OrderedDict()
        self._is_reset = False
        self._stores: list[StoreJob] = []
        self._awaited: set[str] = set()
        self._job_id = 0
        self._owners: dict[int, str] = {}
        self._acks: dict[int, int] = {}
        self._rewritten: set[int] = set()
        self._step_tables: list[Sequence[int]] = []
        self._tables: deque[list[Sequence[int]]] = deque(maxlen=steps_max + 1)

    @property
    def deployment(self) -> ChunkNames:
        """The deployment that keys are made from, for requests that are tracked from now on."""
        return self._deployment

    def track(self, request_id: str, prefix: Prefix) -> Tracked:
        """The request's entry, made when there is none."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            tracked = Tracked(self._deployment.chains(self._grid.chunk_tokens, prefix), len(prefix.features))
            self._requests[request_id] = tracked
        return tracked

    def lookup_keys(self, tracked: Tracked, tokens: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """For each rank the keys of the whole chunks of `tokens`."""
        chunk_count = len(tokens) // self._grid.chunk_tokens
        return tuple(chain.keys(tokens, chunk_count) for chain in tracked.chains)

    def matched(self, tracked: Tracked, chunk_count: int, now_s: float, rate_bytes_per_s: float = 0.0) -> None:
        """The store has the first `chunk_count` chunks on every rank, and offers this rate. It does not know of chunks
        that cannot be read.
        """
        keys = tracked.chains[0].keys((), chunk_count) if self._bad_until_s else ()
        bad = next((index for index, key in enumerate(keys) if self._bad_until_s.get(key, 0.0) > now_s), None)
        if bad is not None:
            chunk_count = tracked.bad_chunk = bad
        tracked.matched_chunks = chunk_count
        tracked.rate_bytes_per_s = rate_bytes_per_s
        tracked.looked_up_s = now_s
        tracked.next_chunk = max(tracked.next_chunk, chunk_count)

    def unmatched(self, tracked: Tracked) -> None:
        """The store is not asked now: what it said before does not count any more."""
        tracked.matched_chunks = None

    def loadable(
        self, tracked: Tracked, token_count: int, computed_tokens: int, worth_chunks: int | None = None
    ) -> int:
        """Tokens to load after `computed_tokens`, within the room this step has left, and of no chunk past the
        `worth_chunks` that are worth it (None: all are).
        """
        tracked.computed_tokens = computed_tokens
        matched_chunks = tracked.matched_chunks or 0
        if worth_chunks is not None:
            matched_chunks = min(matched_chunks, worth_chunks)
        return self._grid.loadable_tokens(token_count, computed_tokens, matched_chunks, self._room_left)

    def found_tokens(self, request_id: str) -> int:
        """Tokens that were in the engine's own blocks when the request was last looked at."""
        tracked = self._requests.get(request_id)
        return 0 if tracked is None else tracked.computed_tokens

    def feature_count(self, request_id: str) -> int:
        """The images that its keys tell."""
        tracked = self._requests.get(request_id)
        return 0 if tracked is None else tracked.feature_count

    def is_loading(self, hashes: Sequence[bytes]) -> bool:
        """Whether one of the blocks with these hashes is being loaded, as far as workers have reported."""
        return any(not loading.isdisjoint(hashes) for _, loading, _ in self._loading.values())

    def allocated(self, request_id: str, block_ids: Sequence[int], loaded_tokens: int = 0) -> None:
        """The engine has given these blocks to a request, of which the first hold tokens that were found in them, or
        `loaded_tokens` with those that have been loaded ahead: the bytes of the others may change in the coming step.
        """
        held_tokens = max(self.found_tokens(request_id), loaded_tokens)
        self._rewritten.update(block_ids[held_tokens // self._grid.block_tokens :])

    def given_out(self, block_ids: Iterable[int]) -> None:
        """The bytes of these blocks may change in the coming step: they are zeroed, loaded or computed."""
        self._rewritten.update(block_ids)

    def scheduled(self, block_ids: Sequence[int]) -> None:
        """A request with these blocks runs in the coming step."""
        self._step_tables.append(block_ids)

    def stale_blocks(self, lost_blocks: set[int]) -> set[int]:
        """Blocks that were not loaded, and those that steps under way compute on top of them."""
        stale: set[int] = set()
        for block_ids in itertools.chain.from_iterable(self._tables):
            stale.update(itertools.dropwhile(lambda block_id: block_id not in lost_blocks, block_ids))
        return stale

    def load(
        self,
        request_id: str,
        tokens: Sequence[int],
        token_count: int,
        block_ids: Sequence[int],
        hashes: Sequence[bytes] = (),
        preemptions: int = 0,
    ) -> None:
        """The engine took the offer, if it was one: load `token_count` tokens into these blocks, in the coming step or
        from then on. `hashes` are what the engine knows the blocks by. It has preempted the request so often.
        """
        tracked = self._requests[request_id]
        tracked.admitted_tokens = None
        if not token_count:
            return
        tracked.loaded_after = preemptions
        chunk_range = self._grid.load_range(tracked.computed_tokens, token_count, block_ids)
        self._room_left -= chunk_range.chunk_count
        self._job_id += 1
        keys = self._keys(tracked, tokens, chunk_range.first_chunk, chunk_range.end_chunk)
        job = LoadJob(self._job_id, request_id, chunk_range, keys)
        self._loads.append(job)
        self._loading[self._job_id] = job, frozenset(hashes), self._step

    def admit(self, request_id: str, token_count: int) -> bool:
        """The request runs in the coming step, with so many tokens counted as computed. Returns whether this is its
        first step since it was let in; what later steps count changes nothing.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.admitted_tokens is not None:
            return False
        tracked.admitted_tokens = token_count
        return True

    def computed(
        self,
        request_id: str,
        tokens: Sequence[int],
        token_count: int,
        block_ids: Sequence[int],
        *,
        is_sure: Callable[[], bool] = lambda: True,
    ) -> None:
        """Steps that are over have computed the first `token_count` of `tokens`, which are in these blocks: write the
        chunks that are missing. Nothing is written before the engine counts a token more than the request was let in
        with: until then a load for this request, or for another one, may still be filling the blocks. Where something
        is missing, `is_sure` says whether the blocks hold what the keys say.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.matched_chunks is None or not self._is_storing:
            return
        if tracked.admitted_tokens is None or token_count <= tracked.admitted_tokens:
            return
        end_chunk = min(token_count, len(tokens)) // self._grid.chunk_tokens
        first_chunk = min(tracked.next_chunk, end_chunk if tracked.bad_chunk is None else tracked.bad_chunk)
        if first_chunk >= end_chunk or not is_sure():
            return
        if tracked.bad_chunk is not None and tracked.bad_chunk < end_chunk:
            self._store(
                request_id,
                tracked,
                tokens=tokens,
                block_ids=block_ids,
                chunks=(tracked.bad_chunk, tracked.bad_chunk + 1),
                is_repair=True,
            )
            self._bad_until_s.pop(tracked.chains[0].keys(tokens, tracked.bad_chunk + 1)[-1], None)
            tracked.next_chunk = max(tracked.next_chunk, tracked.bad_chunk + 1)
            tracked.bad_chunk = None
        if tracked.next_chunk < end_chunk:
            self._store(
                request_id,
                tracked,
                tokens=tokens,
                block_ids=block_ids,
                chunks=(tracked.next_chunk, end_chunk),
                is_repair=False,
            )
            tracked.next_chunk = end_chunk

    def _store(
        self,
        request_id: str,
        tracked: Tracked,
        tokens: Sequence[int],
        block_ids: Sequence[int],
        chunks: tuple[int, int],
        is_repair: bool,
    ) -> None:
        first_chunk, end_chunk = chunks
        chunk_range = self._grid.store_range(first_chunk, end_chunk, block_ids)
        self._job_id += 1
        keys = self._keys(tracked, tokens, first_chunk, end_chunk)
        self._stores.append(StoreJob(self._job_id, request_id, chunk_range, keys, is_repair))
        self._owners[self._job_id] = request_id
        tracked.unread_jobs.add(self._job_id)

    def finish(self, request_id: str) -> bool:
        """The request has ended. Whether its blocks must be kept, until a worker says that nothing reads them."""
        tracked = self._requests.pop(request_id, None)
        for job in [job for job in self._loads if job.request_id == request_id]:
            self._loads.remove(job)
            self._loading.pop(job.job_id)
        if tracked is None or not tracked.unread_jobs:
            return False
        self._awaited.add(request_id)
        return True

    def reset(self, epoch: str) -> None:
        """Forget every request. From now on the names of chunks have `epoch` in them, so that they are new."""
        self._deployment = self._deployment.renewed(epoch)
        self._requests.clear()
        self._loads, self._stores, self._loading = [], [], {}
        self._is_reset = True

    def report(self, report: Report, now_s: float) -> None:
        """Workers have done with the blocks of these store jobs, and could not load these chunks: those are written
        again, and those after them where they are missing, once they have been computed. Until then, or for BAD_S, no
        request is offered them.
        """
        for job_id, index in report.bad_chunks.items():
            if job_id in self._loading:
                self._note_bad(self._loading[job_id][0], index, now_s)
        for job_id, count in report.ended_loads.items():
            if self._is_told_by_all(job_id, count):
                self._loading.pop(job_id, None)
        for job_id, count in report.read_jobs.items():
            if not self._is_told_by_all(job_id, count):
                continue
            tracked = self._requests.get(self._owners.pop(job_id, ""))
            if tracked is not None:
                tracked.unread_jobs.discard(job_id)

    def take_step(self, work: Work = NO_WORK, layer_compute_us: int = 0) -> Step:
        """The instructions for workers in the coming step, in which the engine computes `work`, each layer in about
        `layer_compute_us`. Events from now on are for the step after it.
        """
        step = Step(
            loads=tuple(self._loads),
            stores=tuple(self._stores),
            rewritten=frozenset(self._rewritten),
            awaited=frozenset(self._awaited),
            is_reset=self._is_reset,
            work=work,
            layer_compute_us=layer_compute_us,
            grown=tuple(self._grown()) if self._tells_growth else (),
        )
        self._tables.append(self._step_tables)
        self._loads, self._stores, self._awaited, self._is_reset = [], [], set(), False
        self._rewritten, self._step_tables = set(), []
        self._room_left = self._room_chunks
        self._step += 1
        for job_id, (_, _, begun) in list(self._loading.items()):
            if self._step - begun > LOADING_STEPS_MAX and not self._is_ahead:
                del self._loading[job_id]
        return step

    def _grown(self) -> Iterator[Grown]:
        """Requests of the coming step whose last blocks are new."""
        for table in self._step_tables:
            first = len(table)
            while first and table[first - 1] in self._rewritten:
                first -= 1
            if first < len(table):
                yield Grown(table[first - 1] if first else None, tuple(table[first:]))

    def _note_bad(self, job: LoadJob, index: int, now_s: float) -> None:
        key = job.keys[0][index - job.chunk_range.first_chunk]
        self._bad_until_s[key] = now_s + BAD_S
        if len(self._bad_until_s) > BAD_KEYS_MAX:
            self._bad_until_s.popitem(last=False)
        tracked = self._requests.get(job.request_id)
        if tracked is not None:
            tracked.bad_chunk = index
            tracked.next_chunk = index + 1
            tracked.matched_chunks = min(tracked.matched_chunks or 0, index)

    def _is_told_by_all(self, job_id: int, count: int) -> bool:
        acks = self._acks.pop(job_id, 0) + count
        if acks < self._deployment.worker_count:
            self._acks[job_id] = acks
        return acks >= self._deployment.worker_count

    def _keys(self, tracked: Tracked, tokens: Sequence[int], first: int, end: int) -> tuple[tuple[str, ...], ...]:
        return tuple(chain.keys(tokens, end)[first:end] for chain in tracked.chains)
