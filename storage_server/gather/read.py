"""Carrying out a payload of the plan: read its pieces from pinned extents into one slot. Runs in a worker thread."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from descriptors.errors import ChunkUnavailable, ErrorCode
from storage_server.gather.plan import Payload
from storage_server.store.extents import Extent, ExtentFiles, disk_error


def gather(files: ExtentFiles, extents: Sequence[Extent], payload: Payload, view: memoryview) -> None:
    """Fill the first `payload.nbytes` of `view`.

    Raises ChunkUnavailable(ChunkCorrupt) with the chunk's index when its extent cannot be read in full.
    """
    piece_bytes = payload.piece_bytes
    at = 0
    for index in range(payload.first_chunk, payload.first_chunk + payload.chunk_count):
        extent = extents[index]
        try:
            files.read_into(extent.file_id, extent.offset + payload.source_offset, view[at : at + piece_bytes])
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise disk_error(error, "reading a chunk") from error
            raise ChunkUnavailable(
                ErrorCode.CHUNK_CORRUPT,
                f"chunk_keys[{index}] could not be read in full",
                field=f"chunk_keys[{index}]",
                index=index,
                layer=payload.group_index,
            ) from error
        at += piece_bytes
