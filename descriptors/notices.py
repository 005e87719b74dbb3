"""Notices: small messages about one request, from a storage server to a client's agent, beside the bytes it writes.

Each notice carries the request id, and `part`, the number of its sender among `parts` servers, so that several servers
may write one layer. Notices may arrive in any order, twice or (all but the last) not at all. Binary, little-endian:

    magic "OCN" u8 version | u8 kind | u16 part | u16 parts | u8 request_id_bytes | request_id | body by kind
    admitted     u8 mode, u32 chunk_count, u64 rate_bytes_per_s (0: not limited), u64 epoch
    layer_ready  u32 layer_index, u64 offset, u64 nbytes      (offset from the start of the descriptor's target)
    failed       u32 layer_index, u32 chunk_index
    done         u64 nbytes
    forms        the text of descriptors.layer_forms; before `admitted`, where the caller accepts encoded layers
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

from descriptors.descriptor import PROTOCOL_VERSION
from descriptors.layer_forms import LayerForms, WrongFormsError, forms_text, parse_forms

GREETING = b"OCH" + bytes([PROTOCOL_VERSION])
"""Sent to an agent when it registers, to show that the connection is open. It belongs to no request."""

_MAGIC = b"OCN"
_HEAD = struct.Struct("<3sBBHHB")
_ADMITTED = struct.Struct("<BIQQ")
_LAYER_READY = struct.Struct("<IQQ")
_FAILED = struct.Struct("<II")
_DONE = struct.Struct("<Q")


class Mode(Enum):
    """The order in which a delivery is sent: Eq. 2 of the paper."""

    LAYER_MAJOR = "layer-major"
    CHUNK_MAJOR = "chunk-major"


_MODE_CODES = (Mode.LAYER_MAJOR, Mode.CHUNK_MAJOR)


class NoticeError(ValueError):
    """Bytes that are not a notice of this version."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request was planned and admitted: k chunks, this mode, this rate, in this scheduling epoch."""

    request_id: str
    mode: Mode
    chunk_count: int
    rate_bytes_per_s: int = 0
    epoch: int = 0
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class LayerReady:
    """This part's `nbytes` of a layer are in the buffer, from `offset` on."""

    request_id: str
    layer_index: int
    offset: int
    nbytes: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing from `layer_index` on will come; `chunk_index` is the first bad chunk."""

    request_id: str
    layer_index: int
    chunk_index: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """This part wrote all its bytes; it will not touch the buffer again."""

    request_id: str
    nbytes: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Forms:
    """The form of each chunk that will come."""

    request_id: str
    forms: LayerForms
    part: int = 0
    parts: int = 1


Notice = Admitted | LayerReady | Failed | Done | Forms


def encode_notice(notice: Notice) -> bytes:
    """The binary form."""
    match notice:
        case Admitted():
            mode = _MODE_CODES.index(notice.mode)
            kind, body = 0, _ADMITTED.pack(mode, notice.chunk_count, notice.rate_bytes_per_s, notice.epoch)
        case LayerReady():
            kind, body = 1, _LAYER_READY.pack(notice.layer_index, notice.offset, notice.nbytes)
        case Failed():
            kind, body = 2, _FAILED.pack(notice.layer_index, notice.chunk_index)
        case Done():
            kind, body = 3, _DONE.pack(notice.nbytes)
        case Forms():
            kind, body = 4, forms_text(notice.forms).encode()
    request_id = notice.request_id.encode()
    head = _HEAD.pack(_MAGIC, PROTOCOL_VERSION, kind, notice.part, notice.parts, len(request_id))
    return head + request_id + body


def decode_notice(data: bytes) -> Notice:
    """The notice in `data`. Raises NoticeError for anything else; never reads past the end."""
    try:
        magic, version, kind, part, parts, id_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC or version != PROTOCOL_VERSION:
            raise NoticeError("not a notice of this version")
        if part >= parts:
            raise NoticeError(f"part {part} of {parts}")
        body_at = _HEAD.size + id_bytes
        request_id = data[_HEAD.size : body_at].decode("ascii")
        return _decode_body(kind, data[body_at:], request_id, part, parts)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise NoticeError(f"malformed notice of {len(data)} bytes: {error}") from None


def _decode_body(kind: int, body: bytes, request_id: str, part: int, parts: int) -> Notice:
    if kind == 0:
        mode, chunk_count, rate, epoch = _ADMITTED.unpack(body)
        return Admitted(
            request_id=request_id,
            mode=_MODE_CODES[mode],
            chunk_count=chunk_count,
            rate_bytes_per_s=rate,
            epoch=epoch,
            part=part,
            parts=parts,
        )
    if kind == 1:
        layer_index, offset, nbytes = _LAYER_READY.unpack(body)
        return LayerReady(
            request_id=request_id, layer_index=layer_index, offset=offset, nbytes=nbytes, part=part, parts=parts
        )
    if kind == 2:
        layer_index, chunk_index = _FAILED.unpack(body)
        return Failed(request_id, layer_index, chunk_index, part, parts)
    if kind == 3:
        (nbytes,) = _DONE.unpack(body)
        return Done(request_id, nbytes, part, parts)
    if kind == 4:
        try:
            return Forms(request_id, parse_forms(body.decode("ascii")), part, parts)
        except WrongFormsError as error:
            raise NoticeError(str(error)) from None
    raise NoticeError(f"unknown kind {kind}")
