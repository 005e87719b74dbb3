"""Our policy: the chunk with the lowest value per second leaves first, or is not admitted.

Values are learned online (`reuse_times`), also from chunks that have left: uses per second, times what a use saves for
each byte (`use_worth`). Chunks of one class (`reuse_classes`) and of one worth that one request used are a run. Runs of
one class, one worth and one bucket of ages have one value and form a cell. An eviction takes from the cell of the
lowest value, the oldest run first, the deepest chunk first. The number of cells is bounded by the classes, and a run
moves on through a fixed number of buckets, so the cost of a request does not grow with the number of residents. A
chunk that has a ladder waits in the cell of its next step's price: uses per second times what that step costs a use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from heapq import heapify, heappop, heappush

from storage_server.cache.policies.order import EvictionOrder, Former, Key, Request, Resident
from storage_server.cache.policies.reuse_classes import Use, class_path, former_class_path
from storage_server.cache.policies.reuse_times import BUCKET_COUNT, EDGES_S, ReuseTimes
from storage_server.cache.policies.use_worth import UseWorth, worth_of

GHOST_COUNT_MAX = 1 << 18
REFRESH_REQUESTS = 100
"""Values follow the counts after so many requests each."""
KEPT_FRACTION = 0.5 ** (REFRESH_REQUESTS / 10_000)
"""A refresh keeps this fraction of all counts: what was seen 10,000 requests ago counts half."""
Cell = tuple[int, int, int]
"""The number of a class, a step of worth, and a bucket."""


class _Run:
    """Chunks of one class and one worth that one request used. `unused_count` counts those that were not used since,
    residents and ghosts, and `used_count` those that were used in the bucket that the run is in. `waiting` has the
    residents, the deepest one first; `waiting_at` those whose next step has another price than their worth.
    """

    __slots__ = (
        "bucket", "chunk_count", "number", "step", "unused_count", "used_at_s", "used_count", "waiting", "waiting_at",
    )  # fmt: skip

    def __init__(self, number: int, step: int, used_at_s: float) -> None:
        self.number = number
        self.step = step
        self.used_at_s = used_at_s
        self.bucket = 0
        self.chunk_count = 0
        self.unused_count = 0
        self.used_count = 0
        self.waiting: OrderedDict[_Chunk, None] = OrderedDict()
        self.waiting_at: dict[int, OrderedDict[_Chunk, None]] | None = None

    def at(self, step: int) -> OrderedDict[_Chunk, None]:
        """The residents that wait at this price."""
        if step == self.step:
            return self.waiting
        if self.waiting_at is None:
            self.waiting_at = {}
        return self.waiting_at.setdefault(step, OrderedDict())

    def steps(self) -> list[int]:
        """The prices at which residents wait."""
        steps = [self.step] if self.waiting else []
        return steps if self.waiting_at is None else [*steps, *self.waiting_at]

    def close(self, step: int) -> None:
        """Forget a price at which none waits any more."""
        if self.waiting_at is not None:
            self.waiting_at.pop(step, None)


class _Chunk(Resident):
    """A resident, the run that it waits in, and the price of its next step."""

    __slots__ = ("run", "step")

    def __init__(self, key: Key, nbytes: int, run: _Run) -> None:
        super().__init__(key, nbytes)
        self.run = run
        self.step = run.step

    def place(self) -> None:
        """Find the price of its next step: that of encoding it is absolute, that of its leaving goes by its worth."""
        self.step = self.run.step
        if self.ladder:
            step = self.ladder[self.rung_number].step
            self.step = step + (self.step if self.next_rung is None else 0)


class _Known:
    """The policy's memory of a chunk, resident or not, that lies `offset_bytes` deep in its prefix, as far as known."""

    __slots__ = ("continuation_count", "offset_bytes", "run", "use_count")

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.continuation_count = 0
        self.offset_bytes = 0
        self.use_count = 0


class ReuseValue(EvictionOrder):
    """Remembers up to `ghost_count_max` chunks that are not resident. `growth` is that of UseWorth."""

    def __init__(self, ghost_count_max: int = GHOST_COUNT_MAX, growth: float = 0.0) -> None:
        self._ghost_count_max = ghost_count_max
        self._times = ReuseTimes()
        self._worth = UseWorth(growth)
        self._known: dict[Key, _Known] = {}
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._aging: tuple[deque[_Run], ...] = tuple(deque() for _ in range(BUCKET_COUNT))
        self._cells: defaultdict[Cell, OrderedDict[_Run, None]] = defaultdict(OrderedDict)
        """The runs with residents."""
        self._by_value: list[tuple[float, Cell]] = []
        self._by_valueed: set[Cell] = set()
        self._request_count = 0
        self._former_run: _Run | None = None
        """The run of the former resident that came last."""

    def note_former(self, former: Former, now_s: float, child_count: int) -> None:
        """Chunks of one class that were used at one time are a run again, which has the bucket of its age at once: what
        happened on the way there is not known. Nor are the depths of prefixes, so `growth` begins to count with the
        next use.
        """
        key, nbytes = former.key, former.nbytes
        use_count, continuation_count = former.use_count - 1, child_count
        if former.is_shared:
            use_count, continuation_count = max(use_count, 1), max(continuation_count, 2)
        number = self._times.number_of(former_class_path(use_count, continuation_count))
        self._worth.note(nbytes)
        step = self._worth.step(0, nbytes)
        run = self._former_run
        if run is None or (run.number, run.step, run.used_at_s) != (number, step, former.used_at_s):
            run = self._former_run = _Run(number, step, former.used_at_s)
            run.bucket = min(BUCKET_COUNT, bisect_right(EDGES_S, max(0.0, now_s - former.used_at_s))) - 1
            self._aging[run.bucket].append(run)
        run.unused_count += 1
        run.chunk_count += 1
        before = self._known.get(key)
        if before is not None:  # it has left since the restart
            before.run.unused_count -= 1
            self._ghosts.pop(key, None)
        known = self._known[key] = _Known(run)
        known.use_count = former.use_count
        known.continuation_count = continuation_count

    def end_restore(self) -> None:
        self._former_run = None

    def note(self, request: Request) -> None:
        self._age(request.now_s)
        if self._request_count % REFRESH_REQUESTS == 0:
            self._refresh()
        self._request_count += 1
        known_count = next((at for at, key in enumerate(request.keys) if key not in self._known), len(request.keys))
        runs: dict[tuple[int, int], _Run] = {}
        parent: _Known | None = None
        offset_bytes = 0
        for position, key in enumerate(request.keys):
            known = self._known.get(key)
            if known is None:
                if parent is not None:
                    parent.continuation_count += 1
            else:
                known.run.unused_count -= 1
                known.run.used_count += 1
                self._ghosts.pop(key, None)
            counts = (known.use_count, known.continuation_count) if known else (0, 0)
            if position < request.shared_count:  # as if it had been seen before, under several continuations
                counts = max(counts[0], 1), max(counts[1], 2)
            number = self._times.number_of(class_path(Use(position, len(request.keys), known_count, *counts)))
            nbytes = request.sizes_bytes[position]
            offset_bytes = max(offset_bytes, known.offset_bytes if known else 0)
            self._worth.note(nbytes)
            step = self._worth.step(offset_bytes, nbytes)
            run = runs.get((number, step))
            if run is None:
                run = runs[number, step] = _Run(number, step, request.now_s)
                self._aging[0].append(run)
            run.unused_count += 1
            run.chunk_count += 1
            if known is None:
                known = self._known[key] = _Known(run)
            known.run = run
            known.use_count += 1
            known.offset_bytes = offset_bytes
            offset_bytes += nbytes
            parent = known

    def _age(self, now_s: float) -> None:
        """Move runs to the buckets of their ages, and count what was used on the way and what was not. A run counts as
        one observation, since its chunks come back together.
        """
        for bucket, runs in enumerate(self._aging):
            while runs and now_s - runs[0].used_at_s >= EDGES_S[bucket + 1]:
                run = runs.popleft()
                used, unused = run.used_count / run.chunk_count, run.unused_count / run.chunk_count
                self._times.note(run.number, bucket, used, unused)
                run.used_count = 0
                if run.unused_count and bucket < BUCKET_COUNT - 1:
                    self._aging[bucket + 1].append(run)
                    steps = run.steps()
                    for step in steps:
                        del self._cells[run.number, step, bucket][run]
                    run.bucket = bucket + 1
                    for step in steps:
                        self._opened(run, step)[run] = None

    def _opened(self, run: _Run, step: int) -> OrderedDict[_Run, None]:
        """The cell that the run is about to be put into."""
        cell = run.number, step, run.bucket
        if cell not in self._by_valueed:
            self._by_valueed.add(cell)
            heappush(self._by_value, (self._value(cell), cell))
        return self._cells[cell]

    def _value(self, cell: Cell) -> float:
        number, step, bucket = cell
        return self._times.value(number, bucket) * worth_of(step)

    def _refresh(self) -> None:
        self._times.refresh(KEPT_FRACTION)
        self._cells = defaultdict(OrderedDict, {cell: runs for cell, runs in self._cells.items() if runs})
        self._by_value = [(self._value(cell), cell) for cell in self._cells]
        self._by_valueed = set(self._cells)
        heapify(self._by_value)

    def made(self, key: Key, nbytes: int) -> Resident:
        return _Chunk(key, nbytes, self._known[key].run)

    def admit(self, resident: Resident, position: int) -> None:
        assert isinstance(resident, _Chunk)
        resident.run = self._known[resident.key].run
        resident.place()
        self._put_last(resident)

    def _put_last(self, chunk: _Chunk) -> None:
        run = chunk.run
        waiting = run.waiting if chunk.step == run.step else run.at(chunk.step)
        if not waiting:
            self._opened(run, chunk.step)[run] = None
        waiting[chunk] = None

    def use(self, resident: Resident, position: int) -> None:
        self.take(resident)
        self.admit(resident, position)

    def take_next(self) -> Resident:
        while True:
            cell = self._by_value[0][1]
            run = next(iter(self._cells[cell]), None)
            if run is not None:
                step = cell[1]
                waiting = run.waiting if step == run.step else run.at(step)
                chunk, _ = waiting.popitem(last=False)
                if not waiting:
                    self._close(run, step)
                return chunk
            heappop(self._by_value)
            self._by_valueed.discard(cell)

    def take(self, resident: Resident) -> None:
        assert isinstance(resident, _Chunk)
        run, step = resident.run, resident.step
        waiting = run.waiting if step == run.step else run.at(step)
        del waiting[resident]
        if not waiting:
            self._close(run, step)

    def _close(self, run: _Run, step: int) -> None:
        """Take a run out of the cell of a price at which none of its residents waits any more."""
        del self._cells[run.number, step, run.bucket][run]
        run.close(step)

    def put_back(self, resident: Resident) -> None:
        assert isinstance(resident, _Chunk)
        resident.place()
        run, waiting = resident.run, resident.run.at(resident.step)
        if not waiting:
            runs = self._opened(run, resident.step)
            runs[run] = None
            runs.move_to_end(run, last=False)
        waiting[resident] = None
        waiting.move_to_end(resident, last=False)

    def put_behind(self, resident: Resident) -> None:
        assert isinstance(resident, _Chunk)
        resident.place()
        self._put_last(resident)

    def left(self, resident: Resident) -> None:
        self._ghosts[resident.key] = None
        if len(self._ghosts) > self._ghost_count_max:
            key, _ = self._ghosts.popitem(last=False)
            self._known.pop(key).run.unused_count -= 1
