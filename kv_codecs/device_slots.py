"""Decoding layers that lie in a device's memory, by torch: bit for bit what kv_codecs.slots makes of them in host
memory. Needs torch.

Checksums are computed where the bytes lie. CRC-32C is linear: with `v` zero bytes behind it, a message's remainder is
shifted by a linear map, so halves are joined pairwise, all of one size at once.

    remainder(a ‖ b) = shift(remainder(a), bytes of b) ^ remainder(b)

Which tokens are there is returned in host memory, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from adapters import native
from kv_codecs.dropping import PLACE_BYTES, Kept
from kv_codecs.elements import Bytes, Element
from kv_codecs.encoding import HEAD, encoded_bytes_max, expected_head
from kv_codecs.fp8 import ALL
from kv_codecs.layer import DROPPING, KIVI, Codec, LayerShape, group_of, kept_count
from kv_codecs.packing import packed_bytes
from kv_codecs.slots import Run, WrongChunkError, kept_of

DEVICE_CODECS = (*KIVI, Codec.FP8, *DROPPING)
_POLYNOMIAL = 0x82F63B78
_DTYPES = {Element.FLOAT16: torch.float16, Element.BFLOAT16: torch.bfloat16, Element.FLOAT32: torch.float32}
Words = npt.NDArray[np.uint32]


def decode_places(places: torch.Tensor, runs: Sequence[Run], shape: LayerShape) -> Kept | None:
    """Decode a layer whose chunks lie at the beginning of their places, S bytes each: uint8 of shape (chunks * S). The
    device has done it on return. Raises WrongChunkError, and writes nothing of that run then.
    """
    rows = places.view(-1, shape.nbytes)
    kept = kept_of(runs, shape)
    first = 0
    for name, count, nbytes in runs:
        if name != Codec.EXACT.value:
            mine = rows[first : first + count]
            decoded, mine_kept, bad = decode_rows(mine[:, :nbytes], Codec(name), shape)
            if bad >= 0:
                raise WrongChunkError(first + bad)
            mine.copy_(decoded)
            if kept is not None and mine_kept is not None:
                kept[first : first + count] = mine_kept
        first += count
    _await_device(places)
    return kept


def decode_chunks(places: torch.Tensor, runs: Sequence[Run], shape: LayerShape, num_layers: int) -> Kept | None:
    """Decode chunks, each with all its layers: the encoded ones lie one after the other at the beginning of the chunk's
    place, which has `num_layers` * S bytes. Raises WrongChunkError.
    """
    rows = places.view(-1, num_layers * shape.nbytes)
    whole = kept_of(runs, shape)
    kept = None if whole is None else np.repeat(whole[:, None], num_layers, axis=1)
    first = 0
    for name, count, nbytes in runs:
        if name != Codec.EXACT.value:
            mine = rows[first : first + count]
            packed = mine[:, : num_layers * nbytes].reshape(count * num_layers, nbytes)
            decoded, mine_kept, bad = decode_rows(packed, Codec(name), shape)
            if bad >= 0:
                raise WrongChunkError(first + bad // num_layers)
            mine.copy_(decoded.view(count, -1))
            if kept is not None and mine_kept is not None:
                kept[first : first + count] = mine_kept.reshape(count, num_layers, -1)
        first += count
    _await_device(places)
    return kept


def decode_rows(packed: torch.Tensor, codec: Codec, shape: LayerShape) -> tuple[torch.Tensor, Kept | None, int]:
    """Decode encoded layers of one codec, uint8 of shape (n, bytes of each). Returns the layers, uint8 of shape (n, S);
    which tokens are there, of shape (n, tokens), or None for all; and the first row that is damaged or another layer,
    -1 where there is none.
    """
    if codec not in DEVICE_CODECS:
        raise ValueError(f"{codec.value} is not decoded on devices")
    nbytes = encoded_bytes_max(codec, shape)
    if packed.shape[1] != nbytes:
        raise ValueError(f"rows of {packed.shape[1]} bytes, an encoded layer has {nbytes}")
    payload = packed[:, HEAD.size :].contiguous()
    is_bad = _are_bad(packed[:, : HEAD.size], payload, expected_head(codec, shape, nbytes - HEAD.size))
    if codec.drops_tokens:
        decoded, kept, are_disordered = _dropped(payload, shape, codec)
        return decoded, kept, _first(is_bad | are_disordered)
    halves = _kivi(payload, shape, codec.bits) if codec in KIVI else _fp8(payload, shape)
    layers = torch.stack(halves, dim=1).to(_DTYPES[shape.element])
    return layers.view(torch.uint8).view(len(packed), shape.nbytes), None, _first(is_bad)


def _await_device(places: torch.Tensor) -> None:
    if places.device.type == "cuda":
        stream: Any = torch.cuda.current_stream(places.device)
        stream.synchronize()


def _first(are: Kept) -> int:
    return int(are.argmax()) if are.any() else -1


def _are_bad(heads: torch.Tensor, payload: torch.Tensor, wanted: bytes) -> Kept:
    """Which rows have another head or checksum."""
    found: Bytes = heads.cpu().numpy()
    is_bad: Kept = (found[:, : len(wanted)] != np.frombuffer(wanted, dtype=np.uint8)).any(axis=1)
    begun = np.uint32(native.crc32c(wanted) ^ 0xFFFFFFFF)
    rest = _shifted(np.array([begun], dtype=np.uint32), payload.shape[1])[0]
    sums = rest ^ _remainders(payload) ^ np.uint32(0xFFFFFFFF)
    is_bad |= found[:, len(wanted) :].copy().view("<u4")[:, 0] != sums
    return is_bad


def _remainders(rows: torch.Tensor) -> Words:
    """Of each row, starting from 0. Zero bytes before a message do not change it."""
    count, nbytes = rows.shape
    words = 1 << max(0, (-(-nbytes // 4) - 1).bit_length())
    padded = rows.new_zeros(count, 4 * words)
    padded[:, 4 * words - nbytes :] = rows
    values = padded.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    step = 4
    while values.shape[1] > 1:
        values = _shift(values[:, ::2], step) ^ values[:, 1::2]
        step *= 2
    return np.asarray(_shift(values, 4)[:, 0].cpu().numpy(), dtype=np.uint32)


def _shift(values: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The remainders with so many zero bytes behind; a power of two from 4 on."""
    tables = _device_tables(nbytes, str(values.device))
    found = tables[0][values & 255]
    for place in (1, 2, 3):
        found = found ^ tables[place][values >> (8 * place) & 255]
    return found


@cache
def _device_tables(nbytes: int, device: str) -> torch.Tensor:
    return torch.from_numpy(_tables(nbytes).astype(np.int64)).to(device)


@cache
def _tables(nbytes: int) -> Words:
    """The shift by so many zero bytes, for each of a remainder's four bytes: uint32 of shape (4, 256)."""
    if nbytes == 1:
        table = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
        numbers = np.arange(256, dtype=np.uint32)
        found: Words = np.stack([table, numbers, numbers << np.uint32(8), numbers << np.uint32(16)])
        return found
    half = nbytes // 2
    return _looked_up(_looked_up(_identity(), half), half)


def _identity() -> Words:
    numbers = np.arange(256, dtype=np.uint32)
    return np.stack([numbers << np.uint32(8 * place) for place in range(4)])


def _looked_up(values: Words, nbytes: int) -> Words:
    tables = _tables(nbytes)
    found: Words = tables[0][values & 255]
    for place in (1, 2, 3):
        found = found ^ tables[place][values >> np.uint32(8 * place) & 255]
    return found


def _shifted(values: Words, nbytes: int) -> Words:
    """The remainders with any number of zero bytes behind."""
    for bit in range(nbytes.bit_length()):
        if nbytes >> bit & 1:
            values = _looked_up(values, 1 << bit)
    return values


def _kivi(payload: torch.Tensor, shape: LayerShape, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 of shape (n, tokens, width) each (kv_codecs.kivi)."""
    count, tokens, width = len(payload), shape.tokens, shape.width
    step, span = group_of(tokens), group_of(width)
    halves = []
    start = 0
    for outer, inner in (((tokens // step, 1, width), (tokens // step, step, width)),
                         ((tokens, width // span, 1), (tokens, width // span, span))):  # fmt: skip
        groups = outer[0] * outer[1] * outer[2]
        scale = _halves(payload[:, start : start + 2 * groups]).view(count, *outer)
        zero = _halves(payload[:, start + 2 * groups : start + 4 * groups]).view(count, *outer)
        start += 4 * groups
        size = packed_bytes(tokens * width, bits)
        numbers = _unpacked(payload[:, start : start + size], tokens * width, bits).view(count, *inner)
        start += size
        halves.append((numbers * scale + zero).view(count, tokens, width))
    return halves[0], halves[1]


def _halves(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16).float()


def _unpacked(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """The first `count` numbers of each row, float32 (kv_codecs.packing)."""
    if bits == 8:
        return data[:, :count].float()
    if bits == 3:
        triples = data.reshape(len(data), -1, 3).int()
        words, lanes = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16, 8
    else:
        words, lanes = data, 8 // bits
    mask = (1 << bits) - 1
    numbers = torch.stack([words >> bits * lane & mask for lane in range(lanes)], dim=-1)
    return numbers.view(len(data), -1)[:, :count].float()


def _fp8(payload: torch.Tensor, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 of shape (n, tokens, width) each (kv_codecs.fp8)."""
    scales = payload[:, :8].contiguous().view(torch.float32)
    values: Any = torch.from_numpy(ALL).to(payload.device)
    numbers = values[payload[:, 8:].int()].view(len(payload), 2, shape.tokens, shape.width)
    return numbers[:, 0] * scales[:, 0, None, None], numbers[:, 1] * scales[:, 1, None, None]


def _dropped(payload: torch.Tensor, shape: LayerShape, codec: Codec) -> tuple[torch.Tensor, Kept, Kept]:
    """Layers, uint8 of shape (n, S), which of their tokens are there, and whose places cannot be
    (kv_codecs.dropping).
    """
    rows, count = len(payload), kept_count(codec, shape.tokens)
    token_bytes = shape.width * shape.element.nbytes
    places = payload[:, : count * PLACE_BYTES].contiguous().view(torch.int32).long()
    is_wrong = (places[:, 0] < 0) | (places[:, -1] >= shape.tokens) | (places.diff(dim=1) <= 0).any(dim=1)
    places = places.clamp(0, shape.tokens - 1)
    tokens = payload[:, count * PLACE_BYTES :].reshape(rows, 2, count, token_bytes)
    layers = payload.new_zeros(rows, 2, shape.tokens, token_bytes)
    layers.scatter_(2, places[:, None, :, None].expand(-1, 2, -1, token_bytes), tokens)
    kept = np.zeros((rows, shape.tokens), dtype=np.bool_)
    np.put_along_axis(kept, places.cpu().numpy(), values=True, axis=1)
    return layers.view(rows, shape.nbytes), kept, np.asarray(is_wrong.cpu().numpy(), dtype=np.bool_)
