"""Stores in the background: bounded, and each holds references to LMCache's memory until it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Jobs:
    """Stores, one after the other: at most `waiting_max` chunks wait. Safe from any thread."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._waiting = 0
        self._futures: set[Future[bool]] = set()
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "objectcache-store")

    def add(self, chunk_count: int, work: Callable[[], bool], over: Callable[[], None]) -> Future[bool] | None:
        """Run `work`, which stores `chunk_count` chunks, after the jobs that came before. Returns None, and takes no
        job, when too many chunks wait. Otherwise `over` is called once: when the work has succeeded, has failed, or
        was dropped by `close`.
        """
        with self._lock:
            if self._is_closed or self._waiting + chunk_count > self._waiting_max:
                return None
            self._waiting += chunk_count
            future = self._thread.submit(work)
            self._futures.add(future)

        def end(future: Future[bool]) -> None:
            with self._lock:
                self._waiting -= chunk_count
                self._futures.discard(future)
            over()

        future.add_done_callback(end)
        return future

    def close(self, drain_s: float) -> None:
        """Run jobs for at most `drain_s` more, then drop those that are left."""
        with self._lock:
            self._is_closed = True
            futures = set(self._futures)
        wait(futures, drain_s)
        self._thread.shutdown(wait=False, cancel_futures=True)
