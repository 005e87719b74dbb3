"""Carrying out a payload of the plan: read its pieces from pinned extents into one slot. Runs in a worker thread."""

from __future__ import annotations

from collections.abc import Sequence

from descriptors.errors import ChunkUnavailable, ErrorCode
from storage_server.gather.plan import Payload
from storage_server.store.disk import disk_error
from storage_server.store.extents import CorruptExtentError, Extent, ExtentFiles, read_object


def gather(files: ExtentFiles, chunks: Sequence[Sequence[Extent]], payload: Payload, view: memoryview) -> None:
    """Fill the first `payload.nbytes` of `view` from the chunks' extents; every byte has passed its checksum.

    Raises ChunkUnavailable(ChunkCorrupt) with the chunk's index where that is not so, ServerError(SlowDown) when too
    many files are open.
    """
    piece_bytes = payload.piece_bytes
    at = 0
    for index in range(payload.first_chunk, payload.first_chunk + payload.chunk_count):
        try:
            read_object(files.read_into, chunks[index], payload.source_offset, view[at : at + piece_bytes])
        except OSError as error:
            raise disk_error(error, "reading a chunk") from error
        except CorruptExtentError as error:
            raise ChunkUnavailable(
                ErrorCode.CHUNK_CORRUPT,
                f"chunk_keys[{index}] is stored, but its bytes are not what was put",
                field=f"chunk_keys[{index}]",
                index=index,
                layer=payload.group_index,
            ) from error
        at += piece_bytes
