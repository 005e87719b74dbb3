"""Carrying out a payload of the plan: read its rows from pinned files, or copy them from memory. Runs in a worker
thread, without the interpreter.
"""

from __future__ import annotations

import errno
import os
from enum import IntEnum

import numpy as np

from adapters import native
from descriptors.errors import ChunkUnavailable, ErrorCode, ServerError
from storage_server.gather.plan import Payload
from storage_server.gather.rows import RESIDENT, Row, Rows, SourceTable
from storage_server.store.disk import disk_error
from storage_server.store.extents import ExtentFiles, MissingFileError


class Outcome(IntEnum):
    """Why a row failed, as adapters/native.c numbers it."""

    CORRUPT = 1
    SHORT = 2
    FAILED = 3


def gather(
    files: ExtentFiles, table: SourceTable, payload: Payload, rows: Rows, address: int, *, past_cache: bool
) -> None:
    """Put the payload's bytes to `address`; every one has passed its checksum. `past_cache` for bytes nobody here will
    read.

    Raises ChunkUnavailable(ChunkCorrupt) with the chunk's index where that is not so; ServerError: SlowDown when too
    many files are open, TargetUnreachable when there is no memory at `address` any more.
    """
    if table.is_resident:
        _check(native.gather(rows, table.words, address, past_cache), table, payload, rows)
        return
    numbers = np.unique(rows[:, Row.SOURCE])
    numbers = numbers[numbers != RESIDENT]
    try:
        with files.lent([table.files[number] for number in numbers]) as descriptors:
            failure = native.gather(_opened(rows, numbers, descriptors), table.words, address, past_cache)
    except OSError as error:
        raise disk_error(error, "reading a chunk") from error
    except MissingFileError as error:
        index = int(np.argmax(rows[:, Row.SOURCE] == table.files.index(error.file_id)))
        raise _corrupt(payload, table.chunk_of(payload, int(rows[index, Row.TARGET]))) from error
    _check(failure, table, payload, rows)


def _check(failure: tuple[int, int, int, int] | tuple[()], table: SourceTable, payload: Payload, rows: Rows) -> None:
    """Raises what a failure of the native gather means."""
    if not failure:
        return
    index, failed_at, outcome, error_number = failure
    if outcome == Outcome.FAILED and error_number == errno.EFAULT:
        raise ServerError(ErrorCode.TARGET_UNREACHABLE, "the client's memory cannot be written", field="rdma_target")
    if outcome == Outcome.FAILED and error_number in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        raise disk_error(OSError(error_number, os.strerror(error_number)), "reading a chunk")
    raise _corrupt(payload, table.chunk_of(payload, int(rows[index, Row.TARGET]) + failed_at))


def _opened(rows: Rows, numbers: Rows, descriptors: list[int]) -> Rows:
    """The rows with descriptors for the files' numbers."""
    if not len(numbers):
        return rows
    opened = rows.copy()
    by_number = np.full(int(numbers[-1]) + 2, RESIDENT, dtype=np.int64)  # the last is for RESIDENT itself
    by_number[numbers] = descriptors
    opened[:, Row.SOURCE] = by_number[rows[:, Row.SOURCE]]
    return opened


def _corrupt(payload: Payload, chunk_index: int) -> ChunkUnavailable:
    field = f"chunk_keys[{chunk_index}]"
    problem = f"{field} is stored, but its bytes are not what was put"
    return ChunkUnavailable(ErrorCode.CHUNK_CORRUPT, problem, field=field, index=chunk_index, layer=payload.group_index)
