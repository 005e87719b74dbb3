"""Pinned host-to-device copies by block size (Figure A3). Needs torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.content import VerificationError
from bench.device.accelerator import Accelerator
from bench.progress import progress_bar
from descriptors.units import KIB, MIB
from nixl_client import shared_memory

BLOCK_BYTES = tuple(64 * KIB << power for power in range(11))
SAMPLES = 200
WARMING_SAMPLES = 10
SOURCE_BYTES = 512 * MIB
"""Blocks are taken in turn from so much memory, which no cache holds."""
QUEUED_BYTES = 256 * MIB
QUEUED_BLOCKS_MAX = 1024


@dataclass(frozen=True, slots=True)
class CopySettings:
    """`source_bytes` is a multiple of every block size, `queued_bytes` no more than that."""

    block_bytes: tuple[int, ...] = BLOCK_BYTES
    samples: int = SAMPLES
    source_bytes: int = SOURCE_BYTES
    queued_bytes: int = QUEUED_BYTES
    seed: int = 1


SETTINGS_SMOKE = CopySettings(BLOCK_BYTES[:3], samples=5, source_bytes=MIB, queued_bytes=MIB)


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """One block size. `copy_s` are the device's times of single copies, `call_s` the host's from asking for one until
    it is done; `queued_bytes_per_s` is of many asked for one after the other and waited for once.
    """

    block_bytes: int
    copy_s: tuple[float, ...]
    call_s: tuple[float, ...]
    queued_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Copies:
    """What was measured on `device`. `problem` says which bytes were wrong."""

    device: str
    blocks: tuple[BlockCopies, ...]
    problem: str | None = None


def measure_copies(settings: CopySettings, accelerator: Accelerator) -> Copies:
    """Every size, one after the other. Raises DeviceError, OSError, and RuntimeError (torch's)."""
    found: list[BlockCopies] = []
    memory = shared_memory.allocate(settings.source_bytes)
    memory[:] = np.random.default_rng(settings.seed).integers(0, 256, settings.source_bytes, dtype=np.uint8)
    target = torch.empty(settings.source_bytes, dtype=torch.uint8, device=accelerator.device)
    with accelerator.pinned(memory) as source:
        try:
            with progress_bar(len(settings.block_bytes), "copies") as advance:
                for block_bytes in settings.block_bytes:
                    found.append(_measure_block(settings, accelerator, source, target, block_bytes))
                    advance(1)
        except VerificationError as error:
            return Copies(accelerator.title, tuple(found), str(error))
    return Copies(accelerator.title, tuple(found))


def _measure_block(
    settings: CopySettings, accelerator: Accelerator, source: Tensor, target: Tensor, block_bytes: int
) -> BlockCopies:
    target.zero_()
    accelerator.synchronize()
    sources, targets = (each.view(-1, block_bytes) for each in (source, target))
    copy_s, call_s = [], []
    with accelerator.lane().entered():
        for sample in range(WARMING_SAMPLES + settings.samples):
            place = sample % len(sources)
            started_s = time.perf_counter()
            begun = accelerator.mark()
            targets[place].copy_(sources[place], non_blocking=True)
            ended = accelerator.mark()
            accelerator.synchronize()
            if sample >= WARMING_SAMPLES:
                call_s.append(time.perf_counter() - started_s)
                copy_s.append(accelerator.elapsed_s(begun, ended))
        queued_count = max(1, min(settings.queued_bytes // block_bytes, QUEUED_BLOCKS_MAX))
        begun = accelerator.mark()
        for place in range(queued_count):
            targets[place].copy_(sources[place], non_blocking=True)
        ended = accelerator.mark()
        accelerator.synchronize()
    copied = max(queued_count, min(WARMING_SAMPLES + settings.samples, len(sources)))
    if not torch.equal(targets[:copied].cpu(), sources[:copied]):
        raise VerificationError(f"blocks of {block_bytes} bytes: wrong bytes on the device")
    queued_s = accelerator.elapsed_s(begun, ended)
    return BlockCopies(block_bytes, tuple(copy_s), tuple(call_s), queued_count * block_bytes / queued_s)
