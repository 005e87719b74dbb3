"""Reads past the page cache: what they bring is what the files have, and what they cannot bring comes the other way."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from objectcache.adapters import native
from storage_server.planning.block_checksums import BLOCK_BYTES, BlockChecksums
from storage_server.planning.rows import Row
from tests.support.waiting import eventually

MIB = 1 << 20


class Stored:
    """A file of random bytes, cold, and rows of it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.data = os.urandom(nbytes)
        self.path = path
        self.write(self.data)
        self.fd = os.open(path, os.O_RDONLY)
        blocks = BlockChecksums()
        blocks.update(self.data)
        self.words = blocks.packed()
        self.make_cold()

    def write(self, data: bytes) -> None:
        self.path.write_bytes(data)

    def make_cold(self) -> None:
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def cached_pages(self) -> int | None:
        """How many pages of the file the page cache has; None where the kernel does not tell."""
        libc = ctypes.CDLL(None, use_errno=True)
        span, counts = (ctypes.c_uint64 * 2)(0, len(self.data)), (ctypes.c_uint64 * 5)()
        return None if libc.syscall(451, self.fd, span, counts, 0) < 0 else counts[0]

    def row(self, start: int, nbytes: int, target: int, landing: int = 0) -> list[int]:
        return [self.fd, 0, start, nbytes, len(self.data), 0, target, landing]

    def gather(
        self, rows: list[list[int]], target: np.ndarray, direct_files_max: int = 1
    ) -> tuple[tuple[int, ...], np.ndarray]:
        array = np.array(rows, dtype=np.int64)
        failure = native.gather(array, self.words, int(target.ctypes.data), False, direct_files_max)
        return failure, array[:, Row.LANDING]


def room(nbytes: int) -> np.ndarray:
    """Memory that begins at a multiple of 4 KiB, filled with 0xAA."""
    whole = np.full(nbytes + 4096, 0xAA, dtype=np.uint8)
    start = -int(whole.ctypes.data) % 4096
    return whole[start : start + nbytes]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "extent", 24 * MIB)


def test_more_reads_than_the_queue_holds(stored: Stored) -> None:
    """Slices of 16 KiB in a random order, and one row that is longer than a single read."""
    starts = np.random.default_rng(1).permutation(20 * MIB // BLOCK_BYTES) * BLOCK_BYTES
    rows = [stored.row(int(start), BLOCK_BYTES, index * BLOCK_BYTES) for index, start in enumerate(starts)]
    rows.append(stored.row(20 * MIB, 4 * MIB, 20 * MIB))
    target = room(24 * MIB)
    assert stored.gather(rows, target)[0] == ()
    for index, start in enumerate(starts):
        at = index * BLOCK_BYTES
        assert target[at : at + BLOCK_BYTES].tobytes() == stored.data[start : start + BLOCK_BYTES]
    assert target[20 * MIB :].tobytes() == stored.data[20 * MIB :]


def test_the_page_cache_is_left_alone(stored: Stored) -> None:
    if stored.cached_pages() is None:
        pytest.skip("kernels before 6.5 do not tell what the page cache has")
    before = stored.cached_pages()
    target = room(24 * MIB)
    assert stored.gather([stored.row(0, 24 * MIB, 0)], target)[0] == ()
    assert target.tobytes() == stored.data
    assert stored.cached_pages() == before


def test_what_lands_lies_at_its_landing_and_in_the_payload(stored: Stored) -> None:
    """Bytes at hand do not land: they were proved where somebody else may have written."""
    os.pread(stored.fd, 64 * 1024, 0)
    target, landing = room(3 * MIB), room(4 * MIB)
    address = int(landing.ctypes.data)
    rows = [
        stored.row(0, BLOCK_BYTES, 0, address),
        stored.row(8 * MIB, 2 * MIB, BLOCK_BYTES, address + MIB),
        stored.row(20 * MIB, MIB // 2, BLOCK_BYTES + 2 * MIB),
    ]
    failure, landed = stored.gather(rows, target)
    assert failure == ()
    assert target[:BLOCK_BYTES].tobytes() == stored.data[:BLOCK_BYTES]
    assert target[BLOCK_BYTES : BLOCK_BYTES + 2 * MIB].tobytes() == stored.data[8 * MIB : 10 * MIB]
    if stored.cached_pages() is not None:
        assert landed.tolist() == [0, address + MIB, 0]
    for at, start, nbytes in ((0, 0, BLOCK_BYTES), (MIB, 8 * MIB, 2 * MIB)):
        if landed[int(at > 0)]:
            assert landing[at : at + nbytes].tobytes() == stored.data[start : start + nbytes]
    assert (landing[3 * MIB :] == 0xAA).all()


def test_a_row_that_a_disk_cannot_read_by_itself_comes_through_the_page_cache(stored: Stored) -> None:
    """Beginnings within a block, odd lengths, and memory at odd addresses."""
    target, landing = room(MIB), room(MIB)
    odd = [(100, 5_000, 0), (3 * BLOCK_BYTES, 20_000, 8_192), (5 * BLOCK_BYTES, BLOCK_BYTES, 40_001)]
    rows = [stored.row(start, nbytes, at, int(landing.ctypes.data)) for start, nbytes, at in odd[:2]]
    rows.append(stored.row(*odd[2]))
    failure, landed = stored.gather(rows, target)
    assert failure == ()
    assert landed.tolist() == [0, 0, 0]
    for start, nbytes, at in odd:
        assert target[at : at + nbytes].tobytes() == stored.data[start : start + nbytes]
    assert (landing == 0xAA).all()


@pytest.mark.parametrize("direct_files_max", [0, 1, 2])
def test_no_more_files_are_opened_once_more_than_may_be(stored: Stored, direct_files_max: int) -> None:
    """The rows of other files come through the page cache, so they do not land."""
    if stored.cached_pages() is None:
        pytest.skip("kernels before 6.5 do not tell what the page cache has")
    other = os.open(stored.path, os.O_RDONLY)
    target, landing = room(2 * MIB), room(2 * MIB)
    address = int(landing.ctypes.data)
    rows = [stored.row(0, MIB, 0, address), stored.row(8 * MIB, MIB, MIB, address + MIB)]
    rows[1][Row.SOURCE] = other
    failure, landed = stored.gather(rows, target, direct_files_max)
    os.close(other)
    assert failure == ()
    assert target.tobytes() == stored.data[:MIB] + stored.data[8 * MIB : 9 * MIB]
    assert np.count_nonzero(landed) == direct_files_max


def test_damage_is_told_and_does_not_land(stored: Stored) -> None:
    damaged = bytearray(stored.data)
    damaged[9 * MIB + 70_000] ^= 1
    stored.write(bytes(damaged))
    stored.make_cold()
    target, landing = room(4 * MIB), room(4 * MIB)
    rows = [stored.row(0, 2 * MIB, 0), stored.row(8 * MIB, 2 * MIB, 2 * MIB, int(landing.ctypes.data))]
    failure, landed = stored.gather(rows, target)
    assert failure[:3] == (1, MIB + 4 * BLOCK_BYTES, 1)
    assert landed[1] == 0


def test_a_file_that_ends_early_is_short(stored: Stored) -> None:
    os.truncate(stored.path, 10 * MIB)
    failure, _ = stored.gather([stored.row(9 * MIB, 4 * MIB, 0)], room(4 * MIB))
    assert failure[0] == 0
    assert failure[2] == 2


def test_queues_end_with_their_threads(stored: Stored) -> None:
    """Servers start and end many gathering threads in one process."""

    def count() -> int:
        found = 0
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing, or one closed meanwhile
                found += "io_uring" in str(fd.readlink())
        return found

    def read() -> None:
        target = room(24 * MIB)
        assert stored.gather([stored.row(0, 24 * MIB, 0)], target)[0] == ()
        assert target.tobytes() == stored.data

    before = count()
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eventually(lambda: count() == before)  # Python's join returns a moment before the thread's end
