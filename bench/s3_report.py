"""Samples of `bench s3` to medians, spreads and ratios; to a table, JSON and a chart. Pure but for the chart's file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bench.report import Spread, format_bytes, spread
from descriptors.units import MIB

OURS = "ours"
RECEIVED = "ours_received"
"""GETs from our server, received as the raw socket's bytes are."""
RAW_SOCKET = "raw_socket"
RAW_RATIO_NBYTES = 32 * MIB
"""The size whose GET has a target against the raw socket."""


class Operation(Enum):
    """What is asked of a server."""

    PUT = "put"
    GET = "get"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation at one size and one number of requests in flight."""

    operation: Operation
    nbytes: int
    in_flight: int

    @property
    def name(self) -> str:
        """As in the JSON."""
        if self.operation is Operation.LIST:
            return "list"
        return f"{self.operation.value}_{format_bytes(self.nbytes).replace(' ', '').lower()}_x{self.in_flight}"


@dataclass(frozen=True, slots=True)
class Disk:
    """What the file system under the stores does for a plain program: bytes/s with one sync at the end, and the time of
    one small write with its sync.
    """

    write_bytes_per_s: float
    sync_s: float


@dataclass(frozen=True, slots=True)
class S3Sample:
    """`count` requests that concerned `items` objects; percentiles of the requests' times; processor seconds of the
    load and of the server's processes in the meantime.
    """

    duration_s: float
    count: int
    items: int
    p50_s: float
    p99_s: float
    client_cpu_s: float
    server_cpu_s: float | None

    def rate(self, cell: Cell) -> float:
        """What is compared: requests/s, or keys/s of a list."""
        return (self.items if cell.operation is Operation.LIST else self.count) / self.duration_s


@dataclass(frozen=True, slots=True)
class S3Measurement:
    """Counted samples of one contender in one cell."""

    cell: Cell
    name: str
    samples: tuple[S3Sample, ...]

    def rates(self) -> list[float]:
        """Of each sample."""
        return [sample.rate(self.cell) for sample in self.samples]

    def median(self, of: Callable[[S3Sample], float | None]) -> float | None:
        """The median of some figure of each sample; None where any is not known."""
        values = [of(sample) for sample in self.samples]
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class S3Report:
    """Everything one run found out. `absent` names the peers that could not take part, or only in part, with the
    reason; `expected` has the limits written down before the counted rounds; `problem` is None when all went well.
    """

    origin: Mapping[str, Any]
    settings: Mapping[str, Any]
    peers: Mapping[str, Mapping[str, str]]
    absent: Mapping[str, str]
    measurements: Sequence[S3Measurement]
    expected: Mapping[Cell, float]
    disk: Disk
    problem: str | None


def s3_ratios(measurements: Sequence[S3Measurement]) -> dict[str, Spread]:
    """Rate over rate: ours over each other contender of the same cell, and of GETs of 32 MiB also ours received plainly
    and canned answers over the raw socket (at the number in flight where ours is worst off). The median is the ratio
    of medians; the extremes are those of samples of the same round.
    """
    cells: dict[Cell, dict[str, list[float]]] = {}
    for measurement in measurements:
        cells.setdefault(measurement.cell, {})[measurement.name] = measurement.rates()
    found: dict[str, Spread] = {}
    for cell, rates in cells.items():
        for other in rates:
            if OURS in rates and other not in (OURS, RECEIVED):
                found[f"{cell.name}_ours_over_{other}"] = _ratio(rates[OURS], rates[other])
    return {**found, **_over_raw_socket(cells)}


def s3_json(report: S3Report) -> dict[str, Any]:
    """The report as plain values, raw samples included."""
    found = s3_ratios(report.measurements)
    measurements: dict[str, dict[str, Any]] = {}
    for measurement in report.measurements:
        measurements.setdefault(measurement.cell.name, {})[measurement.name] = _measurement_json(measurement)
    return {
        "bench": "s3",
        "state": "warm",
        "verified": report.problem is None,
        "problem": report.problem,
        **report.origin,
        "settings": dict(report.settings),
        "peers": {name: dict(peer) for name, peer in report.peers.items()},
        "absent": dict(report.absent),
        "disk": asdict(report.disk),
        "expected_per_s": {cell.name: value for cell, value in report.expected.items()},
        "ratios": {name: ratio.median for name, ratio in found.items()},
        "ratio_spreads": {name: asdict(ratio) for name, ratio in found.items()},
        "measurements": measurements,
    }


def s3_table(report: S3Report) -> str:
    """The report for people: one line for each cell and contender, ratios, peers and verdict."""
    found = s3_ratios(report.measurements)
    lines = [
        "s3, warm (stored moments ago, one round not counted)",
        *(f"{name}: {value}" for name, value in {**report.origin, "settings": report.settings}.items()),
        *(f"{name}: {peer['version']}; {peer['durability']}" for name, peer in report.peers.items()),
        *(f"{name} is absent: {reason}" for name, reason in report.absent.items()),
        f"disk: {report.disk.write_bytes_per_s / 1e9:.2f} GB/s written, {report.disk.sync_s * 1e3:.2f} ms a sync",
        "",
        f"{'':16}{'':14}{'1/s':>9}{'min':>9}{'max':>9}{'expected':>10}{'GB/s':>7}"
        f"{'p50 ms':>9}{'p99 ms':>9}{'client us':>11}{'server us':>11}{'samples':>9}",
    ]
    before = None
    for measurement in sorted(report.measurements, key=_place(report)):
        cell = measurement.cell
        lines.append(_row(measurement, "" if cell == before else cell.name, report.expected.get(cell)))
        before = cell
    lines += [
        "  (medians; 1/s: requests, for the list keys; us: processor time a request, for the list a page;",
        "   expected: the load on canned answers and, for PUTs, the disk, measured before the counted rounds)",
        "",
        f"{'ratio of rates':36}{'medians':>8}{'min':>8}{'max':>8}",
    ]
    for name, ratio in found.items():
        if not name.endswith("_over_canned"):
            lines.append(f"{name:36}{ratio.median:8.2f}{ratio.min:8.2f}{ratio.max:8.2f}")
    verdict = "every byte and every key verified" if report.problem is None else f"FAILED: {report.problem}"
    return "\n".join([*lines, "", verdict])


def s3_plot(report: S3Report, path: Path) -> None:
    """Rates of every cell as bars, one panel an operation, log scale. Needs matplotlib (the extra `plot`)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    operations = [each for each in Operation if any(m.cell.operation is each for m in report.measurements)]
    figure = Figure(figsize=(10, 3 * max(1, len(operations)) + 0.5), layout="constrained")
    colors = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(m.name for m in report.measurements))}
    for row, operation in enumerate(operations):
        axes = figure.add_subplot(len(operations), 1, row + 1)
        panel = [measurement for measurement in report.measurements if measurement.cell.operation is operation]
        cells = list(dict.fromkeys(measurement.cell for measurement in panel))
        for index, cell in enumerate(cells):
            bars = sorted((m for m in panel if m.cell == cell), key=lambda m: list(colors).index(m.name))
            spreads = [spread(measurement.rates()) for measurement in bars]
            width = 0.8 / len(bars)
            axes.bar(
                [index - 0.4 + (place + 0.5) * width for place in range(len(bars))],
                [each.median for each in spreads],
                width,
                yerr=[[each.median - each.min for each in spreads], [each.max - each.median for each in spreads]],
                color=[colors[measurement.name] for measurement in bars],
                capsize=2,
            )
        axes.set_xticks(range(len(cells)), [cell.name.replace("_", " ") for cell in cells], fontsize=8)
        axes.set_yscale("log")
        axes.set_ylabel("keys/s" if operation is Operation.LIST else "requests/s")
    handles = [Patch(color=color, label=name.replace("_", " ")) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), fontsize=8)
    figure.suptitle("s3, warm; median, whiskers: least and greatest", fontsize=10)
    figure.savefig(path, dpi=120)


def _over_raw_socket(cells: Mapping[Cell, Mapping[str, Sequence[float]]]) -> dict[str, Spread]:
    """The ratios that have a target, and those that tell HTTP, client and server apart."""
    found = []
    for cell, rates in cells.items():
        if cell.nbytes == RAW_RATIO_NBYTES and {OURS, RAW_SOCKET} <= set(rates):
            names = {OURS: "get_32mib", RECEIVED: "get_32mib_received", "canned": "get_32mib_canned"}
            found.append(
                {
                    f"{names[mine]}_over_raw_socket": _ratio(rates[mine], rates[RAW_SOCKET])
                    for mine in names
                    if mine in rates
                }
            )
    return min(found, key=lambda ratios: ratios["get_32mib_over_raw_socket"].median, default={})


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    paired = [a / b for a, b in zip(mine, theirs, strict=False)]
    return Spread(statistics.median(mine) / statistics.median(theirs), min(paired), max(paired))


def _measurement_json(measurement: S3Measurement) -> dict[str, Any]:
    cell = measurement.cell
    is_list = cell.operation is Operation.LIST
    return {
        "nbytes": cell.nbytes,
        "in_flight": cell.in_flight,
        "sample_count": len(measurement.samples),
        "keys_per_s" if is_list else "requests_per_s": asdict(spread(measurement.rates())),
        "bytes_per_s": None if is_list else asdict(spread([rate * cell.nbytes for rate in measurement.rates()])),
        "p50_s": measurement.median(lambda sample: sample.p50_s),
        "p99_s": measurement.median(lambda sample: sample.p99_s),
        "client_cpu_s_per_request": _client_cpu_s(measurement),
        "server_cpu_s_per_request": _server_cpu_s(measurement),
        "samples": [asdict(sample) for sample in measurement.samples],
    }


def _client_cpu_s(measurement: S3Measurement) -> float | None:
    return measurement.median(lambda sample: sample.client_cpu_s / sample.count)


def _server_cpu_s(measurement: S3Measurement) -> float | None:
    return measurement.median(
        lambda sample: None if sample.server_cpu_s is None else sample.server_cpu_s / sample.count
    )


def _place(report: S3Report) -> Callable[[S3Measurement], tuple[int, int]]:
    """Order of the table: cells as measured, contenders as started."""
    cells = list(dict.fromkeys(measurement.cell for measurement in report.measurements))
    names = list(dict.fromkeys([OURS, *(measurement.name for measurement in report.measurements)]))
    return lambda measurement: (cells.index(measurement.cell), names.index(measurement.name))


def _row(measurement: S3Measurement, cell_name: str, expected: float | None) -> str:
    cell, rate = measurement.cell, spread(measurement.rates())
    gigabytes = "-" if cell.operation is Operation.LIST else f"{rate.median * cell.nbytes / 1e9:.2f}"
    return (
        f"{cell_name:16}{measurement.name:14}{rate.median:9.0f}{rate.min:9.0f}{rate.max:9.0f}"
        f"{'-' if expected is None else f'{expected:.0f}':>10}{gigabytes:>7}"
        f"{_scaled(measurement.median(lambda sample: sample.p50_s), 1e3, 2):>9}"
        f"{_scaled(measurement.median(lambda sample: sample.p99_s), 1e3, 2):>9}"
        f"{_scaled(_client_cpu_s(measurement), 1e6, 0):>11}{_scaled(_server_cpu_s(measurement), 1e6, 0):>11}"
        f"{len(measurement.samples):9}"
    )


def _scaled(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
