"""From samples to median, spread and ratios; to a table, JSON and a chart. Pure but for the chart's file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from descriptors.units import GIB, KIB, MIB

MEMCPY = "memcpy"
RATIOS = {
    "ucx_over_raw_nixl_write": ("ucx_layer_major", "raw_nixl_write_layer"),
    "ucx_over_raw_nixl_write_payload": ("ucx_layer_major", "raw_nixl_write_payload"),
    "ucx_over_memcpy": ("ucx_layer_major", MEMCPY),
    "ucx_over_naive_range_gets": ("ucx_layer_major", "naive_range_gets"),
    "ucx_chunk_major_over_memcpy": ("ucx_chunk_major", MEMCPY),
    "http_over_raw_socket": ("http_layer_major", "raw_socket"),
    "http_over_memcpy": ("http_layer_major", MEMCPY),
    "http_over_naive_range_gets": ("http_layer_major", "naive_range_gets"),
    "http_chunk_major_over_memcpy": ("http_chunk_major", MEMCPY),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: seconds until every byte was there, and until the first layer was, where that is a meaningful time."""

    duration_s: float
    first_layer_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """Counted runs of one thing, each of `nbytes`; `note` says what is not obvious about it."""

    name: str
    nbytes: int
    samples: tuple[Sample, ...]
    note: str = ""

    def rates_bytes_per_s(self) -> list[float]:
        """Throughput of each run."""
        return [self.nbytes / sample.duration_s for sample in self.samples]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of the same samples."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run of a benchmark found out. `problem` is what verification found, None when all bytes were
    right; `origin` is commit and machine; `settings` has what it takes to run the same again.
    """

    bench: str
    origin: Mapping[str, Any]
    settings: Mapping[str, Any]
    measurements: Sequence[Measurement]
    layer_bytes: int
    server_peak_rss_bytes: int | None = None
    problem: str | None = None


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest. Raises ValueError without a value."""
    if not values:
        raise ValueError("no samples")
    return Spread(statistics.median(values), min(values), max(values))


def ratios(measurements: Sequence[Measurement]) -> dict[str, Spread]:
    """Throughput over throughput, for the pairs of RATIOS of which both were measured: the ratio of the medians, and
    the least and greatest ratio of two runs of the same round.
    """
    found = {measurement.name: measurement.rates_bytes_per_s() for measurement in measurements if measurement.samples}
    result = {}
    for name, (ours, theirs) in RATIOS.items():
        if ours in found and theirs in found:
            paired = [mine / other for mine, other in zip(found[ours], found[theirs], strict=False)]
            median = statistics.median(found[ours]) / statistics.median(found[theirs])
            result[name] = Spread(median, min(paired), max(paired))
    return result


def expected_s(nbytes: int, measurements: Sequence[Measurement]) -> float | None:
    """Seconds that one copy of `nbytes` takes at the median copy rate; None while that is not known."""
    for measurement in measurements:
        if measurement.name == MEMCPY and measurement.samples:
            return nbytes / statistics.median(measurement.rates_bytes_per_s())
    return None


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values, raw samples included."""
    found = ratios(report.measurements)
    return {
        "bench": report.bench,
        "state": "warm",
        "verified": report.problem is None,
        "problem": report.problem,
        **report.origin,
        "settings": dict(report.settings),
        "ratios": {name: ratio.median for name, ratio in found.items()},
        "ratio_spreads": {name: asdict(ratio) for name, ratio in found.items()},
        "server_peak_rss_bytes": report.server_peak_rss_bytes,
        "measurements": {m.name: _measurement_json(m, report) for m in report.measurements if m.samples},
    }


def table(report: Report) -> str:
    """The report for people: settings, one line a measurement, ratios, memory and verdict."""
    lines = [
        f"{report.bench}, warm (stored moments ago, one round not counted), {_counts(report.measurements)}",
        *(f"{name}: {_plain(value)}" for name, value in {**report.origin, "settings": report.settings}.items()),
        "",
        f"{'':24}{'GB/s':>8}{'min':>8}{'max':>8}{'ms':>10}{'expected':>10}{'1st layer':>11}{'expected':>10}",
    ]
    lines += [_row(measurement, report) for measurement in report.measurements if measurement.samples]
    lines += ["  (median of the runs; expected: ms for one copy of the bytes, bytes / memcpy rate)", ""]
    lines += [f"{'ratio of throughputs':32}{'medians':>8}{'min':>8}{'max':>8}"]
    for name, ratio in ratios(report.measurements).items():
        lines.append(f"{name:32}{ratio.median:8.2f}{ratio.min:8.2f}{ratio.max:8.2f}")
    peak = report.server_peak_rss_bytes
    lines += ["", f"server peak RSS: {'unknown' if peak is None else format_bytes(peak)}"]
    lines += ["every byte verified" if report.problem is None else f"WRONG BYTES: {report.problem}"]
    return "\n".join(lines)


def plot(report: Report, path: Path) -> None:
    """A bar chart of the throughputs, whiskers from least to greatest. Needs matplotlib (the extra `plot`)."""
    from matplotlib.figure import Figure

    measured = [measurement for measurement in report.measurements if measurement.samples]
    spreads = [spread([rate / 1e9 for rate in measurement.rates_bytes_per_s()]) for measurement in measured]
    figure = Figure(figsize=(9, 0.5 * len(measured) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    names = [measurement.name.replace("_", " ") for measurement in measured]
    whiskers = [[each.median - each.min for each in spreads], [each.max - each.median for each in spreads]]
    colors = ["tab:blue" if name.startswith(("ucx", "http")) else "tab:gray" for name in names]
    bars = axes.barh(names, [each.median for each in spreads], xerr=whiskers, color=colors, capsize=3)
    axes.bar_label(bars, fmt="%.2f", padding=4)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, median; whiskers: least and greatest")
    axes.set_title(f"{report.bench}, warm, {_counts(report.measurements)}")
    figure.savefig(path, dpi=120)


def format_bytes(nbytes: int) -> str:
    """Bytes for people, in binary units."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _measurement_json(measurement: Measurement, report: Report) -> dict[str, Any]:
    first_layers_s = [sample.first_layer_s for sample in measurement.samples if sample.first_layer_s is not None]
    return {
        "nbytes": measurement.nbytes,
        "note": measurement.note,
        "sample_count": len(measurement.samples),
        "throughput_bytes_per_s": asdict(spread(measurement.rates_bytes_per_s())),
        "duration_s": asdict(spread([sample.duration_s for sample in measurement.samples])),
        "expected_duration_s": expected_s(measurement.nbytes, report.measurements),
        "first_layer_s": asdict(spread(first_layers_s)) if first_layers_s else None,
        "expected_first_layer_s": expected_s(report.layer_bytes, report.measurements) if first_layers_s else None,
        "samples": [asdict(sample) for sample in measurement.samples],
    }


def _row(measurement: Measurement, report: Report) -> str:
    values = _measurement_json(measurement, report)
    rate, first = values["throughput_bytes_per_s"], values["first_layer_s"]
    return (
        f"{measurement.name:24}{rate['median'] / 1e9:8.3f}{rate['min'] / 1e9:8.3f}{rate['max'] / 1e9:8.3f}"
        f"{_milliseconds(values['duration_s']['median']):>10}{_milliseconds(values['expected_duration_s']):>10}"
        f"{_milliseconds(first['median'] if first else None):>11}{_milliseconds(values['expected_first_layer_s']):>10}"
        + (f"  {measurement.note}" if measurement.note else "")
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _counts(measurements: Sequence[Measurement]) -> str:
    counts = sorted({len(measurement.samples) for measurement in measurements if measurement.samples})
    return f"samples: {'-'.join(map(str, counts)) or 0}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return str(value)
