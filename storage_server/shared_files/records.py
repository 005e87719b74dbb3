"""The contents of a shared directory's journals: records, and the frames that hold them. Pure.

A record says what one thing shows from a stamp on: a bucket, an object, an upload or a part. Among the records of a
thing the newest one holds, whichever journal it is in, so that the order in which journals are read does not matter. A
frame has the records of one transaction:

    bytes of the payload (u32) | CRC-32C of the payload (u32) | payload: JSON, one list of records

All numbers are little-endian. A frame that is cut off, or whose checksum is wrong, ends what can be read of a journal.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from awscrt.checksums import crc32c

from descriptors.units import MIB
from storage_server.store.rows import Touched, TouchedKind, rules_of, stored_object, stored_upload

FRAME_BYTES_MAX = 256 * MIB
STAMP_MAX = 1 << 62
WRITER = re.compile(r"[0-9a-f]{12}\Z")
FILE_ID = re.compile(r"[0-9a-f]{32}\Z")
_HEAD = struct.Struct("<II")
_KINDS = frozenset(get_args(TouchedKind))
_Type = type | tuple[type, ...]
_ROW_TYPES: dict[TouchedKind, tuple[_Type, ...]] = {
    "bucket": (str, (int, float), str),
    "object": (int, str, (int, float), str),
    "upload": (str, str, str, (int, float), str),
    "part": (),
}


class BadRecordError(ValueError):
    """A record makes no sense; the message says why."""


@dataclass(frozen=True, slots=True)
class BodyRow:
    """The row of one body: its location in a file, and the packed checksums of its blocks. An empty body has the file
    "".
    """

    part_number: int
    object_offset: int
    nbytes: int
    file_id: str
    file_offset: int
    etag: str
    modified_at: float
    checksum: str | None
    blocks: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """The state of `about` from `stamp` on; `row` None says that it is gone.

    The rows are: of a bucket owner, creation time and lifecycle rules; of an object bytes, ETag, modification time and
    attributes, with its bodies; of an upload bucket, key, owner, time of its begin and attributes; of a part nothing,
    with one body. They have the forms of the index's columns.
    """

    about: Touched
    stamp: int
    row: tuple[Any, ...] | None
    bodies: tuple[BodyRow, ...] = ()


def encode(records: Sequence[Record]) -> bytes:
    """One frame. Raises BadRecordError for more than FRAME_BYTES_MAX."""
    payload = json.dumps([_fields(record) for record in records], separators=(",", ":")).encode()
    if len(payload) > FRAME_BYTES_MAX:
        raise BadRecordError(f"a change of {len(payload)} bytes; {FRAME_BYTES_MAX} may be written at once")
    return _HEAD.pack(len(payload), crc32c(payload)) + payload


def decode(data: bytes) -> tuple[list[tuple[int, list[Record]]], str | None]:
    """The whole frames at the front of `data`, each with the offset behind it; and why the next one cannot be used,
    None where it is only cut off.
    """
    frames: list[tuple[int, list[Record]]] = []
    at = 0
    while len(data) - at >= _HEAD.size:
        nbytes, checksum = _HEAD.unpack_from(data, at)
        if nbytes > FRAME_BYTES_MAX:
            return frames, f"a frame of {nbytes} bytes"
        end = at + _HEAD.size + nbytes
        if not nbytes and any(data[at:]):
            return frames, "zeros where a frame should be"
        if not nbytes or end > len(data):
            break
        payload = data[at + _HEAD.size : end]
        if crc32c(payload) != checksum:
            return frames, "a frame whose checksum is wrong"
        try:
            frames.append((end, _records(payload)))
        except BadRecordError as error:
            return frames, str(error)
        at = end
    return frames, None


def wanted_bytes(data: bytes, at: int) -> int:
    """How many bytes the frame at `at` needs; those of a head where not even that is there."""
    if len(data) - at < _HEAD.size:
        return _HEAD.size
    return _HEAD.size + int(_HEAD.unpack_from(data, at)[0])


def writer_of(file_id: str) -> str:
    """The writer that made a file."""
    return file_id[:12]


def file_ids(records: Iterable[Record]) -> set[str]:
    """The files that the records name."""
    return {body.file_id for record in records for body in record.bodies if body.file_id}


def _fields(record: Record) -> list[Any]:
    head = [*record.about, record.stamp]
    if record.row is None:
        return head
    return [*head, list(record.row), [_body_fields(body) for body in record.bodies]]


def _body_fields(body: BodyRow) -> list[Any]:
    blocks = base64.b64encode(body.blocks).decode()
    head = [body.part_number, body.object_offset, body.nbytes, body.file_id, body.file_offset]
    return [*head, body.etag, body.modified_at, body.checksum, blocks]


def _records(payload: bytes) -> list[Record]:
    try:
        found = json.loads(payload)
    except ValueError as error:
        raise BadRecordError("a frame that is no JSON") from error
    if not isinstance(found, list):
        raise BadRecordError("a frame that is no list")
    return [_record(fields) for fields in found]


def _record(fields: Any) -> Record:
    if not isinstance(fields, list) or len(fields) not in (4, 6):
        raise BadRecordError("a record without its fields")
    kind, name, key, stamp = fields[:4]
    if not isinstance(kind, str) or kind not in _KINDS or not _is(name, str) or not _is(key, str):
        raise BadRecordError(f"a record about {kind!r}")
    if type(stamp) is not int or not 0 <= stamp <= STAMP_MAX:
        raise BadRecordError(f"the stamp {stamp!r}")
    about = Touched(cast(TouchedKind, kind), name, key)
    if len(fields) == 4:
        return Record(about, stamp, None)
    row, bodies = fields[4:]
    types = _ROW_TYPES[about.kind]
    if not isinstance(row, list) or not isinstance(bodies, list) or len(row) != len(types):
        raise BadRecordError(f"a row of another form for {kind}")
    if not all(_is(value, wanted) for value, wanted in zip(row, types, strict=True)):
        raise BadRecordError(f"a row of other types for {kind}")
    _require_readable(about, tuple(row))
    found = tuple(_body(body) for body in bodies)
    if about.kind in ("bucket", "upload") and found:
        raise BadRecordError(f"bodies of {kind}")
    if about.kind == "part" and [str(body.part_number) for body in found] != [about.key]:
        raise BadRecordError("a part without its body")
    return Record(about, stamp, tuple(row), found)


def _body(fields: Any) -> BodyRow:
    types: tuple[_Type, ...] = (int, int, int, str, int, str, (int, float), (str, type(None)), str)
    if not isinstance(fields, list) or len(fields) != len(types):
        raise BadRecordError("a body without its fields")
    if not all(_is(value, wanted) for value, wanted in zip(fields, types, strict=True)):
        raise BadRecordError("a body of other types")
    number, object_offset, nbytes, file_id, file_offset, etag, modified_at, checksum, blocks = fields
    if min(number, object_offset, nbytes, file_offset) < 0 or max(object_offset, nbytes, file_offset) > STAMP_MAX:
        raise BadRecordError("a body at no location")
    if file_id and not FILE_ID.match(file_id):
        raise BadRecordError(f"a file of the name {file_id[:64]!r}")
    try:
        words = base64.b64decode(blocks, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRecordError("checksums that are no base64") from error
    return BodyRow(number, object_offset, nbytes, file_id, file_offset, etag, float(modified_at), checksum, words)


def _is(value: Any, wanted: _Type) -> bool:
    """Whether the value is of this type, and one that an index can hold: truth values are no numbers, and neither is
    infinity.
    """
    if isinstance(value, str):
        return isinstance(value, wanted) and _is_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, wanted) and not isinstance(value, bool)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_readable(about: Touched, row: tuple[Any, ...]) -> None:
    """Raises BadRecordError for a row that the index could hold, and nobody could read."""
    try:
        if about.kind == "bucket":
            rules_of(row[2])
        elif about.kind == "object":
            stored_object((about.key, 0, *row))
        elif about.kind == "upload":
            stored_upload((about.name, row[1], 0, *row[2:]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRecordError(f"attributes of {about.kind} that cannot be read") from error
