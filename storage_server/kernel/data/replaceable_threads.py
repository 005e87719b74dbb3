"""A pool of threads of which one that hangs can be replaced. The standard library's pools cannot: what waits in them
waits for their own threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class ThreadCall:
    """A call that is under way, or waits for a thread."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.result: Future[Any] = Future()
        self.is_over = False
        self.is_replaced = False

    def run(self) -> None:
        """Call, in a thread."""
        self.result.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        try:
            found = self.action()
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(found)


class ReplaceableThreads:
    """`count` threads, which take calls in the order of their coming. A thread whose call has been replaced ends with
    it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._started_count = 0

    def submit(self, action: Callable[[], Any]) -> ThreadCall:
        """Have a thread call `action`."""
        call = ThreadCall(action)
        self._calls.put(call)
        if self._started_count < self._count:
            self._started_count += 1
            self._start()
        return call

    def replace(self, call: ThreadCall) -> bool:
        """Start another thread in place of the one that is in this call; False where the call is over."""
        with self._lock:
            if call.is_over:
                return False
            call.is_replaced = True
        self._start()
        return True

    def close(self) -> None:
        """Wait for all calls."""
        for _ in range(self._started_count):
            self._calls.put(None)
        while threads := tuple(self._threads):  # they leave by themselves
            for thread in threads:
                thread.join()

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            with self._lock:
                call.is_over = True
            if call.is_replaced:
                break
            del call  # nobody needs its bytes while this thread waits
        self._threads.discard(threading.current_thread())
