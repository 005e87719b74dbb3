"""Decoding where a model computes: how fast a device makes exact layers of encoded ones in its memory, and when a layer
that comes from the host's memory is there and decoded, against when the exact one is there. Needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.core.rounds import paired
from bench.paper.compression.codecs import SHAPE
from objectcache.calibration.samples import spread
from objectcache.kv_codecs import device_slots, slots
from objectcache.kv_codecs.elements import Bytes
from objectcache.kv_codecs.encoding import encode
from objectcache.kv_codecs.layer import KIVI, Codec
from objectcache.kv_codecs.slots import Run

CODECS = (*KIVI, Codec.FP8)
WARMING = 2


def device_rows(data: Bytes, counts: Sequence[int], device: str, runs: int) -> Iterator[dict[str, Any]]:
    """For each codec, and each number of chunks in a layer: rates of exact bytes. The encoded layers lie in places of
    the exact size, as a delivery leaves them. Raises AssertionError where the device's bytes are not the host's.
    """
    for codec in CODECS:
        packed = [np.frombuffer(encode(layer, SHAPE, codec), dtype=np.uint8) for layer in data]
        nbytes = len(packed[0])
        places = np.zeros_like(data)
        for place, layer in zip(places, packed, strict=True):
            place[:nbytes] = layer
        wanted = places.reshape(-1).copy()
        slots.decode_places(wanted, [(codec.value, len(data), nbytes)], SHAPE)
        for count in counts:
            yield {
                "codec": codec.value, "chunks": count, "layer_bytes": count * SHAPE.nbytes,
                **_measured(places, wanted.reshape(data.shape), codec.value, nbytes, count, device, runs),
            }  # fmt: skip


def _measured(
    places: Bytes, wanted: Bytes, codec: str, nbytes: int, count: int, device: str, runs: int
) -> dict[str, Any]:
    rows = np.resize(np.arange(len(places)), count)
    encoded, exact = torch.from_numpy(places[rows]), torch.from_numpy(wanted[rows])
    run: list[Run] = [(codec, count, nbytes)]
    packed = _pinned(encoded[:, :nbytes].contiguous(), device)
    whole = _pinned(exact, device)
    here = encoded.to(device)
    target = torch.empty_like(here)

    def prepared() -> None:
        target.copy_(here)

    def decoded() -> None:
        device_slots.decode_places(target.view(-1), run, SHAPE)

    def copied_and_decoded() -> None:
        target[:, :nbytes].copy_(packed, non_blocking=True)
        device_slots.decode_places(target.view(-1), run, SHAPE)

    def copied() -> None:
        target.copy_(whole, non_blocking=True)

    decode_s = _times(decoded, prepared, device, runs)
    _compare(target, exact, codec)
    encoded_s, exact_s = [], []
    for _ in range(WARMING + runs):
        encoded_s += _times(copied_and_decoded, _nothing, device, 1, warming=0)
        _compare(target, exact, codec)
        exact_s += _times(copied, _nothing, device, 1, warming=0)
        _compare(target, exact, codec)
    encoded_s, exact_s = encoded_s[WARMING:], exact_s[WARMING:]
    return {
        "decode_bytes_per_s": spread([exact.numel() / each for each in decode_s]),
        "arrival_s": {"encoded": spread(encoded_s), "exact": spread(exact_s)},
        "exact_over_encoded": spread(paired(exact_s, encoded_s)),
    }


def _nothing() -> None:
    pass


def _pinned(memory: Tensor, device: str) -> Tensor:
    return memory.pin_memory() if device == "cuda" else memory


def _compare(found: Tensor, expected: Tensor, codec: str) -> None:
    if not torch.equal(found.cpu(), expected):
        raise AssertionError(f"{codec}: the device decodes to other bytes than the host")


def _times(
    work: Callable[[], None], prepare: Callable[[], None], device: str, runs: int, warming: int = WARMING
) -> list[float]:
    """Seconds by the host's clock, until the device has done it."""
    found = []
    for _ in range(warming + runs):
        prepare()
        _await(device)
        began_s = time.perf_counter()
        work()
        _await(device)
        found.append(time.perf_counter() - began_s)
    return found[warming:]


def _await(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
