"""Buffers of loads that were given up, whose servers may still write into them: cancelled and released in a thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from nixl_client.connectors.vllm.staging import Staging
from nixl_client.fetch.layer_fetch import LayerFetch

RETRY_S = 5.0
_log = logging.getLogger(__name__)


class Retired:
    """At most `limit` buffers: a further load that is given up finds no room until a server has answered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._given: queue.Queue[tuple[Sequence[LayerFetch], Staging | None] | None] = queue.Queue()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_full(self) -> bool:
        """Whether `give` must not be called."""
        return self._held >= self._limit

    def give(self, fetches: Sequence[LayerFetch], staging: Staging) -> None:
        """Release `staging` once none of `fetches` writes into it any more."""
        self._held += 1
        self._take(fetches, staging)

    def cancel(self, fetch: LayerFetch) -> None:
        """Have the server stop this fetch, so that other fetches get the link. Its buffer stays in use."""
        self._take((fetch,), None)

    def _take(self, fetches: Sequence[LayerFetch], staging: Staging | None) -> None:
        self._given.put((fetches, staging))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="objectcache-retired", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Try to cancel once more, for at most `timeout_s`."""
        self._is_closing.set()
        self._given.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._given.get()) is not None:
            fetches, staging = item
            while not self._is_released(fetches, staging) and staging is not None:
                if self._is_closing.wait(RETRY_S):
                    return
            self._held -= staging is not None

    def _is_released(self, fetches: Sequence[LayerFetch], staging: Staging | None) -> bool:
        began_s = time.monotonic()
        try:
            for fetch in fetches:
                fetch.cancel()
            if staging is not None:
                staging.release()
        except Exception as error:
            waited_s = time.monotonic() - began_s
            _log.warning("a load that was given up could not be cancelled (%.1f s): %r", waited_s, error)
            return False
        return True
