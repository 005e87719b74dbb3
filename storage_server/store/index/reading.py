"""Decisions about a read: conditions are checked first, then the part or range is resolved. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.objects import ByteRange, RangeSpec
from storage_server.planning.extent import Extent


def resolve_range(spec: RangeSpec | None, nbytes: int) -> ByteRange:
    """The bytes that a Range header asks for (RFC 9110, 14.1.2). Raises CallerError(InvalidRange)."""
    if spec is None:
        return ByteRange(0, nbytes)
    if spec.suffix is not None:
        length = min(spec.suffix, nbytes)
        if length == 0:
            raise _unsatisfiable(nbytes)
        return ByteRange(nbytes - length, length)
    first = spec.first or 0
    if first >= nbytes:
        raise _unsatisfiable(nbytes)
    last = nbytes - 1 if spec.last is None else min(spec.last, nbytes - 1)
    return ByteRange(first, last - first + 1)


def usable_prefix(found: Sequence[list[Extent] | None], chunk_bytes: int, *, prefix_only: bool) -> list[list[Extent]]:
    """The leading chunks that exist and have the right size. Without `prefix_only` every chunk must be there.

    Raises ChunkUnavailable (NoSuchChunk, ChunkSizeMismatch) with the index of the first chunk that is absent or does
    not have `chunk_bytes`. With `prefix_only` it is raised for chunk 0 alone, and otherwise the list ends before that
    chunk.
    """
    usable: list[list[Extent]] = []
    for index, chunk in enumerate(found):
        nbytes = sum(extent.nbytes for extent in chunk) if chunk is not None else None
        if chunk is not None and nbytes == chunk_bytes:
            usable.append(chunk)
            continue
        if prefix_only and index > 0:
            break
        field = f"chunk_keys[{index}]"
        if nbytes is None:
            raise ChunkUnavailable(ErrorCode.NO_SUCH_CHUNK, f"{field} is not stored", field=field, index=index)
        raise ChunkUnavailable(
            ErrorCode.CHUNK_SIZE_MISMATCH,
            f"{field} has {nbytes} bytes, the descriptor says {chunk_bytes} (L*S)",
            field=field,
            index=index,
        )
    return usable


def _unsatisfiable(nbytes: int) -> CallerError:
    return CallerError(ErrorCode.INVALID_RANGE, f"the object has {nbytes} bytes", field="range")
