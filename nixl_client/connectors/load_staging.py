"""Buffers that servers fill: memory of our own, because a server may go on writing after a deadline, when the engine's
memory has long gone back to its pool.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from nixl_client.client import Client
from nixl_client.fetch.layer_fetch import LayerFetch

Array = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)


class LoadStaging:
    """At most `count` buffers, made when they are first needed. A buffer that somebody may still write into counts
    until that is over.
    """

    def __init__(self, client: Client, nbytes: int, count: int) -> None:
        self._client = client
        self._nbytes = nbytes
        self._free: list[Array | None] = [None] * count
        self._changed = threading.Condition()
        self._reaper = ThreadPoolExecutor(1, "objectcache-reaper")

    def warm(self) -> None:
        """Make one buffer, and the server acquainted with it, before the first load has to wait for that; elsewhere."""
        self._reaper.submit(self._warm)

    def take(self, nbytes: int, deadline_s: float) -> Array:
        """A buffer of at least so many bytes. Raises TimeoutError when none is free in time, OSError without memory."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError("every staging buffer is in use")
            array = self._free.pop()
        try:
            if array is not None and array.nbytes < nbytes:
                self._client.release_buffer(array)
                array = None
            return self._client.allocate_buffer(max(nbytes, self._nbytes)) if array is None else array
        except BaseException:
            self.give(None)
            raise

    def give(self, array: Array | None) -> None:
        """It is free again; None for one that is gone."""
        with self._changed:
            self._free.append(array)
            self._changed.notify()

    def end(self, array: Array, fetch: LayerFetch) -> None:
        """The fetch into this buffer is over, or not wanted any more: then a thread of ours cancels it first."""
        if fetch.is_settled:
            self.give(array)
        else:
            self._reaper.submit(self._reap, array, fetch)

    def close(self) -> None:
        """Return when nothing is given up any more."""
        self._reaper.shutdown()

    def _warm(self) -> None:
        kept: Array | None = None
        try:
            kept = self.take(self._nbytes, time.monotonic())
        except (OSError, TimeoutError) as error:
            _log.warning("no staging buffer yet: %s", error)
            return
        try:
            self._client.register_buffer(kept)
        except Exception as error:
            _log.warning("the staging buffer is not registered yet: %s", error)
        finally:
            self.give(kept)

    def _reap(self, array: Array, fetch: LayerFetch) -> None:
        kept: Array | None = None
        try:
            fetch.cancel()
            kept = array
        except Exception as error:
            _log.warning("cancelling fetch %s failed: %s", fetch.request_id, error)
            try:
                self._client.release_buffer(array)
            except Exception as failure:
                _log.warning("a buffer could not be released: %s", failure)
        finally:
            self.give(kept)
