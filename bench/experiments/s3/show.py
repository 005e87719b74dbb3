"""Sections and chart of a result of `bench s3`. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.core.plots import Chart, Kind, draw
from bench.core.show import NOT_MEASURED, Column, Json, Section, at, crossed, gbps, size, table, written
from bench.experiments.s3.ratios import OURS, Cell, cells_of

FURTHER = {
    "get_32mib_over_raw_socket": "GETs of 32 MiB over a raw socket, as obstore receives them",
    "get_32mib_received_over_raw_socket": "the same, received as the raw socket's bytes are",
    "get_32mib_canned_over_raw_socket": "obstore's GETs of canned answers from memory over a raw socket",
    "list_ours_over_rgw": "lists of all keys over RGW's",
}


def show(result: Json) -> dict[str, Section]:
    """Everything measured, rates beside Ceph RGW, and ratios."""
    disk, ratios = result["disk"], result["ratio_spreads"]
    shown = {*FURTHER, *(f"{cell.name}_ours_over_rgw" for cell in _cells(result))}
    others = [name for name in ratios if name not in shown and not name.endswith("_over_canned")]
    seen = Column("seen", lambda name: ratios.get(name) or NOT_MEASURED)
    return {
        "measurements": (
            "warm (stored moments ago, one round not counted)",
            *(f"{name}: {peer['version']}; {peer['durability']}" for name, peer in result["peers"].items()),
            *(f"{name} is absent: {reason}" for name, reason in result["absent"].items()),
            f"disk: {disk['write_bytes_per_s'] / 1e9:.2f} GB/s written, {disk['sync_s'] * 1e3:.2f} ms a sync",
            table(
                _rows(result),
                "= cell | = name | 1/s = rate_per_s",
                Column("expected", lambda row: result["expected_per_s"].get(row["cell"])),
                Column("GB/s", lambda row: row["bytes_per_s"] and row["bytes_per_s"]["median"], gbps),
                "p50 ms = p50_s:ms | p99 ms = p99_s:ms | client us = client_cpu_s_per_request:us | "
                "server us = server_cpu_s_per_request:us | samples = sample_count",
            ),
            "Medians. 1/s: requests, for the list keys. us: processor time of a request, for the list of a page. "
            "expected: the load on canned answers and, for PUTs, the disk, measured before the counted rounds.",
        ),
        "s3": (
            crossed(_beside_rgw(result), "", lambda each: each[0], lambda each: each[1], lambda each: each[2]),
            table(FURTHER, Column("ratio", FURTHER.get), seen),
        ),
        "other-ratios": (table(others, Column("ratio of rates", lambda name: name.replace("_", " ")), seen),),
    }


def plot(result: Json, path: Path) -> None:
    """Rates of every cell as bars, one panel an operation."""
    draw(CHART, list(_rows(result)), "s3, warm; median, whiskers: least and greatest", path)


def _cells(result: Json) -> list[Cell]:
    settings = result["settings"]
    return cells_of(settings["nbytes"], settings["in_flight"], settings["operations"])


def _rows(result: Json) -> Iterator[dict[str, Any]]:
    """Of each cell as measured, ours first."""
    for cell, contenders in result["measurements"].items():
        for name, found in sorted(contenders.items(), key=lambda each: each[0] != OURS):
            rate = found["keys_per_s"] if cell == "list" else found["requests_per_s"]
            yield {"cell": cell, "name": name, "rate_per_s": rate, **found}


def _beside_rgw(result: Json) -> Iterator[tuple[str, str, str]]:
    """Line, column and cell of the table."""
    for cell in _cells(result):
        title = f"{cell.operation.name} {size(cell.nbytes)}"
        ours = at(result["measurements"].get(cell.name), "ours.requests_per_s.median")
        yield title, f"requests/s, {cell.in_flight} in flight", "" if ours is None else f"{ours:,.0f}"
        ratio = result["ratio_spreads"].get(f"{cell.name}_ours_over_rgw", NOT_MEASURED)
        yield title, f"over RGW, {cell.in_flight} in flight", written(ratio)


CHART = Chart(
    Kind.BARS,
    lambda row: "\n".join(row["cell"].split("_")[1:]) or "all keys",
    "rate_per_s",
    "requests/s, of lists keys/s",
    lambda row: row["name"].replace("_", " "),
    row=lambda row: row["cell"].split("_")[0],
    is_log=True,
)
