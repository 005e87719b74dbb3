"""Memory for copies and peers, and the memory and processor time of servers. Linux only."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from objectcache.calibration.content import Bytes

INTERVAL_S = 0.02
CLIENT_MEMORY = "/memfd:objectcache"


def huge_page_memory(nbytes: int, fill: int = 0xFF) -> Bytes:
    """Anonymous private memory, written once."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array.fill(fill)
    return array


def tree(pid: int) -> list[int]:
    """The process and its descendants, as they are now."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def own_bytes(pids: Sequence[int]) -> int | None:
    """The private memory of the processes now, in bytes."""
    seen = _anonymous_bytes(pids)
    return None if seen is None else seen - _client_bytes(pids)


@contextlib.contextmanager
def watched(pids: Sequence[int]) -> Iterator[Callable[[], int | None]]:
    """Looks every few milliseconds while the block lasts. What it gives tells after the block the most that the
    processes had of their own meanwhile, None where nothing can be seen.
    """
    ended, seen = threading.Event(), list[int | None]()

    def look() -> None:
        while not ended.wait(INTERVAL_S):
            seen.append(_anonymous_bytes(pids))
        seen.append(_anonymous_bytes(pids))  # so that a short block is seen, too

    def peak_bytes() -> int | None:
        known = [nbytes for nbytes in seen if nbytes is not None]
        return max(known) - _client_bytes(pids) if known else None

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak_bytes
    finally:
        ended.set()
        thread.join()


def cpu_seconds(pids: Sequence[int]) -> float | None:
    """Processor time so far of these processes and their descendants; None where /proc does not say."""
    ticks = 0
    try:
        for each in (each for pid in pids for each in tree(pid)):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def _anonymous_bytes(pids: Sequence[int]) -> int | None:
    """Resident memory that is no file's: private, and shared without a name; None where nothing can be seen."""
    lines = (line for pid in pids for line in _lines(Path(f"/proc/{pid}/status")))
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(kibibytes) * 1024 if kibibytes else None


def _client_bytes(pids: Sequence[int]) -> int:
    """Resident pages of clients' shared memory."""
    kibibytes, is_clients = 0, False
    for line in (line for pid in pids for line in _lines(Path(f"/proc/{pid}/smaps"))):
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            is_clients = CLIENT_MEMORY in line
        elif is_clients and first == "Rss:":
            kibibytes += int(line.split()[1])
    return kibibytes * 1024


def _lines(file: Path) -> list[str]:
    """The lines of a file of /proc; none where the process has ended."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
