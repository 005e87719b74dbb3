"""What a read asks for, decided: conditions first, then the part or range. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.objects import ByteRange, RangeSpec
from storage_server.store.extents import Extent


def resolve_range(spec: RangeSpec | None, nbytes: int) -> ByteRange:
    """A Range header against an object's size (RFC 9110, 14.1.2). Raises CallerError(InvalidRange)."""
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
    """The leading chunks that exist and have the right size; with `prefix_only` those before the first that does not.

    Raises ChunkUnavailable (NoSuchChunk, ChunkSizeMismatch) with the index of the first chunk that is absent or not
    `chunk_bytes` long; with `prefix_only` at index 0 alone.
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
