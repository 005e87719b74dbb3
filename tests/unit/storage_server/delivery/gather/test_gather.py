"""The gather: rows planned by arithmetic, and the native loops that carry them out."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from awscrt import checksums
from awscrt.checksums import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors.errors import ChunkUnavailable, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from objectcache.adapters import native
from storage_server.delivery.gather.read import gather
from storage_server.kernel.chunks import EmbeddedChunks
from storage_server.kernel.data.disk import Disk
from storage_server.kernel.data.extents import ExtentFiles, extent_place
from storage_server.kernel.reads import Reads
from storage_server.planning.block_checksums import BLOCK_BYTES, BlockChecksums
from storage_server.planning.extent import Extent
from storage_server.planning.plan import plan_delivery
from storage_server.planning.rows import Row, SourceTable, joined, make_table, spans_of
from tests.support.memory_holes import punch

LAYOUTS = st.builds(
    ChunkLayout,
    num_layers=st.integers(1, 5),
    chunk_tokens=st.just(16),
    per_layer_chunk_bytes=st.sampled_from([1, 100, 4_096, 16_384, 20_000, 40_000]),
)


def checksums_of(data: bytes) -> bytes:
    blocks = BlockChecksums()
    blocks.update(data)
    return blocks.packed()


def make_cold(fd: int) -> None:
    """Drop a file from the page cache."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Chunks:
    """Chunk objects cut into extents at `cuts`, which lie one after the other in two files, 4 KiB aligned; those whose
    index is in `resident` are in memory.
    """

    def __init__(
        self,
        folder: Path,
        layout: ChunkLayout,
        count: int,
        cuts: list[int],
        resident: set[int],
        *,
        direct_threads: int = 0,
    ) -> None:
        rng = np.random.default_rng(count)
        self.data = [rng.integers(0, 256, layout.chunk_bytes, dtype=np.uint8).tobytes() for _ in range(count)]
        self.files = ExtentFiles(folder, 64, Disk(), direct_threads=direct_threads)
        self.files.start()
        self.source = EmbeddedChunks(cast(Reads, None), self.files)  # nothing is resolved here
        self.kept = [np.frombuffer(data, dtype=np.uint8) for data in self.data]
        bounds = sorted({0, layout.chunk_bytes, *(cut % layout.chunk_bytes for cut in cuts)})
        stored = {"a" * 32: bytearray(), "b" * 32: bytearray()}
        self.chunks: list[list[Extent]] = []
        self.addresses: list[int | None] = []
        for index, data in enumerate(self.data):
            extents = []
            for start, end in pairwise(bounds):
                file_id = ("a" if index % 3 else "b") * 32
                offset = len(stored[file_id])
                stored[file_id] += data[start:end] + bytes(-(end - start) % 4096)
                extents.append(Extent(file_id, offset, end - start, checksums_of(data[start:end]), start))
                address = int(self.kept[index].ctypes.data) + start
                self.addresses.append(address if index in resident else None)
            self.chunks.append(extents)
        for file_id, content in stored.items():
            extent_place(folder, file_id).path.parent.mkdir(exist_ok=True)
            extent_place(folder, file_id).path.write_bytes(content)
            self.files.add(file_id)

    def table(self) -> SourceTable:
        return make_table(self.chunks, self.addresses)

    def make_cold(self) -> None:
        """Drop the files from the page cache."""
        for file_id in ("a" * 32, "b" * 32):
            fd = os.open(self.files.place(file_id).path, os.O_RDONLY)
            make_cold(fd)
            os.close(fd)

    def expected(self, mode: Mode, layout: ChunkLayout) -> bytes:
        if mode is Mode.CHUNK_MAJOR:
            return b"".join(self.data)
        size = layout.per_layer_chunk_bytes
        return b"".join(
            data[layer * size : (layer + 1) * size] for layer in range(layout.num_layers) for data in self.data
        )


@pytest.mark.slow
@settings(max_examples=80)
@given(
    layout=LAYOUTS,
    count=st.integers(1, 6),
    cuts=st.lists(st.one_of(st.integers(0, 1 << 20), st.integers(1, 12).map(lambda n: n * BLOCK_BYTES)), max_size=3),
    resident=st.sets(st.integers(0, 5)),
    aggregation_bytes=st.sampled_from([4_096, 50_000, 300_000]),
    mode=st.sampled_from(Mode),
    past_cache=st.booleans(),
    direct_threads=st.integers(0, 1),
)
def test_gathered_payloads_are_the_chunks_whatever_lies_where(
    tmp_path_factory: pytest.TempPathFactory,
    layout: ChunkLayout,
    count: int,
    cuts: list[int],
    resident: set[int],
    aggregation_bytes: int,
    mode: Mode,
    past_cache: bool,
    direct_threads: int,
) -> None:
    """Any cut into extents, any of them in memory, any payload size, through the page cache or past it; and no byte
    beside the payload is touched.
    """
    chunks = Chunks(tmp_path_factory.mktemp("gather"), layout, count, cuts, resident, direct_threads=direct_threads)
    if direct_threads:
        chunks.make_cold()
    table = chunks.table()
    target = np.full(layout.delivery_bytes(count) + 200, 0xAA, dtype=np.uint8)
    for payload in plan_delivery(mode, layout, count, aggregation_bytes).payloads():
        rows = table.rows(payload)
        assert int(rows[:, Row.NBYTES].sum()) == payload.nbytes
        address = int(target.ctypes.data) + 100 + payload.target_offset
        gather(chunks.source, table, payload, rows, address, past_cache=past_cache)
        if table.is_resident:
            spans = spans_of(rows)
            assert int(spans[:, 1].sum()) == payload.nbytes
    chunks.files.close()
    assert target[100:-100].tobytes() == chunks.expected(mode, layout)
    assert (target[:100] == 0xAA).all()
    assert (target[-100:] == 0xAA).all()


def test_whole_neighbours_are_one_read_and_others_are_not(tmp_path: Path) -> None:
    """Chunk-major, chunks one after the other in a segment: one row. A hole, a cut, an odd length or another file parts
    them.
    """
    nbytes = 2 * BLOCK_BYTES
    words = checksums_of(bytes(nbytes))

    def rows_of(extents: list[Extent]) -> list[int]:
        layout = ChunkLayout(1, 16, extents[0].nbytes)
        table = make_table([[extent] for extent in extents])
        payload = next(plan_delivery(Mode.CHUNK_MAJOR, layout, len(extents), 1 << 20).payloads())
        return [int(n) for n in table.rows(payload)[:, Row.NBYTES]]

    neighbours = [Extent("f", index * nbytes, nbytes, words) for index in range(4)]
    assert rows_of(neighbours) == [4 * nbytes]
    assert rows_of([neighbours[0], neighbours[1], neighbours[3]]) == [2 * nbytes, nbytes]
    assert rows_of([neighbours[1], neighbours[0]]) == [nbytes, nbytes]
    assert rows_of([neighbours[0], Extent("g", nbytes, nbytes, words)]) == [nbytes, nbytes]
    odd = checksums_of(bytes(5_000))
    assert rows_of([Extent("f", 0, 5_000, odd), Extent("f", 5_000, 5_000, odd)]) == [5_000, 5_000]


def test_a_row_cut_off_beside_joined_ones_keeps_its_extent(tmp_path: Path) -> None:
    """Three extents of a chunk: two whole neighbours, and the start of a third, which ends within a block."""
    layout = ChunkLayout(2, 16, 2 * BLOCK_BYTES + 5_001)
    chunks = Chunks(tmp_path, layout, 1, [BLOCK_BYTES, 2 * BLOCK_BYTES], set())
    table = chunks.table()
    target = np.zeros(layout.delivery_bytes(1), dtype=np.uint8)
    for payload in plan_delivery(Mode.LAYER_MAJOR, layout, 1, 1 << 20).payloads():
        rows = table.rows(payload)
        gather(chunks.source, table, payload, rows, int(target.ctypes.data) + payload.target_offset, past_cache=False)
    chunks.files.close()
    assert target.tobytes() == chunks.data[0]


def test_joining_leaves_rows_of_slices_alone() -> None:
    rows = np.arange(14, dtype=np.int64).reshape(2, 7)
    assert joined(rows) is rows


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Chunks]:
    made = Chunks(tmp_path, ChunkLayout(4, 16, 40_000), 4, [], set())
    yield made
    made.files.close()


def failing(chunks: Chunks) -> ChunkUnavailable:
    layout = ChunkLayout(4, 16, 40_000)
    table = chunks.table()
    target = np.zeros(layout.delivery_bytes(4), dtype=np.uint8)

    def gather_all() -> None:
        for payload in plan_delivery(Mode.LAYER_MAJOR, layout, 4, 1 << 20).payloads():
            address = int(target.ctypes.data) + payload.target_offset
            gather(chunks.source, table, payload, table.rows(payload), address, past_cache=True)

    with pytest.raises(ChunkUnavailable) as failed:
        gather_all()
    assert failed.value.code is ErrorCode.CHUNK_CORRUPT
    return failed.value


def test_a_flipped_bit_names_its_chunk_and_layer(two: Chunks, tmp_path: Path) -> None:
    """Layer 2 of chunk 2, in a block no earlier layer touches."""
    extent = two.chunks[2][0]
    path = extent_place(tmp_path, extent.file_id).path
    data = bytearray(path.read_bytes())
    data[extent.offset + 100_000] ^= 4
    path.write_bytes(data)
    failed = failing(two)
    assert (failed.index, failed.layer, failed.field) == (2, 2, "chunk_keys[2]")


def test_a_joined_read_still_names_the_chunk_that_is_bad(tmp_path: Path) -> None:
    layout = ChunkLayout(1, 16, 2 * BLOCK_BYTES)
    chunks = Chunks(tmp_path, layout, 6, [], set())
    extent = chunks.chunks[5][0]
    path = extent_place(tmp_path, extent.file_id).path
    data = bytearray(path.read_bytes())
    data[extent.offset + BLOCK_BYTES + 7] ^= 1
    path.write_bytes(data)
    table = chunks.table()
    target = np.zeros(layout.delivery_bytes(6), dtype=np.uint8)
    payload = next(plan_delivery(Mode.CHUNK_MAJOR, layout, 6, 1 << 20).payloads())
    rows = table.rows(payload)
    assert len(rows) < 6
    with pytest.raises(ChunkUnavailable) as failed:
        gather(chunks.source, table, payload, rows, int(target.ctypes.data), past_cache=False)
    assert failed.value.index == 5
    chunks.files.close()


def test_a_short_file_and_a_missing_one_name_their_chunks(two: Chunks, tmp_path: Path) -> None:
    first, second = two.chunks[0][0], two.chunks[1][0]
    os.truncate(extent_place(tmp_path, second.file_id).path, 5_000)
    assert failing(two).index == 1
    extent_place(tmp_path, first.file_id).path.unlink()
    two.files.close()
    assert failing(two).index == 0


@given(data=st.binary(max_size=100_000), split=st.integers(0, 100_000))
def test_the_crc_is_castagnoli_and_continues(data: bytes, split: int) -> None:
    expected = checksums.crc32c(data)
    assert native.crc32c(data) == expected
    assert native.crc32c(data[split:], native.crc32c(data[:split])) == expected


def test_the_crc_has_the_published_values() -> None:
    """RFC 3720, appendix B.4."""
    assert native.crc32c(bytes(32)) == 0x8A9136AA
    assert native.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert native.crc32c(bytes(range(32))) == 0x46DD794E
    assert native.crc32c(b"123456789") == 0xE3069283


@settings(max_examples=60)
@given(nbytes=st.integers(1, 12 * BLOCK_BYTES), bad=st.integers(0, 12 * BLOCK_BYTES), first=st.integers(0, 3))
def test_the_first_bad_block_is_found_wherever_it_is(nbytes: int, bad: int, first: int) -> None:
    data = bytearray(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes())
    words = bytes(4 * first) + checksums_of(data)
    assert native.first_bad_block(data, words, first) is None
    data[bad % nbytes] ^= 0x80
    assert native.first_bad_block(data, words, first) == first + bad % nbytes // BLOCK_BYTES
    assert native.first_bad_block(data, words[:-4], first) is not None, "a block without a checksum is not proved"


@settings(max_examples=60)
@given(nbytes=st.integers(1, 12 * BLOCK_BYTES), cuts=st.lists(st.integers(0, 12 * BLOCK_BYTES), max_size=5))
def test_checksums_of_blocks_do_not_depend_on_how_the_bytes_come(nbytes: int, cuts: list[int]) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    starts = range(0, nbytes, BLOCK_BYTES)
    wanted = b"".join(crc32c(data[start : start + BLOCK_BYTES]).to_bytes(4, "little") for start in starts)
    assert native.block_words(data) == wanted
    blocks, ends = BlockChecksums(), sorted({*(min(cut, nbytes) for cut in cuts), nbytes})
    for start, end in zip([0, *ends], ends, strict=False):
        blocks.update(data[start:end])
        assert blocks.packed() == native.block_words(data[:end])


def test_spans_are_sent_in_order_and_go_on_where_they_stopped() -> None:
    """A connection that is full takes what it can; the rest is sent from there."""
    rng = np.random.default_rng(3)
    pieces = [rng.integers(0, 256, n, dtype=np.uint8) for n in (1, 70_000, 3_000_000, 5, 0, 900_000)]
    spans = np.array([[piece.ctypes.data, piece.nbytes] for piece in pieces], dtype=np.int64)
    ours, theirs = socket.socketpair()
    received = bytearray()

    def read() -> None:
        while data := theirs.recv(50_000):
            received.extend(data)

    reader = threading.Thread(target=read)
    sent = native.send_spans(ours.fileno(), spans, 0, 0)
    assert 0 < sent < int(spans[:, 1].sum())
    reader.start()
    while sent < int(spans[:, 1].sum()):
        sent += native.send_spans(ours.fileno(), spans, sent, 5)
    ours.close()
    reader.join()
    theirs.close()
    assert bytes(received) == b"".join(piece.tobytes() for piece in pieces)


def test_sending_to_nobody_is_an_error_and_no_signal() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    data = np.ones(1_000_000, dtype=np.uint8)
    with pytest.raises(OSError, match="Broken pipe"):
        native.send_spans(ours.fileno(), np.array([[data.ctypes.data, data.nbytes]]), 0, 0)
    ours.close()


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("aggregation_bytes", [4096, 5000, 20_000, 100_000, 1 << 20])
def test_the_sizes_of_a_groups_payloads_are_known_without_making_them(mode: Mode, aggregation_bytes: int) -> None:
    """The scheduler counts with them before the first is gathered, however many there are."""
    plan = plan_delivery(mode, ChunkLayout(3, 16, 20_000), 7, aggregation_bytes)
    groups = plan.group_sizes
    expected = [payload.nbytes for payload in plan.payloads()]
    found = [group.payloads[index] for group in groups for index in range(len(group.payloads))]
    assert found == expected
    assert sum(group.nbytes for group in groups) == sum(expected) == plan.delivery_bytes
    assert groups[-1].payloads[len(groups[-1].payloads) - 1] == expected[-1]


@pytest.fixture
def folded() -> np.ndarray:
    """A megabyte of addresses over one block of memory: what is written to one block appears in all."""
    fd = os.memfd_create("folded")
    os.ftruncate(fd, BLOCK_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    whole = mmap.mmap(-1, 64 * BLOCK_BYTES)
    array = np.frombuffer(whole, dtype=np.uint8)
    for index in range(64):
        address = array.ctypes.data + index * BLOCK_BYTES
        assert libc.mmap(address, BLOCK_BYTES, 3, mmap.MAP_SHARED | 0x10, fd, 0) == address
    os.close(fd)
    return array


@pytest.mark.parametrize("direct_files", [0, 1])
def test_what_happens_to_the_target_is_no_verdict_on_the_store(
    tmp_path: Path, folded: np.ndarray, direct_files: int
) -> None:
    """The target may be a client's memory, which the client writes too. Here every block overwrites the one before, so
    none is what was read when it is proved; the store is sound all the same.
    """
    data = os.urandom(40 * BLOCK_BYTES + 100)
    file = tmp_path / "extent"
    file.write_bytes(data)
    fd = os.open(file, os.O_RDONLY)
    row = np.array([[fd, 0, 0, len(data), len(data), 0, 0, 0]], dtype=np.int64)
    assert native.gather(row, checksums_of(data), int(folded.ctypes.data), False, direct_files) == ()
    damaged = bytearray(data)
    damaged[25 * BLOCK_BYTES + 3] ^= 1
    file.write_bytes(damaged)
    failed = native.gather(row, checksums_of(data), int(folded.ctypes.data), False, direct_files)
    assert failed[1:3] == (25 * BLOCK_BYTES, 1)
    os.close(fd)


@pytest.mark.parametrize("direct_files", [0, 1])
@pytest.mark.parametrize("from_file", [True, False])
def test_a_page_that_is_gone_ends_the_gather_and_is_not_made_again(
    tmp_path: Path, from_file: bool, direct_files: int
) -> None:
    """Guarded memory of a client: a hole in it is an error, and takes no page of ours."""
    guard, size = native.open_guard(), 64 * BLOCK_BYTES
    fd = os.memfd_create("client", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    with mmap.mmap(fd, size) as mapping:
        address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        native.guard_missing(guard, address, size)
        data = os.urandom(size)
        file = tmp_path / "extent"
        file.write_bytes(data)
        source = os.open(file, os.O_RDONLY)
        kept = np.frombuffer(data, dtype=np.uint8)
        row = np.array([[source, 0, 0, size, size, 0, 0, 0]], dtype=np.int64)
        if not from_file:
            row[0, :2] = -1, int(kept.ctypes.data)
        for past_cache in (True, False):
            make_cold(source)
            assert native.gather(row, checksums_of(data), address, past_cache, direct_files) == ()
            assert mapping[:] == data
        punch(fd, 40 * BLOCK_BYTES, 8192)
        left = os.fstat(fd).st_blocks
        for past_cache in (True, False):
            make_cold(source)
            assert native.gather(row, checksums_of(data), address, past_cache, direct_files)[2:] == (3, errno.EFAULT)
        assert os.fstat(fd).st_blocks == left
        os.close(source)
    os.close(fd)
    os.close(guard)
