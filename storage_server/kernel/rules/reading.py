"""Decisions about a read: conditions are checked first, then the part or range is resolved. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.layer_forms import RUNS_MAX
from descriptors.objects import ByteRange, RangeSpec
from objectcache.kv_codecs.layer import Codec
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Takes, kept_form


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


def is_taken(chunk: Sequence[Extent], reader: Takes | None) -> bool:
    """Whether a stored chunk is exact, or encoded in a form that the reader takes."""
    if not chunk or not chunk[0].form:
        return True
    form = kept_form(chunk[0].form)
    return form is not None and reader is not None and reader.takes(form)


def usable_prefix(
    found: Sequence[list[Extent] | None], chunk_bytes: int, *, prefix_only: bool, reader: Takes | None = None
) -> list[list[Extent]]:
    """The leading chunks that exist and have the right size, or the size of their form, if they are encoded and the
    reader takes that. Without `prefix_only` every chunk must be there. An encoded chunk that begins a run which a
    delivery cannot tell any more counts as missing.

    Raises ChunkUnavailable (NoSuchChunk, ChunkSizeMismatch) with the index of the first chunk that is absent or does
    not have `chunk_bytes`. With `prefix_only` it is raised for chunk 0 alone, and otherwise the list ends before that
    chunk.
    """
    usable: list[list[Extent]] = []
    runs = _Runs()
    for index, chunk in enumerate(found):
        nbytes = sum(extent.nbytes for extent in chunk) if chunk is not None else None
        is_encoded = chunk is not None and len(chunk) > 0 and bool(chunk[0].form)
        if chunk is not None and (runs.takes(index, chunk, reader) if is_encoded else nbytes == chunk_bytes):
            usable.append(chunk)
            continue
        if prefix_only and index > 0:
            break
        field = f"chunk_keys[{index}]"
        if nbytes is None:
            raise ChunkUnavailable(
                ErrorCode.NO_SUCH_CHUNK, f"{field} is not stored as a chunk", field=field, index=index
            )
        if is_encoded:
            problem = f"{field} is stored encoded, in a form that the descriptor does not accept"
            raise ChunkUnavailable(ErrorCode.NO_SUCH_CHUNK, problem, field=field, index=index)
        raise ChunkUnavailable(
            ErrorCode.CHUNK_SIZE_MISMATCH,
            f"{field} has {nbytes} bytes, the descriptor says {chunk_bytes} (L*S)",
            field=field,
            index=index,
        )
    return usable


class _Runs:
    """The runs of forms among the chunks so far, of which a delivery can tell so many."""

    def __init__(self) -> None:
        self._codec: Codec | None = None
        self._last = -1
        """The index of the last encoded chunk. Those between it and the next one are a run of exact ones."""
        self._count = 0

    def takes(self, index: int, chunk: Sequence[Extent], reader: Takes | None) -> bool:
        """Whether the chunk at this index may be an encoded one. Exact ones may stand anywhere."""
        form = kept_form(chunk[0].form)
        if form is None or reader is None or not reader.takes(form):
            return False
        if len(chunk) > 1 or chunk[0].nbytes != form.nbytes:
            return False
        has_gap = index > self._last + 1
        self._count += has_gap + (has_gap or form.codec is not self._codec)
        self._codec, self._last = form.codec, index
        return self._count <= RUNS_MAX


def _unsatisfiable(nbytes: int) -> CallerError:
    return CallerError(ErrorCode.INVALID_RANGE, f"the object has {nbytes} bytes", field="range")
