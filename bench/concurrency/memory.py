"""Memory of a server and its workers, without what clients handed in and what the page cache lends. Linux only."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.02
CLIENT_MEMORY = "/memfd:objectcache"


def tree(pid: int) -> list[int]:
    """The process and its descendants, as they are now."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def anonymous_bytes(pids: list[int]) -> int | None:
    """Resident memory that is no file's: private, and shared without a name; None where nothing can be seen."""
    total, seen = 0, False
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        kibibytes = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
        seen = seen or bool(kibibytes)
        total += sum(kibibytes) * 1024
    return total if seen else None


def client_bytes(pids: list[int]) -> int:
    """Resident pages of clients' shared memory."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
        except OSError:
            continue
        is_clients = False
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                is_clients = CLIENT_MEMORY in line
            elif is_clients and first == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


def own_bytes(pids: list[int]) -> int | None:
    """What the processes have of their own right now."""
    seen = anonymous_bytes(pids)
    return None if seen is None else seen - client_bytes(pids)


class MemoryWatch:
    """Looks every few milliseconds while the context lasts; `peak_bytes` is known after it."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._peak: int | None = None
        self.peak_bytes: int | None = None

    def _look(self) -> None:
        while True:
            seen = anonymous_bytes(self._pids)
            if seen is not None:
                self._peak = max(seen, self._peak or 0)
            if self._ended.wait(INTERVAL_S):
                return

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if self._peak is not None:
            self.peak_bytes = self._peak - client_bytes(self._pids)
