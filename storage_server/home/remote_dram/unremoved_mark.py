"""The time of the last removal that could not be carried out, in a file: a restart must not forget it."""

from __future__ import annotations

import logging
import math
import threading

from objectcache.adapters.beneath import Beneath

SPARE_S = 10.0
"""The file has a time so much later than the removal, so that those within this time need no writing."""
BYTES_MAX = 64
_log = logging.getLogger(__name__)


class UnremovedMark:
    """Remote copies that were read from home before the time in `file` may be old. Used by any thread; calls block."""

    def __init__(self, file: Beneath) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._written_s = -math.inf

    def read(self, now_s: float) -> float:
        """The time (Unix seconds), at most now; 0 where there is no file, and now where the file makes no sense."""
        try:
            time_s = float(self._file.read(BYTES_MAX))
            return time_s if time_s <= now_s else now_s  # also where it is no number
        except FileNotFoundError:
            return 0.0
        except (OSError, ValueError) as error:
            _log.warning("remote DRAM: no copy of before this start is used: %s", error)
            return now_s

    def cover(self, now_s: float) -> None:
        """Make sure that the time in the file is not before now. The log tells of a file that cannot be written."""
        with self._lock:
            if not now_s <= self._written_s <= now_s + SPARE_S:
                try:
                    self._file.write(str(now_s + SPARE_S).encode())
                except OSError as error:
                    _log.warning("remote DRAM: after a restart old copies may be used: %s", error)
                else:
                    self._written_s = now_s + SPARE_S
