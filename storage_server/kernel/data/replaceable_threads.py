"""Threads for calls that may be slow, because a disk is. A call that has brought nothing for SLOW_S keeps its thread,
and gives its place to others, for which there are spare threads. The standard library's pools cannot do that: what
waits in them waits for their own threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from storage_server.kernel.rules.thread_turns import ThreadTurns

SLOW_S = 0.5
SPARE_THREADS = 64
"""So many slow calls give their places to others."""


class CallProgress:
    """When a long call has brought something last, by the steady clock. One of many places says nothing in between, and
    may take `first_s` longer. Used in any thread.
    """

    def __init__(self, first_s: float = 0.0) -> None:
        self.first_s = first_s
        self.at_s = float("-inf")

    def note(self, pause_s: float = 0.0) -> None:
        """It has brought something now, or begins, and goes on after a pause of its own."""
        self.at_s = time.monotonic() + pause_s


class ThreadCall:
    """A call that uses a file, and is under way or waits for a thread."""

    def __init__(self, file_id: str, action: Callable[[], Any], progress: CallProgress | None = None) -> None:
        self.file_id = file_id
        self.progress = progress or CallProgress()
        self.action: Callable[[], Any] | None = action
        self.result: Future[Any] = Future()
        self.is_replaced = False

    def run(self) -> None:
        """Call, in a thread."""
        action, self.action = self.action, None
        if action is None or not self.result.set_running_or_notify_cancel():  # from now on it cannot be cancelled
            return
        try:
            found = action()
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(found)


class ReplaceableThreads:
    """`count` threads, which take calls in `turns`. A thread whose call has been replaced ends with it."""

    def __init__(self, count: int, name: str, turns: ThreadTurns[ThreadCall]) -> None:
        self._count = count
        self._name = name
        self._turns = turns
        self._lock = threading.Lock()
        """Held for each use of `turns`, and of the calls that run."""
        self._words: SimpleQueue[bool] = SimpleQueue()
        """One for each call that may begin: True. A thread that takes False ends."""
        self._in_vain = 0
        """So many words were taken while all that waited had to wait on."""
        self._running: set[ThreadCall] = set()
        self._threads: set[threading.Thread] = set()
        self._started_count = 0
        self._is_closed = False

    @property
    def waiting_count(self) -> int:
        """How many calls wait."""
        return self._turns.waiting_count

    def running(self) -> list[ThreadCall]:
        """The calls that have threads."""
        with self._lock:
            return list(self._running)

    def submit(self, call: ThreadCall) -> None:
        """Have a thread carry the call out. Raises RuntimeError behind `close`: nobody would."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the threads of {self._name} are closed")
            self._turns.put(call)
            is_first = self._started_count < self._count
            self._started_count += is_first
        self._words.put(True)
        if is_first:
            self._start()

    def withdraw(self, call: ThreadCall, error: BaseException | None = None) -> bool:
        """Have a call that waits not carried out: it is cancelled, or fails with `error`. False where it has begun."""
        with self._lock:
            if not self._turns.remove(call):
                return False
        call.action = None
        if error is None:
            call.result.cancel()
        elif not call.result.done():
            call.result.set_exception(error)
        return True

    def refuse(self, is_meant: Callable[[str], bool], error: Callable[[], BaseException]) -> None:
        """Withdraw the calls that wait and use files that are meant, each with an error of its own."""
        with self._lock:
            meant = self._turns.waiting_for(is_meant)
        for call in meant:
            self.withdraw(call, error())

    def replace(self, call: ThreadCall) -> bool:
        """Start another thread in place of the one that is in this call; False where the call is over."""
        with self._lock:
            if call not in self._running or call.is_replaced:
                return False
            call.is_replaced = True
            self._turns.give_up_place(call)
        self._start()
        self._tell()
        return True

    def close(self) -> None:
        """Carry out what waits, and wait for all calls."""
        with self._lock:
            self._is_closed = True
        for _ in range(self._started_count):
            self._words.put(False)
        while threads := tuple(self._threads):  # they leave by themselves
            for thread in threads:
                thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        is_replaced: bool | None = False
        while not is_replaced and self._words.get():
            is_replaced = self._carry_out_next()
        while self._is_closed and self._carry_out_next() is not None:
            pass
        self._threads.discard(threading.current_thread())

    def _carry_out_next(self) -> bool | None:
        """Carry the next call out, and whether its thread was replaced meanwhile; None where there is none."""
        with self._lock:
            call = self._turns.take()
            if call is None:
                self._in_vain += self._turns.waiting_count > 0
                return None
            call.progress.note(call.progress.first_s)
            self._running.add(call)
        call.run()
        with self._lock:
            self._running.discard(call)
            self._turns.end(call, has_place=not call.is_replaced)
        self._tell()
        return call.is_replaced

    def _tell(self) -> None:
        """A call that had to wait for an owner's or a file's other calls may begin now."""
        with self._lock:
            is_more = self._in_vain > 0
            self._in_vain -= is_more
        if is_more:
            self._words.put(True)


class SlowCalls:
    """Looks at the calls that run in `threads`, and has at most `spare_count` slow ones replaced. `note_quiet` is told
    of each that has brought nothing for SLOW_S, and for how long. Used on one event loop.
    """

    def __init__(
        self,
        threads: ReplaceableThreads,
        spare_count: int,
        note_quiet: Callable[[ThreadCall, float], None] = lambda call, quiet_s: None,
    ) -> None:
        self._threads = threads
        self._spare_count = spare_count
        self._note_quiet = note_quiet
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """A call was submitted."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S / 2, self._again)

    def look(self) -> bool:
        """Whether any call runs or waits."""
        is_busy = self._threads.waiting_count > 0  # first: what waits may run the next moment
        running, now_s = self._threads.running(), time.monotonic()
        replaced_count = sum(call.is_replaced for call in running)
        for call in running:
            quiet_s = now_s - call.progress.at_s
            if quiet_s < SLOW_S or call.result.done():  # whoever waits for it may know already
                continue
            if replaced_count < self._spare_count:
                replaced_count += self._threads.replace(call)
            self._note_quiet(call, quiet_s)
        return is_busy or bool(running)

    def _again(self) -> None:
        self._timer = None
        if self.look():
            self.watch()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()


class SlowCallsThread:
    """Has `slow` look at calls that come from any thread, in a thread of its own, which is there while calls are."""

    def __init__(self, slow: SlowCalls) -> None:
        self._slow = slow
        self._lock = threading.Lock()
        self._is_watching = False

    def watch(self) -> None:
        """A call was submitted."""
        with self._lock:
            is_first, self._is_watching = not self._is_watching, True
        if is_first:
            threading.Thread(target=self._look, name="slow-calls", daemon=True).start()

    def _look(self) -> None:
        is_watching = True
        while is_watching:
            time.sleep(SLOW_S / 2)
            with self._lock:
                is_watching = self._is_watching = self._slow.look()
