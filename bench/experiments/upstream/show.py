"""Sections and chart of a result of `bench upstream`. Pure but for the chart's file."""

from __future__ import annotations

from pathlib import Path

from bench.core.plots import Chart, Kind, draw
from bench.core.show import Json, Section, table, targets


def show(result: Json) -> dict[str, Section]:
    """Times by service and way, ratios, and the targets."""
    rows = _rows(result)
    ratios = [
        {"service": name, **service["ratios"], "asked": service["asked_over_needed"]}
        for name, service in result["upstream"].items()
    ]
    settings = result["settings"]
    about = (
        f"N = {settings['chunk_count']}, L = {settings['num_layers']}, S = {settings['per_layer_chunk_bytes'] // 1024} "
        f"KiB, {settings['runs']} rounds, transport {settings['transport']}; medians with extremes."
    )
    return {
        "upstream": (
            about,
            table(
                rows,
                "service | way | first layer, ms = first_layer_s:ms | whole prefix, ms = whole_s:ms | "
                "GB/s = bytes_per_s:GB/s",
            ),
            *(f"Not here: {name}: {reason}." for name, reason in result["absent"].items()),
        ),
        "upstream-ratios": (
            table(
                ratios,
                "service | cold over native = cold_over_native:.2 | "
                "first layer over native = first_layer_over_native:.2 | "
                "cache's files over native = cache_over_native:.2 | "
                "DRAM over native = dram_over_native:.2 | "
                "DRAM over embedded DRAM = dram_over_embedded:.2 | bytes got over asked = asked:.3",
            ),
        ),
        "upstream-targets": (targets(result["targets"]),),
    }


def _rows(result: Json) -> list[Json]:
    return [
        {"service": name, "way": way, **found}
        for name, service in result["upstream"].items()
        for way, found in service["ways"].items()
    ]


def plot(result: Json, path: Path) -> None:
    """The time to the first layer and to the last byte, a panel for each service."""
    rows = [
        {**row, "what": what, "value": row[field]}
        for row in _rows(result)
        for what, field in (("first layer", "first_layer_s"), ("whole prefix", "whole_s"))
    ]
    draw(CHART, rows, "upstream; a prefix from another S3 service", path)


CHART = Chart(Kind.LYING, "way", "value", "ms", "what", row="service", scale=1e3)
