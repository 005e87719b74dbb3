"""An encoded layer: a head that says everything about it, the payload, and a checksum over both.

    bytes   0  "KV01"               the magic number and the version of this layout
            4  codec                Codec.number
            5  element              Element's value
            6  0, 0
            8  tokens, width        uint32 each
           16  payload bytes        uint32
           20  CRC-32C              uint32, over the head up to here and the payload
           24  payload

All numbers are little-endian. The same layer and codec always give the same bytes. A wrong encoded layer is found
before anything is written: its sizes and its checksum are compared first.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache.adapters import native
from objectcache.kv_codecs.dropping import Kept, dropping_bytes, dropping_decode, dropping_encode, places_in
from objectcache.kv_codecs.elements import Bytes, Element, from_floats, to_floats
from objectcache.kv_codecs.fp8 import fp8_bytes, fp8_decode, fp8_encode
from objectcache.kv_codecs.kivi import kivi_bytes, kivi_starts
from objectcache.kv_codecs.layer import KIVI, RUN_TOKENS_MIN, Codec, LayerShape, goes_on, group_of, takes

MAGIC = b"KV01"
HEAD = struct.Struct("<4sBBHIIII")
Numbers = npt.NDArray[np.int64]
_BY_NUMBER = {codec.number: codec for codec in Codec}
_ELEMENTS = {element.value: element for element in Element}
PLANES_LEVEL = 3
"""zlib's level for byte planes."""


class WrongLayerError(ValueError):
    """Bytes that are no encoded layer, or not the one that was expected; the message says why."""


@dataclass(frozen=True, slots=True)
class EncodedHead:
    """The head of an encoded layer."""

    codec: Codec
    shape: LayerShape
    payload_bytes: int
    checksum: int


def encoded_bytes_max(codec: Codec, shape: LayerShape) -> int:
    """The most bytes that an encoded layer takes; exactly so many but for LOSSLESS, whose size depends on the layer."""
    return HEAD.size + _payload_bytes_max(codec, shape)


def encode(layer: Bytes, shape: LayerShape, codec: Codec) -> bytes:
    """Encode S bytes. Raises ValueError where they are not S, or where the codec takes no so short chunks."""
    if layer.nbytes != shape.nbytes:
        raise ValueError(f"{layer.nbytes} bytes, a layer has {shape.nbytes}")
    if not takes(codec, shape.tokens):
        raise ValueError(f"{shape.tokens} tokens, {codec.value} takes {RUN_TOKENS_MIN} or more")
    flat = np.ascontiguousarray(layer).view(np.uint8).reshape(-1)
    return _with_head(_encoded(flat, shape, codec), shape, codec)


def encode_further(data: bytes | memoryview, shape: LayerShape, codec: Codec) -> tuple[bytes, Bytes]:
    """Encode a layer of KIVI with fewer bits of the keys, of the values or of both, and return the S bytes that it was,
    too. Keys or values that keep their bits keep their payload, so that they lose nothing more. Raises ValueError where
    the codec does not go on from the layer's, and WrongLayerError.
    """
    out = np.empty(shape.nbytes, dtype=np.uint8)
    before = decode(data, shape, out)
    if before is Codec.EXACT or not goes_on(before, codec):
        raise ValueError(f"{codec.value} does not go on from {before.value}")
    payload = bytearray(_encoded(out, shape, codec))
    former = memoryview(data).cast("B")[HEAD.size :]
    start, former_start = kivi_starts(shape, codec.key_bits)[2], kivi_starts(shape, before.key_bits)[2]
    if codec.key_bits == before.key_bits:
        payload[:start] = former[:former_start]
    if codec.value_bits == before.value_bits:
        payload[start:] = former[former_start:]
    return _with_head(bytes(payload), shape, codec), out


def read_head(data: bytes | memoryview) -> EncodedHead:
    """The head. Raises WrongLayerError."""
    if len(data) < HEAD.size:
        raise WrongLayerError(f"{len(data)} bytes are no encoded layer")
    magic, number, element, zero, tokens, width, payload_bytes, checksum = HEAD.unpack_from(data)
    if magic != MAGIC or zero:
        raise WrongLayerError("it does not begin as an encoded layer does")
    if number not in _BY_NUMBER:
        raise WrongLayerError(f"codec {number} is not known")
    if element not in _ELEMENTS:
        raise WrongLayerError(f"elements of kind {element} are not known")
    try:
        shape = LayerShape(tokens, width, _ELEMENTS[element])
    except ValueError as error:
        raise WrongLayerError(str(error)) from None
    codec = _BY_NUMBER[number]
    if not takes(codec, tokens):
        raise WrongLayerError(f"{tokens} tokens in {codec.value}")
    most = _payload_bytes_max(codec, shape)
    if payload_bytes > most or (codec is not Codec.LOSSLESS and payload_bytes != most):
        raise WrongLayerError(f"a payload of {payload_bytes} bytes, {most} expected")
    return EncodedHead(codec, shape, payload_bytes, checksum)


def decode(data: bytes | memoryview, shape: LayerShape, out: Bytes) -> Codec:
    """Decode into S bytes at `out`, and say how it was encoded. Raises WrongLayerError, and writes nothing then."""
    view = memoryview(data).cast("B")
    head = read_head(view)
    if head.shape != shape:
        raise WrongLayerError(f"a layer of {head.shape.tokens} tokens and {head.shape.width} elements came")
    if out.nbytes != shape.nbytes:
        raise ValueError(f"room for {out.nbytes} bytes, a layer has {shape.nbytes}")
    if len(view) != HEAD.size + head.payload_bytes:
        raise WrongLayerError(f"{len(view)} bytes, {HEAD.size + head.payload_bytes} expected")
    payload = view[HEAD.size :]
    if native.crc32c(payload, native.crc32c(view[: HEAD.size - 4])) != head.checksum:
        raise WrongLayerError("the checksum is wrong")
    _decode(np.frombuffer(payload, dtype=np.uint8), head, out.reshape(-1).view(np.uint8))
    return head.codec


def decode_many(
    source: Bytes, places: Numbers, codec: Codec, shape: LayerShape, out: Bytes, *, is_in_place: bool = False
) -> int:
    """Decode encoded layers of one codec: a row of `places`, int64 of shape (n, 2), has the offset of one in `source`,
    and that of its S bytes in `out`; with `is_in_place` both are one memory. Returns the row of the first layer that is
    damaged or another one, whose place and those behind it are not written; -1 where there is none.
    """
    if codec in KIVI:
        head = expected_head(codec, shape, _payload_bytes_max(codec, shape))
        steps = group_of(shape.tokens), group_of(shape.width)
        return native.kivi_decode_many(
            source.data, head, np.ascontiguousarray(places).data, shape.tokens, shape.width, *steps, codec.key_bits,
            codec.value_bits, shape.element.value, is_in_place, out.data,
        )  # fmt: skip
    nbytes = encoded_bytes_max(codec, shape)
    for row, (start, target) in enumerate(places.tolist()):
        layer = source[start : start + nbytes]
        try:
            if (
                decode((layer.copy() if is_in_place else layer).data, shape, out[target : target + shape.nbytes])
                is not codec
            ):
                return row
        except WrongLayerError:
            return row
    return -1


def decode_dropped(
    source: Bytes,
    places: Numbers,
    codec: Codec,
    shape: LayerShape,
    out: Bytes,
    kept: Kept,
    *,
    is_in_place: bool,
) -> int:
    """As `decode_many`, of a codec that drops tokens: a row of `kept`, of shape (n, tokens), says which are there."""
    nbytes = encoded_bytes_max(codec, shape)
    for row, (start, target) in enumerate(places.tolist()):
        layer = source[start : start + nbytes]
        layer = layer.copy() if is_in_place else layer
        try:
            if decode(layer.data, shape, out[target : target + shape.nbytes]) is not codec:
                return row
        except WrongLayerError:
            return row
        kept[row] = False
        kept[row, places_in(layer[HEAD.size :], shape, codec)] = True
    return -1


def expected_head(codec: Codec, shape: LayerShape, payload_bytes: int) -> bytes:
    """The head of an encoded layer without its checksum; of one that is not LOSSLESS all is known beforehand."""
    number, element = codec.number, shape.element.value
    return HEAD.pack(MAGIC, number, element, 0, shape.tokens, shape.width, payload_bytes, 0)[: HEAD.size - 4]


def _with_head(payload: bytes, shape: LayerShape, codec: Codec) -> bytes:
    head = expected_head(codec, shape, len(payload))
    return head + native.crc32c(payload, native.crc32c(head)).to_bytes(4, "little") + payload


def _payload_bytes_max(codec: Codec, shape: LayerShape) -> int:
    if codec in KIVI:
        return kivi_bytes(shape, codec.key_bits, codec.value_bits)
    if codec is Codec.FP8:
        return fp8_bytes(2 * shape.half_elements)
    if codec is Codec.LOSSLESS:
        return 1 + shape.nbytes
    if codec.drops_tokens:
        return dropping_bytes(shape, codec)
    return shape.nbytes


def _encoded(flat: Bytes, shape: LayerShape, codec: Codec) -> bytes:
    if codec is Codec.EXACT:
        return flat.tobytes()
    if codec is Codec.LOSSLESS:
        return _planes(flat, shape.element.nbytes)
    if codec is Codec.FP8:
        both = to_floats(flat, shape.element).reshape(2, shape.tokens, shape.width)
        return fp8_encode(both[0], both[1]).tobytes()
    if codec.drops_tokens:
        return dropping_encode(flat, shape, codec)
    payload = bytearray(kivi_bytes(shape, codec.key_bits, codec.value_bits))
    native.kivi_encode(
        flat.data, shape.tokens, shape.width, group_of(shape.tokens), group_of(shape.width), codec.key_bits,
        codec.value_bits, shape.element.value, payload,
    )  # fmt: skip
    return bytes(payload)


def _decode(payload: Bytes, head: EncodedHead, out: Bytes) -> None:
    shape, codec = head.shape, head.codec
    if codec is Codec.EXACT:
        out[:] = payload
        return
    if codec is Codec.LOSSLESS:
        _from_planes(payload, shape.element.nbytes, out)
        return
    if codec.drops_tokens:
        places = places_in(payload, shape, codec)
        if places is None:
            raise WrongLayerError("its tokens are in no order, or beyond the chunk")
        dropping_decode(payload, places, shape, out)
        return
    if codec in KIVI:
        step, span = group_of(shape.tokens), group_of(shape.width)
        native.kivi_decode(
            payload.data, shape.tokens, shape.width, step, span, codec.key_bits, codec.value_bits, shape.element.value,
            out.data,
        )  # fmt: skip
        return
    keys, values = fp8_decode(payload, shape.tokens, shape.width)
    half = out.nbytes // 2
    from_floats(keys, shape.element, out[:half])
    from_floats(values, shape.element, out[half:])


def _planes(flat: Bytes, element_bytes: int) -> bytes:
    """The first bytes of all elements, then the second ones, …, compressed. Where that is no shorter, as they are."""
    planes = np.ascontiguousarray(flat.reshape(-1, element_bytes).T).tobytes()
    packed = zlib.compress(planes, PLANES_LEVEL)
    return b"\1" + packed if len(packed) < flat.nbytes else b"\0" + flat.tobytes()


def _from_planes(payload: Bytes, element_bytes: int, out: Bytes) -> None:
    """Raises WrongLayerError where another number of bytes comes out."""
    kind, data = int(payload[0]) if len(payload) else 255, payload[1:]
    if kind == 0 and len(data) == out.nbytes:
        out[:] = data
        return
    if kind != 1:
        raise WrongLayerError("the planes are of no known form")
    unpacker = zlib.decompressobj()
    try:
        planes = unpacker.decompress(data.tobytes(), out.nbytes + 1)
    except zlib.error as error:
        raise WrongLayerError(f"the planes cannot be unpacked: {error}") from None
    if len(planes) != out.nbytes or unpacker.unconsumed_tail or not unpacker.eof:
        raise WrongLayerError("other bytes come out of the planes than a layer has")
    out[:] = np.frombuffer(planes, dtype=np.uint8).reshape(element_bytes, -1).T.reshape(-1)
