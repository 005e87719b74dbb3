"""Decoding layers that lie in a device's memory, by torch: bit for bit what kv_codecs.slots makes of them in host
memory. Needs torch.

Checksums are computed where the bytes lie, of all rows at once: halves are joined pairwise (kv_codecs.crc32c). On GPUs
KIVI and FP8 have kernels of their own (kv_codecs.device_kernels); where Triton is missing, torch does it there, too,
in many more passes.

Which tokens are there is returned in host memory, as there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from objectcache.kv_codecs.crc32c import Words, checksum_rest, tables
from objectcache.kv_codecs.dropping import PLACE_BYTES, Kept
from objectcache.kv_codecs.elements import Bytes, Element
from objectcache.kv_codecs.encoding import HEAD, encoded_bytes_max, expected_head
from objectcache.kv_codecs.fp8 import ALL
from objectcache.kv_codecs.layer import DROPPING, KIVI, Codec, LayerShape, group_of, kept_count
from objectcache.kv_codecs.packing import packed_bytes
from objectcache.kv_codecs.slots import Run, WrongChunkError, kept_of

_log = logging.getLogger(__name__)
DEVICE_CODECS = (*KIVI, Codec.FP8, *DROPPING)
_DTYPES = {Element.FLOAT16: torch.float16, Element.BFLOAT16: torch.bfloat16, Element.FLOAT32: torch.float32}


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
            mine_kept, bad = _decode_into(mine, mine[:, :nbytes], Codec(name), shape)
            if bad >= 0:
                raise WrongChunkError(first + bad)
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
            mine_kept, bad = _decode_into(mine.view(-1, shape.nbytes), packed, Codec(name), shape)
            if bad >= 0:
                raise WrongChunkError(first + bad // num_layers)
            if kept is not None and mine_kept is not None:
                kept[first : first + count] = mine_kept.reshape(count, num_layers, -1)
        first += count
    _await_device(places)
    return kept


def _decode_into(
    layers: torch.Tensor, packed: torch.Tensor, codec: Codec, shape: LayerShape
) -> tuple[Kept | None, int]:
    """Decode encoded layers of one codec, uint8 of shape (n, bytes of each), into layers, uint8 of shape (n, S), which
    may lie over them. Returns which tokens are there, None for all; and the first row that is damaged or another layer,
    and then nothing is written, -1 where there is none.
    """
    kernels = kernels_for(str(layers.device))
    if kernels is None or codec not in kernels.KERNEL_CODECS:
        decoded, kept, bad = decode_rows(packed, codec, shape)
        if bad < 0:
            layers.copy_(decoded)
        return kept, bad
    _check_size(packed, codec, shape)
    head = expected_head(codec, shape, packed.shape[1] - HEAD.size)
    elements, copied = layers.view(_DTYPES[shape.element]), packed.clone(memory_format=torch.contiguous_format)
    bad_rows = kernels.decode_into(elements, copied, codec, shape, head)
    return None, _first(np.asarray(bad_rows.cpu().numpy(), dtype=np.bool_))


@cache
def kernels_for(device: str) -> Any:
    """kv_codecs.device_kernels where they are of use and work, which is tried out once; None where torch decodes."""
    if not device.startswith("cuda"):
        return None
    try:
        from objectcache.kv_codecs import device_kernels

        device_kernels.try_out(device)
    except ImportError:
        return None
    except Exception as error:  # Triton has no class for all that can be missing
        _log.warning("no kernels on %s, torch decodes there and takes ten times as long: %s", device, error)
        return None
    return device_kernels


def decode_rows(packed: torch.Tensor, codec: Codec, shape: LayerShape) -> tuple[torch.Tensor, Kept | None, int]:
    """Decode encoded layers of one codec, uint8 of shape (n, bytes of each). Returns the layers, uint8 of shape (n, S);
    which tokens are there, of shape (n, tokens), or None for all; and the first row that is damaged or another layer,
    -1 where there is none.
    """
    if codec not in DEVICE_CODECS:
        raise ValueError(f"{codec.value} is not decoded on devices")
    _check_size(packed, codec, shape)
    payload = packed[:, HEAD.size :].contiguous()
    is_bad = _are_bad(packed[:, : HEAD.size], payload, expected_head(codec, shape, payload.shape[1]))
    if codec.drops_tokens:
        decoded, kept, are_disordered = _dropped(payload, shape, codec)
        return decoded, kept, _first(is_bad | are_disordered)
    halves = _kivi(payload, shape, codec) if codec in KIVI else _fp8(payload, shape)
    layers = torch.stack(halves, dim=1).to(_DTYPES[shape.element])
    return layers.view(torch.uint8).view(len(packed), shape.nbytes), None, _first(is_bad)


def _check_size(packed: torch.Tensor, codec: Codec, shape: LayerShape) -> None:
    nbytes = encoded_bytes_max(codec, shape)
    if packed.shape[1] != nbytes:
        raise ValueError(f"rows of {packed.shape[1]} bytes, an encoded layer has {nbytes}")


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
    sums = np.uint32(checksum_rest(wanted, payload.shape[1])) ^ _remainders(payload)
    is_bad |= found[:, len(wanted) :].copy().view("<u4")[:, 0] != sums
    return is_bad


def _remainders(rows: torch.Tensor) -> Words:
    """The remainder of each row, starting from 0. Zero bytes before a message do not change it."""
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
    return torch.from_numpy(tables(nbytes).astype(np.int64)).to(device)


def _kivi(payload: torch.Tensor, shape: LayerShape, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, float32 of shape (n, tokens, width) each (kv_codecs.kivi)."""
    count, tokens, width = len(payload), shape.tokens, shape.width
    step, span = group_of(tokens), group_of(width)
    halves = []
    start = 0
    by_channel = (tokens // step, 1, width), (tokens // step, step, width), codec.key_bits
    by_token = (tokens, width // span, 1), (tokens, width // span, span), codec.value_bits
    for outer, inner, bits in (by_channel, by_token):
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
