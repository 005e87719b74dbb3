"""The contents of a shared directory's journals: records, and the frames that hold them. Pure.

A record says what one thing shows from a stamp on: a bucket, an object, an upload or a part. Among the records of a
thing the newest one holds, whichever journal it is in, so that the order in which journals are read does not matter. A
frame has the records of one transaction:

    bytes of the payload (u32) | CRC-32C of the payload (u32) | payload: JSON, one list of records

All numbers are little-endian. A frame that is cut off, or whose checksum is wrong, ends what can be read of a journal.
A record that makes no sense is passed over: whoever wrote it harms nothing else, and everybody passes over the same.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_args

from awscrt.checksums import crc32c

from descriptors.units import MIB
from storage_server.planning.block_checksums import BLOCK_BYTES, WORD_BYTES
from storage_server.store.rows import Touched, TouchedKind, rules_of, stored_object, stored_upload

FRAME_BYTES_MAX = 256 * MIB
FRAME_VALUES_MAX = 4_000_000
"""A small frame of many values would take far more memory than its bytes when it is parsed."""
STAMP_MAX = 253_402_300_799_000_000
"""The last second of the year 9999, in microseconds: nobody could give a later stamp behind one that has no end."""
SIZE_MAX = 1 << 62
TIME_S_MAX = 253_402_300_799.0
"""The last second of the year 9999: later times have no text."""
PART_NUMBER_MAX = 10_000
KEY_BYTES_MAX = 1024
TEXT_BYTES_MAX = 1 << 20
"""Of the attributes of an object, and of the lifecycle rules of a bucket."""
WRITERS = "writers"
"""The folder of a shared directory that has one folder for each writer."""
WRITER = re.compile(r"[0-9a-f]{12}\Z")
FILE_ID = re.compile(r"[0-9a-f]{32}\Z")
_NAME = re.compile(r"[!-~]{1,255}\Z")
"""The name of a bucket, or the id of an upload."""
_TAG = re.compile(r"[!#-~]{0,128}\Z")
"""An ETag or a checksum. It is sent as a header."""
_PART = re.compile(r"[1-9][0-9]{0,4}\Z")
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


@dataclass(slots=True)
class Decoded:
    """The whole frames at the front of some bytes, each as its records and the offset behind it. `problem` says why the
    next frame cannot be used, None where it is only cut off.
    """

    frames: list[tuple[int, list[Record]]] = field(default_factory=list)
    bad_count: int = 0
    """How many records were passed over; a frame that is no list counts as one."""
    first_bad: tuple[int, str] | None = None
    """The offset of the first frame with such a record, and why it was passed over."""
    problem: str | None = None

    def note_bad(self, at: int, reason: str) -> None:
        """Count a record that is passed over."""
        self.bad_count += 1
        self.first_bad = self.first_bad or (at, reason)


def encode(records: Sequence[Record]) -> bytes:
    """One frame. Raises BadRecordError for more than FRAME_BYTES_MAX or FRAME_VALUES_MAX."""
    payload = json.dumps([_fields(record) for record in records], separators=(",", ":")).encode()
    if len(payload) > FRAME_BYTES_MAX:
        raise BadRecordError(f"a change of {len(payload)} bytes; {FRAME_BYTES_MAX} may be written at once")
    _require_few(payload)
    return _HEAD.pack(len(payload), crc32c(payload)) + payload


def decode(data: bytes, stamp_max: int = STAMP_MAX) -> Decoded:
    """The frames of `data`. One with a record of a later stamp than `stamp_max` cannot be used yet: its time comes, or
    the reader's clock is behind.
    """
    found, at = Decoded(), 0
    while len(data) - at >= _HEAD.size:
        nbytes, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + nbytes
        if nbytes > FRAME_BYTES_MAX:
            found.problem = f"a frame of {nbytes} bytes"
        elif not nbytes and any(data[at:]):
            found.problem = "zeros where a frame should be"
        if found.problem or not nbytes or end > len(data):
            break
        payload = data[at + _HEAD.size : end]
        if crc32c(payload) != checksum:
            found.problem = "a frame whose checksum is wrong"
            break
        bad_before = found.bad_count, found.first_bad
        records = list(_records(payload, partial(found.note_bad, at)))
        late = max((record.stamp for record in records), default=0) - stamp_max
        if late > 0:
            found.bad_count, found.first_bad = bad_before
            found.problem = f"a stamp {late / 1e6:.0f} s later than any may be now"
            break
        found.frames.append((end, records))
        at = end
    return found


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


def _records(payload: bytes, note_bad: Callable[[str], None]) -> Iterator[Record]:
    try:
        _require_few(payload)
        found = json.loads(payload)
        if not isinstance(found, list):
            raise BadRecordError("a frame that is no list")
    except (ValueError, RecursionError) as error:
        note_bad(str(error) if isinstance(error, BadRecordError) else "a frame that is no JSON")
        return
    for fields in found:
        try:
            record = _record(fields)
        except BadRecordError as error:
            note_bad(str(error))
        else:
            yield record


def _require_few(payload: bytes) -> None:
    """Raises BadRecordError for more values than may be parsed at once."""
    count = payload.count(b",") + payload.count(b"[") + payload.count(b"{")
    if count > FRAME_VALUES_MAX:
        raise BadRecordError(f"a frame of {count} values; {FRAME_VALUES_MAX} may be written at once")


def _record(fields: Any) -> Record:
    if not isinstance(fields, list) or len(fields) not in (4, 6):
        raise BadRecordError("a record without its fields")
    kind, name, key, stamp = fields[:4]
    if not isinstance(kind, str) or kind not in _KINDS or not _is(name, str) or not _is(key, str):
        raise BadRecordError(f"a record about {str(kind)[:64]!r}")
    if not _is_number(stamp, 0, STAMP_MAX):
        raise BadRecordError("a stamp out of range")
    about = Touched(cast(TouchedKind, kind), name, key)
    _require_named(about)
    if len(fields) == 4:
        return Record(about, stamp, None)
    row, bodies = fields[4:]
    types = _ROW_TYPES[about.kind]
    if not isinstance(row, list) or not isinstance(bodies, list) or len(row) != len(types):
        raise BadRecordError(f"a row of another form for {kind}")
    if not all(_is(value, wanted) for value, wanted in zip(row, types, strict=True)):
        raise BadRecordError(f"a row of other types for {kind}")
    found = tuple(_body(body) for body in bodies)
    _require_readable(about, tuple(row), found)
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
    if not _is_number(number, 0, PART_NUMBER_MAX):
        raise BadRecordError("a body with another number than parts have")
    if not _is_tag(etag) or not _is_tag(checksum or "") or not _is_time(modified_at):
        raise BadRecordError("a body whose ETag, checksum or time cannot be sent")
    if not FILE_ID.match(file_id) if nbytes else file_id:
        raise BadRecordError(f"a body of {nbytes} bytes in a file of the name {file_id[:64]!r}")
    try:
        words = base64.b64decode(blocks, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRecordError("checksums that are no base64") from error
    if len(words) != WORD_BYTES * -(-nbytes // BLOCK_BYTES):
        raise BadRecordError(f"{len(words)} bytes of checksums for {nbytes} bytes")
    return BodyRow(number, object_offset, nbytes, file_id, file_offset, etag, float(modified_at), checksum, words)


def _is(value: Any, wanted: _Type) -> bool:
    """Whether the value is of this type, and one that an index can hold: truth values are no numbers, and neither is
    infinity.
    """
    if isinstance(value, str):
        return isinstance(value, wanted) and len(value) <= FRAME_BYTES_MAX and _is_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, int) and not 0 <= value <= SIZE_MAX:
        return False
    return isinstance(value, wanted) and not isinstance(value, bool)


def _is_number(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_time(value: float) -> bool:
    return 0 <= value <= TIME_S_MAX


def _is_tag(value: str) -> bool:
    return _TAG.match(value) is not None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_named(about: Touched) -> None:
    """Raises BadRecordError for a thing whose name nobody could have given."""
    is_right = _NAME.match(about.name) is not None
    if about.kind == "object":
        is_right &= 0 < len(about.key.encode()) <= KEY_BYTES_MAX and "\0" not in about.key
    elif about.kind == "part":
        is_right &= _PART.match(about.key) is not None and int(about.key) <= PART_NUMBER_MAX
    if not is_right:
        raise BadRecordError(f"no name of {about.kind}: {about.name[:64]!r}, {about.key[:64]!r}")


def _require_readable(about: Touched, row: tuple[Any, ...], bodies: tuple[BodyRow, ...]) -> None:
    """Raises BadRecordError for a row that the index could hold, and nobody could read."""
    if any(isinstance(value, str) and len(value) > TEXT_BYTES_MAX for value in row):
        raise BadRecordError(f"a text of more than {TEXT_BYTES_MAX} characters")
    try:
        if about.kind == "bucket":
            is_right = _is_time(row[1])
            rules_of(row[2])
        elif about.kind == "object":
            is_right = _is_tag(row[1]) and _is_time(row[2]) and _are_whole(row[0], bodies)
            stored_object((about.key, 0, *row))
        elif about.kind == "upload":
            is_right = _is_time(row[3])
            stored_upload((about.name, row[1], 0, *row[2:]))
        else:
            is_right = True
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecordError(f"attributes of {about.kind} that cannot be read") from error
    if not is_right:
        raise BadRecordError(f"a row of {about.kind} out of range")


def _are_whole(nbytes: int, bodies: Sequence[BodyRow]) -> bool:
    """Whether the bodies lie one behind the other, and are together the object."""
    offsets = itertools.accumulate((body.nbytes for body in bodies), initial=0)
    return [*offsets] == [*(body.object_offset for body in bodies), nbytes]
