"""Section and chart of a result of `bench concurrency`. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.core.plots import Chart, Kind, draw
from bench.core.show import Column, Json, Section, fixed, ms, size, table


def show(result: Json) -> dict[str, Section]:
    """One line for each transport and number of fetches, and the server's memory."""
    ratios, server = result["ratios"], result["server"]

    def over(level: Json, what: str) -> float | None:
        found: float | None = ratios.get(f"{level['transport']}_{level['count']}_over_{what}")
        return found

    memory = "the server's memory could not be seen"
    if server["is_within_bound"] is not None:
        memory = (
            f"the server's own memory, {server['processes']} processes: {size(server['peak_bytes'])} at most, "
            f"{'within' if server['is_within_bound'] else 'OVER'} the bound of {size(server['bound_bytes'])}: "
            f"{size(server['fixed_bytes'])} after its start, plus staging_bytes, dram_bytes and buffer_bytes"
        )
    return {
        "levels": (
            table(
                result["levels"],
                "over = transport | at once = count | GB/s, all together = throughput_bytes_per_s:GB/s",
                Column("over 1", lambda level: over(level, "1"), fixed(2)),
                Column("over memcpy", lambda level: over(level, "memcpy"), fixed(2)),
                "Jain = jain:.3 | slowest over fastest = slowest_over_fastest:.2 | ms until complete = ended_s:ms",
                Column("first layer", lambda level: level["first_layer_s"]["median"], ms),
                "memory = memory_bytes_max:size",
            ),
            memory,
        )
    }


def plot(result: Json, path: Path) -> None:
    """Throughput and completion times over the number of fetches."""
    draw(CHART, list(_drawn(result)), "concurrency; medians, least and greatest", path)


def _drawn(result: Json) -> Iterator[Json]:
    """Each level twice: once for each panel."""
    for title, name, factor in PANELS:
        for level in result["levels"]:
            drawn = {key: value * factor for key, value in level[name].items()}
            yield {"panel": title, "transport": level["transport"], "count": level["count"], "drawn": drawn}


PANELS = (
    ("GB/s of all together, each round", "throughput_bytes_per_s", 1e-9),
    ("ms until each fetch was complete, all rounds", "ended_s", 1e3),
)
CHART = Chart(
    Kind.LINES, "count", "drawn", "", "transport", column="panel", across_title="fetches at once", is_log=True
)
