"""Carrying out a payload of the plan, in a worker thread: read its rows, or copy them from memory."""

from __future__ import annotations

import errno

from descriptors.errors import ChunkUnavailable, ErrorCode, ServerError
from storage_server.planning.plan import Payload
from storage_server.planning.rows import Rows, SourceTable
from storage_server.planning.source import ChunkSource, RowOutcome


def gather(
    source: ChunkSource, table: SourceTable, payload: Payload, rows: Rows, address: int, *, past_cache: bool
) -> None:
    """Write the payload's bytes to `address`, every byte proved by its checksum. `past_cache` writes past the
    processor's caches, for bytes that no thread of this process will read.

    Raises ChunkUnavailable(ChunkCorrupt) with the chunk's index where a checksum fails; ServerError(SlowDown) when too
    many files are open; ServerError(TargetUnreachable) when the memory at `address` is gone.
    """
    failure = source.read_rows(table, rows, address, past_cache=past_cache)
    if failure is None:
        return
    if failure.outcome is RowOutcome.FAILED and failure.error_number == errno.EFAULT:
        raise ServerError(ErrorCode.TARGET_UNREACHABLE, "the client's memory cannot be written", field="rdma_target")
    raise _corrupt(payload, payload.chunk_at(table.target_of(rows, failure.row_index, failure.failed_at)))


def _corrupt(payload: Payload, chunk_index: int) -> ChunkUnavailable:
    field = f"chunk_keys[{chunk_index}]"
    problem = f"{field} is stored, but its bytes are damaged"
    return ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, problem, field=field, index=chunk_index, layer=payload.group.index)
