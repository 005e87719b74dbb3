"""The contents of a shared directory's journals: records, and the frames that hold them. Pure.

A record says what one thing shows from a stamp on: a bucket, an object, an upload or a part. Among the records of a
thing the newest one holds, whichever journal it is in, so that the order in which journals are read does not matter. A
frame has the records of one transaction, or some of them:

    bytes of the payload (u32) | CRC-32C of the payload (u32) | payload: JSON, one list of records

All numbers are little-endian. A frame that is cut off, or whose checksum is wrong, ends what can be read of a journal.
A record that makes no sense is passed over: whoever wrote it harms nothing else, and everybody passes over the same.
Writers make the readers' checks first, so that no change is acknowledged that others pass over.

JSON is parsed in pieces of PIECE_BYTES, since the parser lets no other thread run meanwhile. A frame of one piece is
carried out at once. Larger frames are cut between records, and larger records between bodies. Writers make larger
frames of larger records only; those of the releases before are larger with many records, too.
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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

from awscrt.checksums import crc32c

from descriptors.objects import PART_NUMBER_MAX
from descriptors.units import GIB, KIB, MIB
from storage_server.kernel.rules.plain_rows import (
    SIZE_MAX,
    TEXT_BYTES_MAX,
    are_plain,
    is_key,
    is_plain,
    is_tag,
    is_time,
)
from storage_server.kernel.rules.rows import Touched, TouchedKind, rules_of, stored_object, stored_upload
from storage_server.planning.block_checksums import BLOCK_BYTES, WORD_BYTES

RECORDS_READER = 1
"""Count it up where records make sense that did not before: journals that have such are then read again."""
PIECE_BYTES = 128 * KIB
COUNTED_AT_ONCE = MIB
"""So much is parsed at once."""
HEAD_BYTES_MAX = 256 * KIB
"""A record without its bodies has no more bytes. The lifecycle rules of a bucket may need more, see `fits`."""
BODY_BYTES_MAX = 16 * MIB
"""A body of 48 GiB."""
RECORD_BYTES_MAX = 64 * MIB
"""An object of about 190 GiB. A larger record is passed over, with what follows it in its frame."""
OBJECT_BYTES_MAX = 160 * GIB
"""A larger object is refused before it is written, since changes of others are in its transaction."""
FRAME_BYTES_MAX = 256 * MIB
STAMP_MAX = 253_402_300_799_000_000
"""The last second of the year 9999, in microseconds: nobody could give a later stamp behind one that has no end."""
TOO_LATE = "s later than any may be now"
"""So ends the problem of a journal that has such a stamp."""
BODIES_MAX = PART_NUMBER_MAX
RULE_VALUES_MAX = 10_000
"""Lists, and tables, in the JSON of a bucket's lifecycle rules: a thousand rules have fewer."""
BLOCKS_STEP = 4 * PIECE_BYTES
"""So many characters of base64 are decoded at once."""
WRITERS = "writers"
"""The folder of a shared directory that has one folder for each writer."""
WRITER = re.compile(r"[0-9a-f]{12}\Z")
FILE_ID = re.compile(r"[0-9a-f]{32}\Z")
_NAME = re.compile(r"[!-~]{1,255}\Z")
"""The name of a bucket, or the id of an upload."""
_PART = re.compile(r"[1-9][0-9]{0,4}\Z")
HEAD = struct.Struct("<II")
"""Before a payload: its bytes, and their checksum."""
_KINDS = frozenset(get_args(TouchedKind))
_BEHIND_RECORD = tuple(f'],["{kind}"'.encode() for kind in sorted(_KINDS))
"""The end of a record and the begin of the next one. Inside a string a quote has a backslash before it, and a quote
that ends a string has no letter behind it: so JSON has these bytes only between lists.
"""
_BEHIND_BODY = (b'"],[',)
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LARGE = re.compile(
    rb'\["(?:bucket|object|upload|part)",%b,%b,\d{1,19},\[(?:[^\[\]"]|%b)*+\],\[' % (_STRING, _STRING, _STRING)
)
"""The front of a large record, up to its bodies."""
_LARGE_BODY = re.compile(rb'\[[^\[\]"]{0,80}+%b,\d{1,19},%b,[^\[\]"]{1,40}+(?:%b,)?"' % (_STRING, _STRING, _STRING))
"""The front of a large body, up to its checksums. Its optional group is not possessive: where such a group fails
half-way, Python 3.11.2 does not go back to its begin.
"""
_Type = type | tuple[type, ...]
_BODY_TYPES: tuple[_Type, ...] = (int, int, int, str, int, str, (int, float), (str, type(None)))
"""The types of a body's fields before its checksums."""
NoteBad = Callable[..., None]
"""Called with the reason and, if they are more than one, the rows of a record that is passed over."""
_ROW_TYPES: dict[TouchedKind, tuple[_Type, ...]] = {
    "bucket": (str, (int, float), str),
    "object": (int, str, (int, float), str),
    "upload": (str, str, str, (int, float), str),
    "part": (),
}


NO_LIST = "a frame that is no list"
NO_JSON = "a frame that is no JSON"
WRONG_CHECKSUM = "a frame whose checksum is wrong"


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
class PassedOver:
    """Records that make no sense."""

    count: int = 0
    """How many; a frame that is no list counts as one."""
    row_count: int = 0
    """How many rows they would have needed: so much work it was to look at them."""
    first: tuple[int, str] | None = None
    """The offset of the first frame with such a record, and why it was passed over."""

    def note(self, at: int, reason: str, row_count: int = 1) -> None:
        """Count a record of the frame at this offset."""
        self.count += 1
        self.row_count += row_count
        self.first = self.first or (at, reason)


@dataclass(slots=True)
class Decoded:
    """The whole frames at the front of some bytes, each as its records and the offset behind it. `problem` says why the
    next frame cannot be used, None where it is only cut off.
    """

    frames: list[tuple[int, list[Record]]] = field(default_factory=list)
    passed_over: PassedOver = field(default_factory=lambda: PassedOver())
    problem: str | None = None


def encode(records: Sequence[Record]) -> bytes:
    """One frame. Raises BadRecordError for more than a frame can have, or a record that others would pass over."""
    return _framed([_text(record) for record in records])


def framed(records: Iterable[Record]) -> Iterator[bytes]:
    """Frames with these records, in their order: of one piece each, or of one record. Raises BadRecordError as
    `encode`.
    """
    texts, nbytes = list[bytes](), 0
    for record in records:
        text = _text(record)
        if texts and nbytes + len(text) + 2 > PIECE_BYTES:
            yield _framed(texts)
            texts, nbytes = [], 0
        texts.append(text)
        nbytes += len(text) + 1
    if texts:
        yield _framed(texts)


def fits(record: Record) -> bool:
    """Whether a record without bodies can be written."""
    try:
        _text(record)
    except BadRecordError:
        return False
    return True


def rows_of(records: Iterable[Record]) -> int:
    """How many rows the records need, one each and one for each body: that is the work to carry them out."""
    return sum(1 + len(record.bodies) for record in records)


def decode(data: bytes, stamp_max: int = STAMP_MAX, rows_max: int = SIZE_MAX) -> Decoded:
    """The frames of `data`, up to one that has the `rows_max`-th row, or is larger than a piece. A frame with a record
    of a later stamp than `stamp_max` cannot be used yet: its time comes, or the reader's clock is behind.
    """
    found, at, count = Decoded(), 0, 0
    while len(data) - at >= HEAD.size and count < rows_max:
        nbytes, checksum = HEAD.unpack_from(data, at)
        end = at + HEAD.size + nbytes
        if nbytes > FRAME_BYTES_MAX:
            found.problem = f"a frame of {nbytes} bytes"
        elif not nbytes and not are_zeros(data[at:]):
            found.problem = "zeros where a frame should be"
        if found.problem or not nbytes or end > len(data) or nbytes > PIECE_BYTES:
            break
        payload = data[at + HEAD.size : end]
        if crc32c(payload) != checksum:
            found.problem = WRONG_CHECKSUM
            break
        passed_before = replace(found.passed_over)
        records = list(_parsed(payload, partial(found.passed_over.note, at)))
        found.problem = lateness(records, stamp_max)
        if found.problem is not None:
            found.passed_over = passed_before
            break
        found.frames.append((end, records))
        count += rows_of(records) + found.passed_over.row_count - passed_before.row_count
        at = end
    return found


def lateness(records: Iterable[Record], stamp_max: int) -> str | None:
    """Why these records cannot be used yet; None where they can."""
    late = max((record.stamp for record in records), default=0) - stamp_max
    return f"a stamp {late / 1e6:.0f} {TOO_LATE}" if late > 0 else None


def whole_frames(data: bytes) -> int:
    """How many bytes the whole frames at the front of `data` take, whatever they say."""
    at = 0
    while len(data) - at >= HEAD.size:
        nbytes, checksum = HEAD.unpack_from(data, at)
        end = at + HEAD.size + nbytes
        if not 0 < nbytes <= FRAME_BYTES_MAX or end > len(data) or crc32c(data[at + HEAD.size : end]) != checksum:
            break
        at = end
    return at


def records_in(data: bytes, note_bad: NoteBad, rows_max: int = SIZE_MAX, *, is_end: bool) -> tuple[list[Record], int]:
    """Records from inside of a large frame, where `data` begins with one, and how many bytes of it they take. They have
    about `rows_max` rows at most. 0 bytes say that a record needs more data; `is_end` says that there is no more.
    """
    records, at, count = list[Record](), 0, 0

    def pass_over(reason: str, row_count: int = 1) -> None:
        nonlocal count
        count += row_count
        note_bad(reason, row_count)

    if is_end and data[-1:] != b"]":
        pass_over(NO_LIST)
        return records, len(data)
    while at < len(data) and count < rows_max:
        cut = _cut(data, at, len(data) - 1 if is_end else None, _BEHIND_RECORD)
        if cut is None:
            break
        if cut - at <= PIECE_BYTES:
            parsed = list(_parsed(b"[" + data[at:cut] + b"]", pass_over))
        else:
            parsed = list(_parsed_large(data, at, cut, pass_over))
        records += parsed
        count += rows_of(parsed)
        at = cut + 1
    return records, at


def are_zeros(data: bytes) -> bool:
    """Whether there is nothing but zeros."""
    return not data.lstrip(b"\0")


def wanted_bytes(data: bytes, at: int) -> int:
    """How many bytes the frame at `at` needs; those of a head where not even that is there."""
    if len(data) - at < HEAD.size:
        return HEAD.size
    return HEAD.size + int(HEAD.unpack_from(data, at)[0])


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
    return [*_body_head(body), base64.b64encode(body.blocks).decode()]


def _body_head(body: BodyRow) -> list[Any]:
    head = [body.part_number, body.object_offset, body.nbytes, body.file_id, body.file_offset]
    return [*head, body.etag, body.modified_at, body.checksum]


def _text(record: Record) -> bytes:
    """The JSON of a record, body for body, so that other threads run in between. Raises BadRecordError."""
    if len(record.bodies) > BODIES_MAX:
        raise BadRecordError(f"more than {BODIES_MAX} bodies")
    fields = _fields(record)
    head = _json(fields[:5])
    if len(head) > HEAD_BYTES_MAX:
        raise BadRecordError(f"a record of {len(head)} bytes beside its bodies; {HEAD_BYTES_MAX} may be written")
    if any(len(body.blocks) * 4 // 3 > BODY_BYTES_MAX - KIB for body in record.bodies):
        raise BadRecordError("a body whose checksums take too many bytes")
    bodies = tuple(_checked_body(_body_head(body), body.blocks) for body in record.bodies)
    if _checked(fields[:5], bodies) != record:
        raise BadRecordError("a record that readers would see as another")
    if record.row is None:
        return head
    text = head[:-1] + b",[" + b",".join(map(_json, fields[5])) + b"]]"
    if len(text) > RECORD_BYTES_MAX:
        raise BadRecordError(f"a record of {len(text)} bytes; {RECORD_BYTES_MAX} may be written")
    return text


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _framed(texts: Sequence[bytes]) -> bytes:
    payload = b"[" + b",".join(texts) + b"]"
    if len(payload) > FRAME_BYTES_MAX:
        raise BadRecordError(f"a change of {len(payload)} bytes; {FRAME_BYTES_MAX} may be written at once")
    return HEAD.pack(len(payload), crc32c(payload)) + payload


def _parsed(text: bytes, note_bad: NoteBad) -> Iterator[Record]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        note_bad(NO_JSON)
        return
    if not isinstance(found, list):
        note_bad(NO_LIST)
        return
    for fields in found:
        try:
            record = _record(fields)
        except BadRecordError as error:
            has_bodies = isinstance(fields, list) and len(fields) > 5 and isinstance(fields[5], list)
            note_bad(str(error), 1 + (len(fields[5]) if has_bodies else 0))
        else:
            yield record


def _parsed_large(data: bytes, at: int, end: int, note_bad: NoteBad) -> Iterator[Record]:
    try:
        yield _large_record(data, at, end)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, BadRecordError) else NO_JSON
        pieces = ((start, min(end, start + COUNTED_AT_ONCE)) for start in range(at, end, COUNTED_AT_ONCE))
        note_bad(reason, 1 + sum(data.count(_BEHIND_BODY[0], *piece) for piece in pieces))


def _large_record(data: bytes, at: int, end: int) -> Record:
    """The record between `at` and `end`, which is larger than a piece: it has many bodies, or bodies with many
    checksums, or much text. Raises BadRecordError, or ValueError for what is no JSON.
    """
    head = _LARGE.match(data, at, min(end, at + HEAD_BYTES_MAX + KIB))
    if head is None or not data.endswith(b"]]", head.end(), end):
        raise BadRecordError(f"{end - at} bytes")
    fields = json.loads(head[0].removesuffix(b",[") + b"]")
    bodies, at, end = list[BodyRow](), head.end(), end - 2
    while at < end:
        cut = _cut(data, at, end, _BEHIND_BODY)
        assert cut is not None  # `end` is one
        bodies += _bodies(data, at, cut)
        if len(bodies) > BODIES_MAX:
            raise BadRecordError(f"more than {BODIES_MAX} bodies")
        at = cut + 1
    return _checked(fields, tuple(bodies))


def _bodies(data: bytes, at: int, end: int) -> list[BodyRow]:
    """The bodies between `at` and `end`. One that is larger than a piece has many checksums."""
    if end - at <= PIECE_BYTES:
        return [_body(fields) for fields in json.loads(b"[" + data[at:end] + b"]")]
    head = _LARGE_BODY.match(data, at, at + PIECE_BYTES)
    if head is None or end - at > BODY_BYTES_MAX or not data.endswith(b'"]', at, end):
        raise BadRecordError(f"a body of {end - at} bytes")
    return [_body(json.loads(head[0] + b'"]'), data[head.end() : end - 2])]


def _cut(data: bytes, at: int, end: int | None, behind: Sequence[bytes]) -> int | None:
    """Where a piece that begins at `at` ends: before a comma that has one of `behind` around it, or at `end`. The last
    such place that a piece reaches, else the next one; None where there is none.
    """
    if end is not None and end - at <= PIECE_BYTES:
        return end
    longest = max(map(len, behind))
    last = max((data.rfind(each, at, at + PIECE_BYTES), each) for each in behind)
    if last[0] >= 0:
        return last[0] + last[1].index(b",")
    limit = len(data) if end is None else end
    for start in range(at + PIECE_BYTES - longest, limit, PIECE_BYTES - longest):
        found = [(data.find(each, start, min(start + PIECE_BYTES, limit)), each) for each in behind]
        first = min(((where, each) for where, each in found if where >= 0), default=None)
        if first is not None:
            return first[0] + first[1].index(b",")
    return end


def _record(fields: Any) -> Record:
    if not isinstance(fields, list) or len(fields) not in (4, 6):
        raise BadRecordError("a record without its fields")
    if len(fields) == 4:
        return _checked(fields, ())
    if not isinstance(fields[5], list) or len(fields[5]) > BODIES_MAX:
        raise BadRecordError("a record without its bodies, or with too many")
    return _checked(fields[:5], tuple(map(_body, fields[5])))


def _checked(fields: Sequence[Any], bodies: tuple[BodyRow, ...]) -> Record:
    """The record of four fields, or of five and these bodies. Raises BadRecordError."""
    kind, name, key, stamp = fields[:4]
    if not isinstance(kind, str) or kind not in _KINDS or not _is(name, str) or not _is(key, str):
        raise BadRecordError(f"a record about {str(kind)[:64]!r}")
    if not _is_number(stamp, 0, STAMP_MAX):
        raise BadRecordError("a stamp out of range")
    about = Touched(cast(TouchedKind, kind), name, key)
    _require_named(about)
    if len(fields) == 4:
        return Record(about, stamp, None)
    row, types = fields[4], _ROW_TYPES[about.kind]
    if not isinstance(row, list) or len(row) != len(types):
        raise BadRecordError(f"a row of another form for {kind}")
    if not all(_is(value, wanted) for value, wanted in zip(row, types, strict=True)):
        raise BadRecordError(f"a row of other types for {kind}")
    _require_readable(about, tuple(row), bodies)
    if about.kind in ("bucket", "upload") and bodies:
        raise BadRecordError(f"bodies of {kind}")
    if about.kind == "part" and [str(body.part_number) for body in bodies] != [about.key]:
        raise BadRecordError("a part without its body")
    return Record(about, stamp, tuple(row), bodies)


def _body(fields: Any, encoded: bytes | None = None) -> BodyRow:
    """A body; `encoded` has its checksums where the fields have not. Raises BadRecordError."""
    if not isinstance(fields, list) or len(fields) != len(_BODY_TYPES) + 1:
        raise BadRecordError("a body without its fields")
    if not _is(fields[-1], str):
        raise BadRecordError("a body of other types")
    return _checked_body(fields[:-1], _decoded(fields[-1] if encoded is None else encoded))


def _checked_body(head: Sequence[Any], words: bytes) -> BodyRow:
    """The body of these fields and checksums. Raises BadRecordError."""
    if not all(_is(value, wanted) for value, wanted in zip(head, _BODY_TYPES, strict=True)):
        raise BadRecordError("a body of other types")
    number, object_offset, nbytes, file_id, file_offset, etag, modified_at, checksum = head
    if not _is_number(number, 0, PART_NUMBER_MAX):
        raise BadRecordError("a body with another number than parts have")
    if not is_tag(etag) or not is_tag(checksum or "") or not is_time(modified_at):
        raise BadRecordError("a body whose ETag, checksum or time cannot be sent")
    if not FILE_ID.match(file_id) if nbytes else file_id:
        raise BadRecordError(f"a body of {nbytes} bytes in a file of the name {file_id[:64]!r}")
    if len(words) != WORD_BYTES * -(-nbytes // BLOCK_BYTES):
        raise BadRecordError(f"{len(words)} bytes of checksums for {nbytes} bytes")
    return BodyRow(
        part_number=number,
        object_offset=object_offset,
        nbytes=nbytes,
        file_id=file_id,
        file_offset=file_offset,
        etag=etag,
        modified_at=float(modified_at),
        checksum=checksum,
        blocks=words,
    )


def _decoded(blocks: str | bytes) -> bytes:
    steps = range(0, len(blocks), BLOCKS_STEP)
    try:
        return b"".join([base64.b64decode(blocks[at : at + BLOCKS_STEP], validate=True) for at in steps])
    except (binascii.Error, ValueError) as error:
        raise BadRecordError("checksums that are no base64") from error


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


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_named(about: Touched) -> bool:
    """Whether a record can be about this thing: others pass over records of names that nobody could have given."""
    is_right = _NAME.match(about.name) is not None
    if about.kind == "object":
        is_right &= is_key(about.key)
    elif about.kind == "part":
        is_right &= _PART.match(about.key) is not None and int(about.key) <= PART_NUMBER_MAX
    else:
        is_right &= not about.key  # one bucket is one thing
    return is_right


def _require_named(about: Touched) -> None:
    if not is_named(about):
        raise BadRecordError(f"no name of {about.kind}: {about.name[:64]!r}, {about.key[:64]!r}")


def _require_readable(about: Touched, row: tuple[Any, ...], bodies: tuple[BodyRow, ...]) -> None:
    """Raises BadRecordError for a row that the index could hold, and nobody could read."""
    if about.kind == "bucket" and not _are_few(row[2]):
        raise BadRecordError("more lifecycle rules than a bucket can have")
    if about.kind != "bucket" and any(isinstance(value, str) and len(value) > TEXT_BYTES_MAX for value in row):
        raise BadRecordError(f"a text of more than {TEXT_BYTES_MAX} characters")
    try:
        if about.kind == "bucket":
            is_right = is_time(row[1])
            rules_of(row[2])
        elif about.kind == "object":
            is_right = _are_whole(row[0], bodies) and is_plain(stored_object((about.key, 0, *row)))
        elif about.kind == "upload":
            is_right = is_time(row[3])
            upload = stored_upload((about.name, row[1], 0, *row[2:]))
            is_right &= are_plain(upload.attributes)
        else:
            is_right = True
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecordError(f"attributes of {about.kind} that cannot be read") from error
    if not is_right:
        raise BadRecordError(f"a row of {about.kind} out of range")


def _are_few(rules: str) -> bool:
    return max(rules.count("{"), rules.count("[")) <= RULE_VALUES_MAX


def _are_whole(nbytes: int, bodies: Sequence[BodyRow]) -> bool:
    """Whether the bodies lie one behind the other, in the order of their parts, and are together the object."""
    if any(body.part_number >= after.part_number for body, after in itertools.pairwise(bodies)):
        return False
    offsets = itertools.accumulate((body.nbytes for body in bodies), initial=0)
    return [*offsets] == [*(body.object_offset for body in bodies), nbytes]
