"""Samples of `bench s3` to medians, spreads and ratios, and how a result is shown. Pure but for the chart's file.

A sample is `count` requests that concerned `items` objects; percentiles of the requests' times; processor seconds of
the load and of the server's processes in the meantime.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.beds.s3_jobs import Kind
from bench.core import plots
from bench.core.show import NOT_MEASURED, Column, Json, Section, at, crossed, gbps, size, table, written
from descriptors.units import MIB, format_bytes
from objectcache.calibration.samples import Spread, spread

OURS = "ours"
RECEIVED = "ours_received"
"""GETs from our server, received as the raw socket's bytes are."""
RAW_SOCKET = "raw_socket"
RAW_RATIO_NBYTES = 32 * MIB
"""The size whose GET has a target against the raw socket."""
RAW_RATIOS = {OURS: "get_32mib", RECEIVED: "get_32mib_received", "canned": "get_32mib_canned"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation at one size and one number of requests in flight."""

    operation: Kind
    nbytes: int
    in_flight: int

    @property
    def name(self) -> str:
        """As in the JSON."""
        if self.operation is Kind.LIST:
            return "list"
        return f"{self.operation.value}_{format_bytes(self.nbytes).replace(' ', '').lower()}_x{self.in_flight}"


def cells_of(nbytes: Sequence[int], in_flight: Sequence[int], operations: Iterable[Kind | str]) -> list[Cell]:
    """PUTs and GETs, as far as they are among the operations, of each size and number in flight."""
    kinds = [kind for kind in (Kind.PUT, Kind.GET) if kind in set(map(Kind, operations))]
    return [Cell(kind, size, count) for size in nbytes for count in in_flight for kind in kinds]


def rate_of(name: str, sample: Json) -> float:
    """What is compared in the cell of that name: requests/s, or keys/s of the list."""
    return float(sample["items" if name == "list" else "count"] / sample["duration_s"])


def measurement_of(cell: Cell, samples: Sequence[Json]) -> dict[str, Any]:
    """Counted samples of one contender in one cell. Processor time is that of a request, for the list of a page."""
    rates = [rate_of(cell.name, sample) for sample in samples]
    is_list = cell.operation is Kind.LIST
    servers_s = [each["server_cpu_s"] and each["server_cpu_s"] / each["count"] for each in samples]
    return {
        "nbytes": cell.nbytes,
        "in_flight": cell.in_flight,
        "sample_count": len(samples),
        "keys_per_s" if is_list else "requests_per_s": spread(rates),
        "bytes_per_s": None if is_list else spread([rate * cell.nbytes for rate in rates]),
        "p50_s": statistics.median(each["p50_s"] for each in samples),
        "p99_s": statistics.median(each["p99_s"] for each in samples),
        "client_cpu_s_per_request": statistics.median(each["client_cpu_s"] / each["count"] for each in samples),
        "server_cpu_s_per_request": None if None in servers_s else statistics.median(servers_s),
        "samples": list(samples),
    }


def ratios(measurements: Mapping[str, Mapping[str, Json]]) -> dict[str, Spread]:
    """Rate over rate: ours over each other contender of the same cell, and of GETs of 32 MiB also ours received plainly
    and canned answers over the raw socket (at the number in flight where ours is worst off). The median is the ratio
    of medians; the extremes are those of samples of the same round.
    """
    found: dict[str, Spread] = {}
    over_raw_socket = []
    for cell, contenders in measurements.items():
        rates = {name: [rate_of(cell, each) for each in one["samples"]] for name, one in contenders.items()}
        for other in rates:
            if OURS in rates and other not in (OURS, RECEIVED):
                found[f"{cell}_ours_over_{other}"] = _ratio(rates[OURS], rates[other])
        if {OURS, RAW_SOCKET} <= set(rates) and contenders[OURS]["nbytes"] == RAW_RATIO_NBYTES:
            raw, able = rates[RAW_SOCKET], [name for name in RAW_RATIOS if name in rates]
            over_raw_socket.append({f"{RAW_RATIOS[name]}_over_raw_socket": _ratio(rates[name], raw) for name in able})
    worst = min(over_raw_socket, key=lambda ratios: ratios["get_32mib_over_raw_socket"].median, default={})
    return {**found, **worst}


def expected_per_s(cell: Cell, canned_per_s: float, disk: Json) -> float:
    """The most to expect of any server that keeps what it acknowledges: what the load reaches against canned answers;
    for a PUT also what the disk takes, with one sync for everything in flight.
    """
    if cell.operation is not Kind.PUT:
        return canned_per_s
    return min(canned_per_s, float(disk["write_bytes_per_s"]) / cell.nbytes, cell.in_flight / float(disk["sync_s"]))


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    paired = [a / b for a, b in zip(mine, theirs, strict=False)]
    return Spread(statistics.median(mine) / statistics.median(theirs), min(paired), max(paired))


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
    plots.draw(CHART, list(_rows(result)), "s3, warm; median, whiskers: least and greatest", path)


def _cells(result: Json) -> list[Cell]:
    settings = result["settings"]
    return cells_of(settings["nbytes"], settings["in_flight"], settings["operations"])


def _rows(result: Json) -> Iterator[dict[str, Any]]:
    """A row for each cell as measured, ours first."""
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


CHART = plots.Chart(
    plots.Kind.BARS,
    lambda row: "\n".join(row["cell"].split("_")[1:]) or "all keys",
    "rate_per_s",
    "requests/s, of lists keys/s",
    lambda row: row["name"].replace("_", " "),
    row=lambda row: row["cell"].split("_")[0],
    is_log=True,
)
