"""Pinned copies by block size, for people, as JSON and as a chart. The chart needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.device.copies import BlockCopies, Copies, CopySettings
from bench.report import format_bytes
from bench.samples import spread

NOTES = (
    "each copy waited for by itself, out of pinned memory that no cache holds; GB/s by the device's clock, latency by "
    "the host's, from asking for a copy until it is done",
    "queued: as many as 256 MiB hold asked for one after the other, up to 1024, and waited for once",
    "the paper's A100 (PCIe 4 x8) comes to 12 GB/s, its H100 (PCIe 5 x16) to 55 GB/s from 8 MB on (Figure A3)",
)
DPI = 120


def copies_table(found: Copies) -> str:
    """A line for each size."""
    lines = [f"device: {found.device}", *(f"* {note}" for note in NOTES), ""]
    lines.append(f"{'block':>10}{'GB/s':>9}{'stdev':>9}{'queued':>9}{'P50, us':>10}{'P99, us':>10}{'samples':>9}")
    for block in found.blocks:
        row = _summary(block)
        lines.append(
            f"{format_bytes(block.block_bytes):>10}{row['mean_bytes_per_s'] / 1e9:9.2f}"
            f"{row['stdev_bytes_per_s'] / 1e9:9.2f}{block.queued_bytes_per_s / 1e9:9.2f}"
            f"{row['p50_s'] * 1e6:10.1f}{row['p99_s'] * 1e6:10.1f}{len(block.call_s):9}"
        )
    lines += ["", "every byte verified" if found.problem is None else f"WRONG BYTES: {found.problem}"]
    return "\n".join(lines)


def copies_json(settings: CopySettings, found: Copies, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values, raw samples included."""
    return {
        "bench": "copies",
        "device": found.device,
        "verified": found.problem is None,
        "problem": found.problem,
        **origin,
        "settings": asdict(settings),
        "notes": list(NOTES),
        "blocks": [
            {
                **_summary(block),
                "copy_s": asdict(spread(block.copy_s)),
                "sample_count": len(block.copy_s),
                **asdict(block),
            }
            for block in found.blocks
        ],
    }


def plot_copies(found: Copies, path: Path) -> None:
    """As Figure A3: bars of throughput, lines of latency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = [_summary(block) for block in found.blocks]
    places = range(len(rows))
    axes.bar(
        places,
        [row["mean_bytes_per_s"] / 1e9 for row in rows],
        yerr=[row["stdev_bytes_per_s"] / 1e9 for row in rows],
        capsize=2,
        color="tab:blue",
        alpha=0.6,
        label="one at a time",
    )
    axes.plot(places, [block.queued_bytes_per_s / 1e9 for block in found.blocks], "k_", markersize=14, label="queued")
    axes.set_xticks(places, [format_bytes(block.block_bytes) for block in found.blocks], rotation=30)
    axes.set_ylabel("GB/s")
    axes.legend(loc="upper left")
    latency = axes.twinx()
    for name in ("p50_s", "p99_s"):
        latency.plot(places, [row[name] * 1e6 for row in rows], marker=".", label=name[:3].upper())
    latency.set_yscale("log")
    latency.set_ylabel("us")
    latency.legend(loc="lower right")
    axes.set_title(f"Pinned copies to {found.device}, mean and standard deviation")
    figure.savefig(path, dpi=DPI)


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent are not above. Raises ValueError without a value."""
    if not values:
        raise ValueError("no samples")
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def _summary(block: BlockCopies) -> dict[str, float]:
    rates = [block.block_bytes / seconds for seconds in block.copy_s]
    return {
        "mean_bytes_per_s": statistics.mean(rates),
        "stdev_bytes_per_s": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "p50_s": percentile(block.call_s, 50),
        "p99_s": percentile(block.call_s, 99),
    }
