"""`objectcache bench copies`: pinned host-to-device copies by block size (Figure A3). Imports torch when it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.core.experiment import Experiment, published
from bench.core.plots import Chart, Kind, draw
from bench.core.show import Json, Section, table
from bench.paper.device.command import DeviceSettings, opened_device
from descriptors.units import KIB, MIB
from nixl_client.transports import shared_memory
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from bench.paper.device.model import Accelerator

BLOCK_BYTES = tuple(64 * KIB << power for power in range(11))
WARMING_SAMPLES = 10
QUEUED_BLOCKS_MAX = 1024
NOTES = (
    "each copy waited for by itself, out of pinned memory that no cache holds; GB/s by the device's clock, latency by "
    "the host's, from asking for a copy until it is done",
    "queued: as many as 256 MiB hold asked for one after the other, up to 1024, and waited for once",
    "the paper's A100 (PCIe 4 x8) comes to 12 GB/s, its H100 (PCIe 5 x16) to 55 GB/s from 8 MB on (Figure A3)",
)


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Blocks are taken in turn from `source_bytes`, which no cache holds: a multiple of every block size, and no less
    than `queued_bytes`.
    """

    block_bytes: tuple[int, ...] = BLOCK_BYTES
    samples: int = 200
    source_bytes: int = 512 * MIB
    queued_bytes: int = 256 * MIB
    seed: int = 1


SETTINGS_SMOKE = CopySettings(BLOCK_BYTES[:3], samples=5, source_bytes=MIB, queued_bytes=MIB)


def measure_copies(settings: CopySettings, accelerator: Accelerator, origin: Mapping[str, Any]) -> Json:
    """Every size, one after the other; wrong bytes end it and are the result's `problem`. Raises DeviceError, OSError,
    and RuntimeError (torch's).
    """
    import torch

    blocks: list[dict[str, Any]] = []
    problem = None
    memory = shared_memory.allocate(settings.source_bytes)
    memory[:] = np.random.default_rng(settings.seed).integers(0, 256, settings.source_bytes, dtype=np.uint8)
    target = torch.empty(settings.source_bytes, dtype=torch.uint8, device=accelerator.device)
    with accelerator.pinned(memory) as source, progress_bar(len(settings.block_bytes), "copies") as advance:
        try:
            for block_bytes in settings.block_bytes:
                blocks.append(_measure_block(settings, accelerator, source, target, block_bytes))
                advance(1)
        except VerificationError as error:
            problem = str(error)
    return published("copies", origin, settings, problem, device=accelerator.title, notes=NOTES, blocks=blocks)


def _measure_block(
    settings: CopySettings, accelerator: Accelerator, source: Tensor, target: Tensor, block_bytes: int
) -> dict[str, Any]:
    """`copy_s` are the device's times of single copies, `call_s` the host's from asking for one until it is done;
    `queued_bytes_per_s` is of many asked for one after the other and waited for once.
    """
    import torch

    target.zero_()
    accelerator.synchronize()
    sources, targets = (each.view(-1, block_bytes) for each in (source, target))
    sample_count = WARMING_SAMPLES + settings.samples
    queued_count = max(1, min(settings.queued_bytes // block_bytes, QUEUED_BLOCKS_MAX))

    def copied_s(places: Iterable[int]) -> tuple[float, float]:
        """By the device's clock and by the host's."""
        started_s = time.perf_counter()
        begun = accelerator.mark()
        for place in places:
            targets[place].copy_(sources[place], non_blocking=True)
        ended = accelerator.mark()
        accelerator.synchronize()
        call_s = time.perf_counter() - started_s
        return accelerator.elapsed_s(begun, ended), call_s

    with accelerator.lane()():
        timed = [copied_s([sample % len(sources)]) for sample in range(sample_count)][WARMING_SAMPLES:]
        queued_s, _ = copied_s(range(queued_count))
    copy_s, call_s = map(list, zip(*timed, strict=True))
    copied = max(queued_count, min(sample_count, len(sources)))
    if not torch.equal(targets[:copied].cpu(), sources[:copied]):
        raise VerificationError(f"blocks of {block_bytes} bytes: wrong bytes on the device")
    rates = [block_bytes / seconds for seconds in copy_s]
    return {
        "mean_bytes_per_s": statistics.mean(rates),
        "stdev_bytes_per_s": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        **{f"p{percent}_s": float(np.percentile(call_s, percent, method="inverted_cdf")) for percent in (50, 99)},
        "sample_count": len(copy_s),
        "block_bytes": block_bytes,
        "copy_s": copy_s,
        "call_s": call_s,
        "queued_bytes_per_s": queued_count * block_bytes / queued_s,
    }


def show(result: Json) -> dict[str, Section]:
    """A line for each size."""
    blocks = table(
        result["blocks"],
        "block = block_bytes:size | GB/s = mean_bytes_per_s:GB/s | "
        "stdev = stdev_bytes_per_s:GB/s | queued = queued_bytes_per_s:GB/s | "
        "P50, us = p50_s:us | P99, us = p99_s:us | samples = sample_count",
    )
    return {"copies": (f"device: {result['device']}", *(f"* {note}" for note in result["notes"]), blocks)}


def plot(result: Json, path: Path) -> None:
    """Figure A3's throughput and latency."""
    rows = []
    for block in result["blocks"]:
        mean, stdev = block["mean_bytes_per_s"] / 1e9, block["stdev_bytes_per_s"] / 1e9
        for of, unit, value in (
            ("one at a time", "GB/s", {"median": mean, "min": mean - stdev, "max": mean + stdev}),
            ("queued", "GB/s", block["queued_bytes_per_s"] / 1e9),
            ("P50", "us", 1e6 * block["p50_s"]),
            ("P99", "us", 1e6 * block["p99_s"]),
        ):
            rows.append({"block_mib": block["block_bytes"] / MIB, "of": of, "unit": unit, "value": value})
    draw(CHART, rows, f"Pinned copies to {result['device']}, mean and standard deviation", path)


CHART = Chart(Kind.LINES, "block_mib", "value", "", "of", column="unit", across_title="block, MiB", is_log=True)


def _measure(asked: DeviceSettings, origin: Mapping[str, Any]) -> Json:
    with opened_device(asked.device, asked.smoke, origin) as (accelerator, described):
        return measure_copies(SETTINGS_SMOKE if asked.smoke else CopySettings(), accelerator, described)


COPIES = Experiment(
    name="copies",
    help="copies from pinned host memory to a GPU by block size (figure A3)",
    description="See which block size fills a GPU's copy engine. Blocks of 64 KiB to 64 MiB, each waited for by "
    "itself, and many at once; every byte compared.",
    settings=DeviceSettings,
    measure=_measure,
    show=show,
    plot=plot,
)
