"""The scheduler side's books: what is stored of each request, what to load and to write, which reads are outstanding.

No clock, no network. The engine's own counts are passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nixl_client.connectors.compute_fit import NO_WORK, Work
from nixl_client.connectors.vllm.naming import Deployment, KeyChain
from nixl_client.connectors.vllm.plan import Grid
from nixl_client.connectors.vllm.steps import LoadJob, Report, Step, StoreJob

BAD_S = 300.0
"""How long nobody is offered a chunk that could not be read: somebody else may have written it again by then."""
BAD_KEYS_MAX = 4096
LOADING_STEPS_MAX = 256
"""No engine has so many steps under way: the report of a load that is older was lost, and nobody waits for it."""


@dataclass(slots=True)
class Tracked:
    """One request. `matched_chunks` is None until looked up, `next_chunk` the first not yet given to be written,
    `bad_chunk` one that is stored and could not be read, `admitted_tokens` what the engine
    counted as computed when the request first ran: found, or loaded by whatever connector; None until it runs.
    """

    chains: tuple[KeyChain, ...]
    matched_chunks: int | None = None
    rate_bytes_per_s: float = 0.0
    looked_up_s: float = 0.0
    computed_tokens: int = 0
    next_chunk: int = 0
    bad_chunk: int | None = None
    admitted_tokens: int | None = None
    unread_jobs: set[int] = field(default_factory=set)


class Ledger:
    """Requests from their first lookup to their end."""

    def __init__(self, deployment: Deployment, grid: Grid, room_chunks: int, is_storing: bool) -> None:
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

    def track(self, request_id: str, lora: str, salt: str) -> Tracked:
        """The request's entry, made when there is none."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            ranks = range(self._deployment.rank_count)
            namespaces = [self._deployment.namespace(rank, lora, salt) for rank in ranks]
            tracked = Tracked(tuple(KeyChain(text, self._grid.chunk_tokens) for text in namespaces))
            self._requests[request_id] = tracked
        return tracked

    def lookup_keys(self, tracked: Tracked, tokens: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """For each rank the keys of the whole chunks of `tokens`."""
        chunk_count = len(tokens) // self._grid.chunk_tokens
        return tuple(chain.keys(tokens, chunk_count) for chain in tracked.chains)

    def matched(self, tracked: Tracked, chunk_count: int, now_s: float) -> None:
        """The store has the first `chunk_count` chunks on every rank. It does not know of those that cannot be read."""
        keys = tracked.chains[0].keys((), chunk_count) if self._bad_until_s else ()
        bad = next((index for index, key in enumerate(keys) if self._bad_until_s.get(key, 0.0) > now_s), None)
        if bad is not None:
            chunk_count = tracked.bad_chunk = bad
        tracked.matched_chunks = chunk_count
        tracked.looked_up_s = now_s
        tracked.next_chunk = max(tracked.next_chunk, chunk_count)

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

    def is_loading(self, hashes: Sequence[bytes]) -> bool:
        """Whether one of the blocks with these hashes is being loaded, by all that workers have said."""
        return any(not loading.isdisjoint(hashes) for _, loading, _ in self._loading.values())

    def load(
        self,
        request_id: str,
        tokens: Sequence[int],
        token_count: int,
        block_ids: Sequence[int],
        hashes: Sequence[bytes] = (),
    ) -> None:
        """The engine took the offer, if it was one: load `token_count` tokens into these blocks in the coming step.
        `hashes` are what the engine knows the blocks by.
        """
        tracked = self._requests[request_id]
        tracked.admitted_tokens = None
        if not token_count:
            return
        span = self._grid.load_span(tracked.computed_tokens, token_count, block_ids)
        self._room_left -= span.chunk_count
        self._job_id += 1
        keys = self._keys(tracked, tokens, span.first_chunk, span.end_chunk)
        job = LoadJob(self._job_id, request_id, span, keys)
        self._loads.append(job)
        self._loading[self._job_id] = job, frozenset(hashes), self._step

    def admit(self, request_id: str, token_count: int) -> bool:
        """The request runs in the coming step, with so many tokens counted as computed. Whether it is its first since
        it was let in: only that one counts.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.admitted_tokens is not None:
            return False
        tracked.admitted_tokens = token_count
        return True

    def computed(self, request_id: str, tokens: Sequence[int], token_count: int, block_ids: Sequence[int]) -> None:
        """Steps that are over have computed the first `token_count` of `tokens`, which are in these blocks: write the
        chunks that are missing. What a request was let in with may still be on its way, for itself or for another
        request; that it came is known once the engine counts a token more.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.matched_chunks is None or not self._is_storing:
            return
        if tracked.admitted_tokens is None or token_count <= tracked.admitted_tokens:
            return
        end_chunk = min(token_count, len(tokens)) // self._grid.chunk_tokens
        if tracked.bad_chunk is not None and tracked.bad_chunk < end_chunk:
            self._store(request_id, tracked, tokens, block_ids, (tracked.bad_chunk, tracked.bad_chunk + 1), True)
            self._bad_until_s.pop(tracked.chains[0].keys(tokens, tracked.bad_chunk + 1)[-1], None)
            tracked.next_chunk = max(tracked.next_chunk, tracked.bad_chunk + 1)
            tracked.bad_chunk = None
        if tracked.next_chunk < end_chunk:
            self._store(request_id, tracked, tokens, block_ids, (tracked.next_chunk, end_chunk), False)
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
        span = self._grid.store_span(first_chunk, end_chunk, block_ids)
        self._job_id += 1
        keys = self._keys(tracked, tokens, first_chunk, end_chunk)
        self._stores.append(StoreJob(self._job_id, request_id, span, keys, is_repair))
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
        """Forget every request, and name chunks as no engine did before."""
        model = self._deployment.model.partition("\n")[0]
        self._deployment = replace(self._deployment, model=f"{model}\n{epoch}")
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

    @property
    def loads(self) -> tuple[LoadJob, ...]:
        """The coming step's loads."""
        return tuple(self._loads)

    def take_step(self, rewritten: frozenset[int], work: Work = NO_WORK, layer_compute_us: int = 0) -> Step:
        """The coming step's work, `work` being what the engine computes in it, in layers that should take so long; the
        books are then empty for the next.
        """
        step = Step(
            tuple(self._loads),
            tuple(self._stores),
            rewritten,
            frozenset(self._awaited),
            self._is_reset,
            work,
            layer_compute_us,
        )
        self._loads, self._stores, self._awaited, self._is_reset = [], [], set(), False
        self._room_left = self._room_chunks
        self._step += 1
        for job_id, (_, _, begun) in list(self._loading.items()):
            if self._step - begun > LOADING_STEPS_MAX:
                del self._loading[job_id]
        return step

    def _note_bad(self, job: LoadJob, index: int, now_s: float) -> None:
        key = job.keys[0][index - job.span.first_chunk]
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
        if acks < self._deployment.rank_count:
            self._acks[job_id] = acks
        return acks >= self._deployment.rank_count

    def _keys(self, tracked: Tracked, tokens: Sequence[int], first: int, end: int) -> tuple[tuple[str, ...], ...]:
        return tuple(chain.keys(tokens, end)[first:end] for chain in tracked.chains)
