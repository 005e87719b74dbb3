"""Descriptor codecs: JSON for people, a compact little-endian binary form for machines. One value, two spellings.

Binary form (all integers little-endian), told from JSON by its magic:

    magic "OCD" u8 version | u8 delivery | u8 on_missing | u8 flags | u8 request_id_bytes
    u32 chunk_count | u32 num_layers | u32 chunk_tokens | u32 per_layer_chunk_bytes | u32 compute_count
    request_id | compute u32 each
    target (flag 1): u8 agent_id_bytes, agent_id, u8 region_id_bytes, region_id, u64 offset, u64 length
    accept (flag 4, version 2): u8 count; for each codec u8 length, name; u8 element, f64 max_error (infinite: no bound)
    bound of the loss (flag 64, version 3, with flag 4): f64 max_loss
    portion (version 2 without flags 4 and 32, or with flag 8; between servers): u16 index, u16 count, u32 chunk_count,
        u32 first_layer, u8 attempt, u32 position for each key
    places (flag 32, version 2): u64 for each key
    keys: flag 2, 32 raw bytes each (lower-case hex digests), with flag 16 behind u16 length and the ASCII text that
        all of them begin with; without flag 2, u16 length and UTF-8 each

Decoding consumes the input exactly: a byte too few or too many is an error.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from descriptors.descriptor import (
    ACCEPTED_CODECS_MAX,
    BOUNDED_VERSION,
    CHUNK_COUNT_MAX,
    DESCRIPTOR_BYTES_MAX,
    EXTENDED_VERSION,
    NUM_LAYERS_MAX,
    PROTOCOL_VERSION,
    Accept,
    Delivery,
    Descriptor,
    OnMissing,
    Portion,
    RdmaTarget,
    invalid,
)
from descriptors.errors import CallerError, ErrorCode
from descriptors.json_body import parse_body

_T = TypeVar("_T", bound=Enum)

MAGIC = b"OCD"
_HEAD = struct.Struct("<3sBBBBBIIIII")
_TARGET_TAIL = struct.Struct("<QQ")
_PORTION = struct.Struct("<HHIIB")
_FLAG_TARGET = 1
_FLAG_HEX_KEYS = 2
_FLAG_ACCEPT = 4
_FLAG_PORTION = 8
"""There is a portion beside what else makes version 2."""
_FLAG_KEY_PREFIX = 16
"""With digest keys: all of them begin with the same text."""
_FLAG_PLACES = 32
_FLAG_MAX_LOSS = 64
KEY_PREFIX_BYTES_MAX = 128
"""So the keys take no more memory than in JSON of DESCRIPTOR_BYTES_MAX."""
_ACCEPT_TAIL = struct.Struct("<Bd")
_MAX_LOSS = struct.Struct("<d")
_ELEMENT_CODES = {"float16": 1, "bfloat16": 2, "float32": 3}
_DIGEST_BYTES = 32
_HEX_KEYS = re.compile(r"(?:[0-9a-f]{64})+\Z")
_DELIVERY_CODES = {Delivery.LAYER_MAJOR: 0, Delivery.CHUNK_MAJOR: 1, Delivery.AUTO: 2}
_ON_MISSING_CODES = {OnMissing.FAIL: 0, OnMissing.PREFIX: 1}


class _TargetModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    agent_id: str
    region_id: str
    offset: int
    length: int


class _DescriptorModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: int
    chunk_keys: Annotated[list[str], Field(max_length=CHUNK_COUNT_MAX, fail_fast=True)]
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    delivery: Literal["layer-major", "chunk-major", "auto"] = "auto"
    on_missing: Literal["fail", "prefix"] = "fail"
    rdma_target: _TargetModel | None = None
    request_id: str | None = None
    accept: Annotated[list[str], Field(max_length=ACCEPTED_CODECS_MAX, fail_fast=True)] | None = None
    element: str | None = None
    max_error: float | None = None
    max_loss: float | None = None
    places: Annotated[list[int], Field(max_length=CHUNK_COUNT_MAX, fail_fast=True)] | None = None
    layer_compute_us: int | Annotated[list[int], Field(max_length=NUM_LAYERS_MAX, fail_fast=True)] | None = None


def decode_descriptor(data: bytes) -> Descriptor:
    """A descriptor from either form. Raises CallerError (InvalidDescriptor, EntityTooLarge) naming the field."""
    if len(data) > DESCRIPTOR_BYTES_MAX:
        raise CallerError(
            ErrorCode.ENTITY_TOO_LARGE,
            f"the descriptor has {len(data)} bytes, at most {DESCRIPTOR_BYTES_MAX}",
            field="body",
        )
    return _decode_binary(data) if data[:3] == MAGIC else _decode_json(data)


def encode_json(descriptor: Descriptor) -> bytes:
    """The JSON form; fields at their default are left out."""
    fields: dict[str, object] = {
        "version": descriptor.version,
        "chunk_keys": list(descriptor.chunk_keys),
        "num_layers": descriptor.num_layers,
        "chunk_tokens": descriptor.chunk_tokens,
        "per_layer_chunk_bytes": descriptor.per_layer_chunk_bytes,
        "delivery": descriptor.delivery.value,
        "on_missing": descriptor.on_missing.value,
    }
    if (target := descriptor.rdma_target) is not None:
        fields["rdma_target"] = {
            "agent_id": target.agent_id,
            "region_id": target.region_id,
            "offset": target.offset,
            "length": target.length,
        }
    if descriptor.request_id is not None:
        fields["request_id"] = descriptor.request_id
    if descriptor.layer_compute_us:
        compute = descriptor.layer_compute_us
        fields["layer_compute_us"] = compute[0] if len(compute) == 1 else list(compute)
    if (accept := descriptor.accept) is not None:
        fields |= accept_fields(accept)
    if descriptor.places:
        fields["places"] = list(descriptor.places)
    return json.dumps(fields, separators=(",", ":")).encode()


def _decode_json(data: bytes) -> Descriptor:
    model = parse_body(_DescriptorModel, data, invalid)
    target = model.rdma_target
    compute = model.layer_compute_us
    if isinstance(compute, list) and not compute:
        raise invalid("layer_compute_us", "must not be an empty list")
    if model.places is not None and not model.places:
        raise invalid("places", "must not be an empty list")
    return Descriptor(
        version=model.version,
        chunk_keys=tuple(model.chunk_keys),
        num_layers=model.num_layers,
        chunk_tokens=model.chunk_tokens,
        per_layer_chunk_bytes=model.per_layer_chunk_bytes,
        delivery=Delivery(model.delivery),
        on_missing=OnMissing(model.on_missing),
        rdma_target=None
        if target is None
        else RdmaTarget(target.agent_id, target.region_id, target.offset, target.length),
        request_id=model.request_id,
        layer_compute_us=() if compute is None else (compute,) if isinstance(compute, int) else tuple(compute),
        accept=parse_accept(model.accept, model.element, model.max_error, model.max_loss),
        places=tuple(model.places or ()),
    )


def accept_fields(accept: Accept) -> dict[str, object]:
    """The JSON fields of what a descriptor, or a lookup, accepts."""
    fields: dict[str, object] = {"accept": list(accept.codecs), "element": accept.element}
    if accept.max_error is not None:
        fields["max_error"] = accept.max_error
    if accept.max_loss is not None:
        fields["max_loss"] = accept.max_loss
    return fields


def parse_accept(
    codecs: Sequence[str] | None, element: str | None, max_error: float | None, max_loss: float | None
) -> Accept | None:
    """The value of these fields; None without codecs. Raises CallerError(InvalidDescriptor)."""
    if codecs is None:
        for name, value in (("element", element), ("max_error", max_error), ("max_loss", max_loss)):
            if value is not None:
                raise invalid(name, "goes with accept")
        return None
    if element is None:
        raise invalid("element", "is required with accept")
    return Accept(tuple(codecs), element, max_error, max_loss)


def encode_binary(descriptor: Descriptor) -> bytes:
    """The binary form; 32 bytes a key when every key is a lower-case SHA-256 digest behind the same prefix."""
    request_id = (descriptor.request_id or "").encode()
    prefix, joined = _digests(descriptor.chunk_keys)
    target = descriptor.rdma_target
    accept = descriptor.accept
    is_extended = accept is not None or bool(descriptor.places)
    flags = (
        (_FLAG_TARGET if target else 0)
        | (_FLAG_HEX_KEYS if joined else 0)
        | (_FLAG_KEY_PREFIX if prefix else 0)
        | (_FLAG_ACCEPT if accept is not None else 0)
        | (_FLAG_PORTION if is_extended and descriptor.portion is not None else 0)
        | (_FLAG_PLACES if descriptor.places else 0)
        | (_FLAG_MAX_LOSS if accept is not None and accept.max_loss is not None else 0)
    )
    parts = [
        _HEAD.pack(
            MAGIC,
            descriptor.version,
            _DELIVERY_CODES[descriptor.delivery],
            _ON_MISSING_CODES[descriptor.on_missing],
            flags,
            len(request_id),
            descriptor.chunk_count,
            descriptor.num_layers,
            descriptor.chunk_tokens,
            descriptor.per_layer_chunk_bytes,
            len(descriptor.layer_compute_us),
        ),
        request_id,
        np.array(descriptor.layer_compute_us, dtype="<u4").tobytes(),
    ]
    if target:
        for name in (target.agent_id, target.region_id):
            parts += [bytes([len(name)]), name.encode()]
        parts.append(_TARGET_TAIL.pack(target.offset, target.length))
    if accept is not None:
        parts.append(bytes([len(accept.codecs)]))
        for name in accept.codecs:
            parts += [bytes([len(name)]), name.encode()]
        bound = math.inf if accept.max_error is None else accept.max_error
        parts.append(_ACCEPT_TAIL.pack(_ELEMENT_CODES[accept.element], bound))
        if accept.max_loss is not None:
            parts.append(_MAX_LOSS.pack(accept.max_loss))
    if (portion := descriptor.portion) is not None:
        parts.append(
            _PORTION.pack(portion.index, portion.count, portion.chunk_count, portion.first_layer, portion.attempt)
        )
        parts.append(np.array(portion.positions, dtype="<u4").tobytes())
    parts.append(np.array(descriptor.places, dtype="<u8").tobytes())
    if prefix:
        parts += [len(prefix).to_bytes(2, "little"), prefix]
    if joined:
        parts.append(bytes.fromhex(joined))
    else:
        for key in descriptor.chunk_keys:
            raw = key.encode()
            parts += [len(raw).to_bytes(2, "little"), raw]
    return b"".join(parts)


def _digests(keys: Sequence[str]) -> tuple[bytes, str]:
    """The prefix that all keys have before their digests, and the digests; both empty for keys of another form."""
    prefix = keys[0][:-64]
    length = len(prefix) + 64
    if len(prefix) > KEY_PREFIX_BYTES_MAX or not prefix.isascii():
        return b"", ""
    if not all(len(key) == length and key.startswith(prefix) for key in keys):
        return b"", ""
    joined = "".join([key[-64:] for key in keys])
    return (prefix.encode(), joined) if _HEX_KEYS.match(joined) is not None else (b"", "")


class _Reader:
    """Bounds-checked reading; running past the end names the field being read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int, field: str) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise invalid(field, f"is cut short: {count} bytes needed, {len(self._data) - self._at} left")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def text(self, count: int, field: str) -> str:
        try:
            return self.take(count, field).decode()
        except UnicodeDecodeError:
            raise invalid(field, "is not UTF-8") from None

    def finish(self) -> None:
        if self._at != len(self._data):
            raise invalid("body", f"has {len(self._data) - self._at} bytes after the descriptor")


def decode_peer_descriptor(data: bytes) -> Descriptor:
    """A descriptor that a gateway sends to a storage server: in the binary form, possibly for a portion of a delivery.
    Raises CallerError (InvalidDescriptor, EntityTooLarge) naming the field.
    """
    if len(data) > DESCRIPTOR_BYTES_MAX or data[:3] != MAGIC:
        raise invalid("body", "is no binary descriptor")
    return _decode_binary(data, takes_portions=True)


def _decode_binary(data: bytes, *, takes_portions: bool = False) -> Descriptor:
    reader = _Reader(data)
    head = _HEAD.unpack(reader.take(_HEAD.size, "body"))
    _, version, delivery, on_missing, flags, id_bytes, chunks, layers, tokens, slice_size, computes = head
    has_more = bool(flags & (_FLAG_ACCEPT | _FLAG_PLACES))
    is_extended = takes_portions or has_more
    versions = (PROTOCOL_VERSION, EXTENDED_VERSION) if is_extended else (PROTOCOL_VERSION,)
    if version not in ((*versions, BOUNDED_VERSION) if flags & _FLAG_MAX_LOSS else versions):
        raise invalid("version", f"must be {PROTOCOL_VERSION}, not {version}")
    known = _FLAG_TARGET | _FLAG_HEX_KEYS | _FLAG_ACCEPT | _FLAG_KEY_PREFIX | _FLAG_PLACES | _FLAG_MAX_LOSS
    if flags & ~(known | (_FLAG_PORTION if takes_portions else 0)):
        raise invalid("flags", f"{flags:#x} has bits that no version knows")
    if flags & _FLAG_KEY_PREFIX and not flags & _FLAG_HEX_KEYS:
        raise invalid("flags", f"{flags:#x} has a prefix for keys that are no digests")
    if flags & _FLAG_MAX_LOSS and not flags & _FLAG_ACCEPT:
        raise invalid("max_loss", "goes with accept")
    if not 1 <= chunks <= CHUNK_COUNT_MAX:
        raise invalid("chunk_keys", f"needs 1 to {CHUNK_COUNT_MAX} keys, not {chunks}")
    if computes > NUM_LAYERS_MAX:
        raise invalid("layer_compute_us", f"at most {NUM_LAYERS_MAX} numbers, not {computes}")
    request_id = reader.text(id_bytes, "request_id") or None
    compute = np.frombuffer(reader.take(4 * computes, "layer_compute_us"), dtype="<u4").tolist()
    target = _read_target(reader) if flags & _FLAG_TARGET else None
    accept = _read_accept(reader, has_max_loss=bool(flags & _FLAG_MAX_LOSS)) if flags & _FLAG_ACCEPT else None
    has_portion = version >= EXTENDED_VERSION and (not has_more or bool(flags & _FLAG_PORTION))
    portion = _read_portion(reader, chunks) if has_portion else None
    places = _read_places(reader, chunks) if flags & _FLAG_PLACES else ()
    prefix = _read_prefix(reader) if flags & _FLAG_KEY_PREFIX else ""
    keys = _read_keys(reader, chunks, prefix, hex_keys=bool(flags & _FLAG_HEX_KEYS))
    reader.finish()
    return Descriptor(
        version=version,
        chunk_keys=keys,
        num_layers=layers,
        chunk_tokens=tokens,
        per_layer_chunk_bytes=slice_size,
        delivery=_by_code(_DELIVERY_CODES, delivery, "delivery"),
        on_missing=_by_code(_ON_MISSING_CODES, on_missing, "on_missing"),
        rdma_target=target,
        request_id=request_id,
        layer_compute_us=tuple(compute),
        portion=portion,
        accept=accept,
        places=places,
    )


def _read_places(reader: _Reader, chunk_count: int) -> tuple[int, ...]:
    return tuple(np.frombuffer(reader.take(8 * chunk_count, "places"), dtype="<u8").tolist())


def _read_accept(reader: _Reader, *, has_max_loss: bool) -> Accept:
    names = []
    for index in range(reader.take(1, "accept")[0]):
        names.append(reader.text(reader.take(1, f"accept[{index}]")[0], f"accept[{index}]"))
    element, bound = _ACCEPT_TAIL.unpack(reader.take(_ACCEPT_TAIL.size, "element"))
    by_code = {code: name for name, code in _ELEMENT_CODES.items()}
    if element not in by_code:
        raise invalid("element", f"has unknown code {element}")
    max_loss = _MAX_LOSS.unpack(reader.take(_MAX_LOSS.size, "max_loss"))[0] if has_max_loss else None
    return Accept(tuple(names), by_code[element], None if bound == math.inf else bound, max_loss)


def _read_portion(reader: _Reader, chunk_count: int) -> Portion:
    index, count, whole, first_layer, attempt = _PORTION.unpack(reader.take(_PORTION.size, "portion"))
    positions = np.frombuffer(reader.take(4 * chunk_count, "portion.positions"), dtype="<u4").tolist()
    return Portion(
        index=index,
        count=count,
        chunk_count=whole,
        positions=tuple(positions),
        first_layer=first_layer,
        attempt=attempt,
    )


def _read_target(reader: _Reader) -> RdmaTarget:
    agent_id = reader.text(reader.take(1, "rdma_target.agent_id")[0], "rdma_target.agent_id")
    region_id = reader.text(reader.take(1, "rdma_target.region_id")[0], "rdma_target.region_id")
    offset, length = _TARGET_TAIL.unpack(reader.take(_TARGET_TAIL.size, "rdma_target.offset"))
    return RdmaTarget(agent_id, region_id, offset, length)


def _read_prefix(reader: _Reader) -> str:
    length = int.from_bytes(reader.take(2, "chunk_keys"), "little")
    if not 1 <= length <= KEY_PREFIX_BYTES_MAX:
        raise invalid("chunk_keys", f"their prefix has {length} bytes, not 1 to {KEY_PREFIX_BYTES_MAX}")
    prefix = reader.text(length, "chunk_keys")
    if not prefix.isascii():
        raise invalid("chunk_keys", "their prefix has characters beyond ASCII")
    return prefix


def _read_keys(reader: _Reader, count: int, prefix: str, *, hex_keys: bool) -> tuple[str, ...]:
    if hex_keys:
        text = reader.take(_DIGEST_BYTES * count, "chunk_keys").hex()
        return tuple([prefix + text[start : start + 64] for start in range(0, 64 * count, 64)])
    return tuple(
        reader.text(int.from_bytes(reader.take(2, f"chunk_keys[{i}]"), "little"), f"chunk_keys[{i}]")
        for i in range(count)
    )


def _by_code(codes: dict[_T, int], code: int, field: str) -> _T:
    for value, known in codes.items():
        if known == code:
            return value
    raise invalid(field, f"has unknown code {code}")
