"""Kernels that check and decode encoded layers in a GPU's memory, in one pass each: torch by itself takes some hundred
passes for it, and then a layer is decoded later than the exact one would have come. Needs Triton, which torch brings
for CUDA and ROCm.

The remainder of CRC-32C is linear. Each lane goes through every LANES-th word of a row,

    remainder = shift(remainder, 4 * LANES bytes) ^ word

and is then shifted by the words that follow its own, as a product with a matrix of bits. The lanes' sum is the row's.
Zero bytes before a row do not change it: they fill the first words.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from objectcache.kv_codecs.crc32c import checksum_rest, looked_up, tables
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import HEAD, decode, encode, expected_head
from objectcache.kv_codecs.fp8 import ALL
from objectcache.kv_codecs.kivi import kivi_starts
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape, group_of

KERNEL_CODECS = (*KIVI, Codec.FP8)
LANES = 1024
BLOCK = 1024
HEAD_BYTES = tl.constexpr(HEAD.size)


@triton.jit
def _check_rows(
    packed, bad, wanted, step_table, lane_shift, row_bytes, payload_bytes, rounds, rest,
    LANES: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program for each row: whether its head or its checksum is another. The last of `bad` says whether any is."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    head = packed + row * row_bytes
    begin = head + HEAD_BYTES
    first = payload_bytes - rounds * LANES * 4
    remainder = tl.zeros((LANES,), dtype=tl.int32)
    for number in range(rounds):
        at = first + 4 * (number * LANES + lane)
        if IS_ALIGNED:
            word = tl.load((begin + at).to(tl.pointer_type(tl.int32)), mask=at >= 0, other=0)
        else:
            word = tl.zeros((LANES,), dtype=tl.int32)
            for place in tl.static_range(4):
                byte = tl.load(begin + at + place, mask=at + place >= 0, other=0).to(tl.int32)
                word = word | (byte << (8 * place))
        shifted = tl.load(step_table + (remainder & 255))
        for place in tl.static_range(1, 4):
            shifted = shifted ^ tl.load(step_table + 256 * place + ((remainder >> (8 * place)) & 255))
        remainder = shifted ^ word
    found = tl.zeros((LANES,), dtype=tl.int32)
    for bit in tl.static_range(32):
        found = found ^ (tl.load(lane_shift + bit * LANES + lane) * ((remainder >> bit) & 1))
    checksum = tl.xor_sum(found, axis=0) ^ rest
    byte = tl.arange(0, 32)
    is_head = byte < HEAD_BYTES - 4
    seen = tl.load(head + byte, mask=byte < HEAD_BYTES, other=0).to(tl.int32)
    expected = tl.load(wanted + byte, mask=is_head, other=0).to(tl.int32)
    expected = tl.where(is_head, expected, (checksum >> (8 * (byte - HEAD_BYTES + 4))) & 255)
    differ = tl.sum(tl.where((byte < HEAD_BYTES) & (seen != expected), 1, 0), axis=0)
    tl.store(bad + row, differ)
    if differ > 0:
        tl.store(bad + tl.num_programs(0), 1)


@triton.jit
def _half_float(data, at, is_mine):
    low = tl.load(data + at, mask=is_mine, other=0).to(tl.uint16)
    high = tl.load(data + at + 1, mask=is_mine, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(packed, place, is_mine, BITS: tl.constexpr):
    """Numbers of BITS bits (kv_codecs.packing)."""
    if BITS == 3:
        triple = packed + (place // 8) * 3
        word = tl.load(triple, mask=is_mine, other=0).to(tl.int32)
        word = word | (tl.load(triple + 1, mask=is_mine, other=0).to(tl.int32) << 8)
        word = word | (tl.load(triple + 2, mask=is_mine, other=0).to(tl.int32) << 16)
        number = (word >> (3 * (place % 8))) & 7
    else:
        lanes: tl.constexpr = 8 // BITS
        word = tl.load(packed + place // lanes, mask=is_mine, other=0).to(tl.int32)
        number = (word >> (BITS * (place % lanes))) & ((1 << BITS) - 1)
    return number


@triton.jit
def _decode_kivi(
    packed, out, is_any_bad, row_bytes, blocks, key_groups, value_groups, value_start,
    HALF: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK elements of a row (kv_codecs.kivi). Nothing is written where any row is bad."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    element = ((program % blocks) * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    is_mine = element < 2 * HALF * (1 - tl.load(is_any_bad))
    is_value = element >= HALF
    place = tl.where(is_value, element - HALF, element)
    token, channel = place // WIDTH, place % WIDTH
    group = tl.where(is_value, token * (WIDTH // SPAN) + channel // SPAN, (token // STEP) * WIDTH + channel)
    groups = tl.where(is_value, value_groups, key_groups)
    start = tl.where(is_value, value_start, 0)
    data = packed + row * row_bytes + HEAD_BYTES
    scale = _half_float(data, start + 2 * group, is_mine)
    zero = _half_float(data, start + 2 * groups + 2 * group, is_mine)
    numbers = start + 4 * groups
    if KEY_BITS == VALUE_BITS:
        number = _number(data + numbers, place, is_mine, KEY_BITS)
    else:
        of_key = _number(data + numbers, place, is_mine & (element < HALF), KEY_BITS)
        number = tl.where(is_value, _number(data + numbers, place, is_mine & is_value, VALUE_BITS), of_key)
    decoded = number.to(tl.float32) * scale + zero
    tl.store(out + row * (2 * HALF) + element, decoded.to(out.dtype.element_ty), mask=is_mine)


@triton.jit
def _decode_fp8(packed, out, is_any_bad, values, row_bytes, blocks, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """One program for BLOCK elements of a row (kv_codecs.fp8). Nothing is written where any row is bad."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    element = ((program % blocks) * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    is_mine = element < 2 * HALF * (1 - tl.load(is_any_bad))
    data = packed + row * row_bytes + HEAD_BYTES
    at = tl.where(element >= HALF, 4, 0)
    bits = tl.zeros((BLOCK,), dtype=tl.int32)
    for place in tl.static_range(4):
        bits = bits | (tl.load(data + at + place, mask=is_mine, other=0).to(tl.int32) << (8 * place))
    number = tl.load(data + 8 + element, mask=is_mine, other=0).to(tl.int32)
    decoded = tl.load(values + number) * bits.to(tl.float32, bitcast=True)
    tl.store(out + row * (2 * HALF) + element, decoded.to(out.dtype.element_ty), mask=is_mine)


def decode_into(out: torch.Tensor, packed: torch.Tensor, codec: Codec, shape: LayerShape, head: bytes) -> torch.Tensor:
    """Decode rows, `packed` uint8 of shape (n, bytes of each), contiguous, into `out`, elements of shape
    (n, 2 * tokens * width), contiguous, on the same device. `head` is what each row begins with. Returns which rows are
    damaged or another layer: nonzero in an int32 tensor of shape (n,). Nothing is decoded where any is. The device may
    not have done it yet.
    """
    with _current(packed.device):
        return _decode_into(out, packed, codec, shape, head)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the thread's current device, which is the first one in a new thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _decode_into(out: torch.Tensor, packed: torch.Tensor, codec: Codec, shape: LayerShape, head: bytes) -> torch.Tensor:
    count, row_bytes = packed.shape
    device = str(packed.device)
    payload_bytes = row_bytes - HEAD.size
    rounds = -(-payload_bytes // (4 * LANES))
    bad = torch.zeros(count + 1, dtype=torch.int32, device=packed.device)
    is_aligned = row_bytes % 4 == 0 and packed.data_ptr() % 4 == 0
    _check_rows[(count,)](
        packed, bad, _on_device(head, device), _step_table(device), _lane_shift(device), row_bytes, payload_bytes,
        rounds, _signed(checksum_rest(head, payload_bytes)), LANES=LANES, IS_ALIGNED=is_aligned, num_warps=8,
    )  # fmt: skip
    half = shape.half_elements
    blocks = -(-2 * half // BLOCK)
    if codec is Codec.FP8:
        _decode_fp8[(count * blocks,)](
            packed, out, bad[count:], _fp8_values(device), row_bytes, blocks, HALF=half, BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    else:
        key_groups, value_groups, value_start = kivi_starts(shape, codec.key_bits)
        _decode_kivi[(count * blocks,)](
            packed, out, bad[count:], row_bytes, blocks, key_groups, value_groups, value_start, HALF=half,
            WIDTH=shape.width, STEP=group_of(shape.tokens), SPAN=group_of(shape.width), KEY_BITS=codec.key_bits,
            VALUE_BITS=codec.value_bits, BLOCK=BLOCK,
            enable_fp_fusion=False,  # a product and a sum, each rounded, as on the host
        )  # fmt: skip
    return bad[:count]


def try_out(device: str) -> None:
    """Decode one layer. Raises RuntimeError where other bytes come out, and what Triton raises where it cannot compile
    or run kernels here: it needs a C compiler and Python's headers.
    """
    shape, codec = LayerShape(32, 32, Element.FLOAT32), Codec.KIVI4
    exact = np.linspace(-3.0, 4.0, 2 * shape.half_elements, dtype=np.float32).view(np.uint8)
    packed = encode(exact, shape, codec)
    wanted = np.empty_like(exact)
    decode(packed, shape, wanted)
    rows = torch.frombuffer(bytearray(packed), dtype=torch.uint8)[None].to(device)
    out = torch.zeros((1, 2 * shape.half_elements), dtype=torch.float32, device=device)
    bad = decode_into(out, rows, codec, shape, expected_head(codec, shape, len(packed) - HEAD.size))
    if bool(bad.any()) or not np.array_equal(out.cpu().numpy().view(np.uint8)[0], wanted):
        raise RuntimeError("a layer is decoded to other bytes than on the host")


@cache
def _on_device(data: bytes, device: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


@cache
def _step_table(device: str) -> torch.Tensor:
    """The shift by LANES words, for each of a remainder's four bytes: int32 of shape (4, 256)."""
    return torch.from_numpy(tables(4 * LANES).view(np.int32)).to(device)


@cache
def _lane_shift(device: str) -> torch.Tensor:
    """The shift of each bit of a lane's remainder by its word and those behind it: int32 of shape (32, LANES)."""
    found = np.empty((LANES, 32), dtype=np.uint32)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for lane in reversed(range(LANES)):
        bits = looked_up(bits, 4)
        found[lane] = bits
    return torch.from_numpy(np.ascontiguousarray(found.T).view(np.int32)).to(device)


@cache
def _fp8_values(device: str) -> torch.Tensor:
    values: Any = torch.from_numpy(ALL)
    return values.to(device)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
