"""What many fetches at once came to: for people, as JSON, as a chart. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.concurrency.run import Concurrency, ConcurrencySettings
from bench.concurrency.waves import Level, ratios
from bench.report import format_bytes, spread


def table(settings: ConcurrencySettings, found: Concurrency) -> str:
    """One line a level, then memory and verdict."""
    found_ratios = ratios(found.levels)
    lines = [
        f"concurrency: {settings.processes} client processes, {settings.workers} workers, "
        f"{settings.chunk_count} chunks of {settings.num_layers} x {format_bytes(settings.per_layer_chunk_bytes)} a "
        f"fetch, {settings.runs} rounds; GB/s of all fetches together",
        f"{'':11}{'GB/s':>8}{'min':>8}{'max':>8}{'over 1':>8}{'memcpy':>8}{'Jain':>7}{'slow/fast':>10}"
        f"{'fastest ms':>11}{'median':>9}{'slowest':>9}{'1st layer':>11}{'memory':>12}",
    ]
    for level in found.levels:
        rate, ended, first = spread(level.rates_bytes_per_s()), level.ended(), level.first_layers()
        name = f"{level.transport}_{level.count}"
        over_one = found_ratios.get(f"{name}_over_1")
        memory = level.memory_bytes_max()
        lines.append(
            f"{level.transport:6}{level.count:5}{rate.median / 1e9:8.3f}{rate.min / 1e9:8.3f}{rate.max / 1e9:8.3f}"
            f"{'-' if over_one is None else f'{over_one:.2f}':>8}{found_ratios[f'{name}_over_memcpy']:8.2f}"
            f"{level.jain():7.3f}{level.slowest_over_fastest():10.2f}{ended.min * 1e3:11.1f}{ended.median * 1e3:9.1f}"
            f"{ended.max * 1e3:9.1f}{first.median * 1e3:11.2f}{'-' if memory is None else format_bytes(memory):>12}"
        )
    lines += ["", _memory_line(found)]
    lines.append("every byte verified" if found.problem is None else f"WRONG BYTES: {found.problem}")
    return "\n".join(lines)


def to_json(settings: ConcurrencySettings, found: Concurrency, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values, raw samples included."""
    described = asdict(settings)
    described["folder"] = None if settings.folder is None else str(settings.folder)
    return {
        "bench": "concurrency",
        "verified": found.problem is None,
        "problem": found.problem,
        **origin,
        "settings": described,
        "ratios": ratios(found.levels),
        "server": {
            "processes": found.server_processes,
            "fixed_bytes": found.fixed_bytes,
            "bound_bytes": found.bound_bytes,
            "peak_bytes": peak_bytes(found.levels),
            "is_within_bound": is_within_bound(found),
        },
        "levels": [_level_json(level) for level in found.levels],
    }


def plot(settings: ConcurrencySettings, found: Concurrency, path: Path) -> None:
    """Throughput over the number of fetches, and every fetch's completion time. Needs matplotlib."""
    from matplotlib.figure import Figure

    transports = list(dict.fromkeys(level.transport for level in found.levels))
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = sorted({level.count for level in found.levels})
    for shift, transport in enumerate(transports):
        levels = [level for level in found.levels if level.transport == transport]
        spreads = [spread([rate / 1e9 for rate in level.rates_bytes_per_s()]) for level in levels]
        whiskers = [[each.median - each.min for each in spreads], [each.max - each.median for each in spreads]]
        at = [counts.index(level.count) for level in levels]
        left.errorbar(at, [each.median for each in spreads], whiskers, fmt="o-", capsize=3, label=transport)
        for level in levels:
            times = sorted(request.ended_s * 1e3 for wave in level.waves for request in wave.requests)
            x = counts.index(level.count) + 0.25 * (shift - (len(transports) - 1) / 2)
            right.scatter([x] * len(times), times, s=8, alpha=0.4, color=f"C{shift}")
    for axes in (left, right):
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlabel("fetches at once")
    left.set_ylabel("GB/s of all together; whiskers: least and greatest round")
    left.set_ylim(bottom=0)
    left.legend()
    right.set_yscale("log")
    right.set_ylabel("ms until each fetch was complete, all rounds")
    payload = format_bytes(found.levels[0].payload_bytes) if found.levels else "-"
    figure.suptitle(f"{payload} a fetch, {settings.processes} client processes, {settings.workers} workers")
    figure.savefig(path, dpi=120)


def peak_bytes(levels: Sequence[Level]) -> int | None:
    """The server's most memory in any wave."""
    seen = [memory for memory in (level.memory_bytes_max() for level in levels) if memory is not None]
    return max(seen) if seen else None


def is_within_bound(found: Concurrency) -> bool | None:
    """Whether the server's memory kept its bound; None where it could not be seen."""
    peak = peak_bytes(found.levels)
    return None if peak is None or found.bound_bytes is None else peak <= found.bound_bytes


def _memory_line(found: Concurrency) -> str:
    peak = peak_bytes(found.levels)
    if peak is None or found.bound_bytes is None or found.fixed_bytes is None:
        return "the server's memory could not be seen"
    verdict = "within" if is_within_bound(found) else "OVER"
    return (
        f"the server's own memory, {found.server_processes} processes: {format_bytes(peak)} at most, {verdict} the "
        f"bound of {format_bytes(found.bound_bytes)}: {format_bytes(found.fixed_bytes)} after its start, plus "
        "staging_bytes, dram_bytes and buffer_bytes"
    )


def _level_json(level: Level) -> dict[str, Any]:
    return {
        "transport": level.transport,
        "count": level.count,
        "payload_bytes": level.payload_bytes,
        "throughput_bytes_per_s": asdict(spread(level.rates_bytes_per_s())),
        "jain": level.jain(),
        "slowest_over_fastest": level.slowest_over_fastest(),
        "ended_s": asdict(level.ended()),
        "first_layer_s": asdict(level.first_layers()),
        "memory_bytes_max": level.memory_bytes_max(),
        "waves": [asdict(wave) for wave in level.waves],
    }
