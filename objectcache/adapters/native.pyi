"""The loops over slices and blocks, in C (native.c). Arrays are C-contiguous; words are little-endian CRC-32C, one for
each block of 16 KiB.
"""

import numpy as np
import numpy.typing as npt
from _typeshed import ReadableBuffer, WriteableBuffer

_Array = npt.NDArray[np.int64]

def gather(
    rows: _Array, words: ReadableBuffer, address: int, past_cache: bool, direct_files_max: int, /
) -> tuple[int, int, int, int] | tuple[()]:
    """Carry out rows of storage_server.planning.rows (int64, eight columns) into memory from `address` on.

    Empty when all is there and proved; otherwise which row failed, how many bytes
    into it, how (storage_server.gather.read.Outcome), and errno.
    `past_cache`: copies from memory go around the processor's cache. With `direct_files_max`, rows that the page cache
    does not have are read past it, where the kernel has io_uring and the row lies at multiples of 4 KiB; up to so many
    files are opened once more for that until the call ends. The landing of a row becomes 0 unless the row's bytes lie
    there, proved.
    """

def send_spans(fd: int, spans: _Array, start: int, patience_ms: int, /) -> int:
    """Send memory, int64 rows of (address, nbytes), from byte `start` of all of it on, until all is sent or
    `patience_ms` have been spent waiting for a full connection: how many bytes it took. Raises OSError.
    """

def scatter(target: WriteableBuffer, spans: _Array, start: int, data: ReadableBuffer, /) -> None:
    """Copy `data` into spans of `target`, int64 rows of (offset, nbytes), from byte `start` of all of them on. Raises
    ValueError for spans outside of the target, or with too little room; some bytes may have been copied then.
    """

def first_bad_block(data: ReadableBuffer, words: ReadableBuffer, first: int, /) -> int | None:
    """The index of the first block of `data`, which starts at block `first`, whose checksum is not in `words`."""

def block_words(data: ReadableBuffer, /) -> bytes:
    """The packed checksums of the blocks of `data`, whose last block may be shorter."""

def crc32c(data: ReadableBuffer, crc: int = 0, /) -> int:
    """CRC-32C of `data`, or of what had `crc` with `data` after it."""

def open_guard() -> int:
    """A userfaultfd for `guard_missing`; from now on a `gather` that meets a missing page of guarded memory fails with
    EFAULT. Raises OSError where the kernel has none or a container forbids it.
    """

def guard_missing(fd: int, address: int, nbytes: int, /) -> None:
    """Make touching a missing page of a shared mapping a fault that fails instead of a new page, until it is unmapped.
    Raises OSError.
    """

def kivi_decode(
    payload: ReadableBuffer,
    tokens: int,
    width: int,
    key_step: int,
    value_span: int,
    key_bits: int,
    value_bits: int,
    element: int,
    out: WriteableBuffer,
    /,
) -> None:
    """Decode the payload of kv_codecs.kivi into a layer. `key_step` tokens share the scales of their keys' channels,
    and `value_span` channels those of a token's values; `element` is an Element's value. Raises ValueError for sizes
    that do not fit each other.
    """

def kivi_encode(
    layer: ReadableBuffer,
    tokens: int,
    width: int,
    key_step: int,
    value_span: int,
    key_bits: int,
    value_bits: int,
    element: int,
    out: WriteableBuffer,
    /,
) -> None:
    """The inverse of `kivi_decode`: the payload of a layer, the same bytes that kv_codecs.kivi makes. Raises ValueError
    for sizes that do not fit each other.
    """

def squares(exact: ReadableBuffer, decoded: ReadableBuffer, element: int, /) -> tuple[float, float]:
    """The sums of the squares of the exact elements, and of the decoded ones less them. Raises ValueError for sizes
    that differ.
    """

def kivi_decode_many(
    source: ReadableBuffer,
    head: bytes,
    places: ReadableBuffer,
    tokens: int,
    width: int,
    key_step: int,
    value_span: int,
    key_bits: int,
    value_bits: int,
    element: int,
    is_in_place: bool,
    out: WriteableBuffer,
    /,
) -> int:
    """Decode encoded layers (kv_codecs.encoding), all of which begin with `head` and a checksum. A row of `places`,
    int64 of shape (n, 2), has the offset of a layer in `source`, and that of its exact bytes in `out`. With
    `is_in_place` both are one memory. Returns the row of the first layer with another head, or with bytes that its
    checksum does not fit, or -1. Raises ValueError for a place outside of its memory.
    """
