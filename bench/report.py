"""From samples to a table, JSON and a chart. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.ratios import FURTHER, MEMCPY, TARGETS, FirstLayer, Ratio, first_layers, grain_ratios, ratios
from bench.samples import Measurement, Spread, State, spread
from descriptors.units import GIB, KIB, MIB

__all__ = ["Report", "Spread", "format_bytes", "plot", "spread", "table", "to_json"]
OURS = ("shm_", "ucx_", "http_")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run of a benchmark found out. `problem` is what verification found, None when all bytes were
    right; `origin` is commit and machine; `settings` has what it takes to run the same again; `missing` gives the
    reasons of peers that could not run; `remarks` say how a state was made; peak memory is the server's, by phase.
    """

    bench: str
    origin: Mapping[str, Any]
    settings: Mapping[str, Any]
    measurements: Sequence[Measurement]
    layer_bytes: int
    missing: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    server_peak_rss_bytes: Mapping[str, int | None] = field(default_factory=dict)
    problem: str | None = None

    @property
    def measured(self) -> list[Measurement]:
        """Those with samples."""
        return [each for each in self.measurements if each.samples]

    def ratios(self) -> dict[str, Ratio]:
        """Those with targets, under the names they are asked for by."""
        grain = grain_ratios(self.measured)
        first = next(iter(grain))
        return {**ratios(self.measured, self.missing, TARGETS), first: grain[first]}

    def further_ratios(self) -> dict[str, Ratio]:
        """The others that were measured."""
        found = {**ratios(self.measured, self.missing, FURTHER), **grain_ratios(self.measured)}
        return {name: ratio for name, ratio in found.items() if ratio.median is not None and ratio.target is None}

    def first_layers(self) -> dict[str, FirstLayer]:
        """Times to the first layer against their limit."""
        return first_layers(self.measured, self.layer_bytes)


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values, raw samples included."""
    return {
        "bench": report.bench,
        "verified": report.problem is None,
        "problem": report.problem,
        **report.origin,
        "settings": dict(report.settings),
        "remarks": dict(report.remarks),
        "ratios": {name: ratio.median for name, ratio in report.ratios().items()},
        "ratio_details": {name: _ratio_json(ratio) for name, ratio in report.ratios().items()},
        "further_ratios": {name: _ratio_json(ratio) for name, ratio in report.further_ratios().items()},
        "first_layers": {
            key: {**asdict(first), "is_met": first.is_met} for key, first in report.first_layers().items()
        },
        "peers_missing": dict(report.missing),
        "server_peak_rss_bytes": dict(report.server_peak_rss_bytes),
        "measurements": {each.key: _measurement_json(each) for each in report.measured},
    }


def table(report: Report) -> str:
    """The report for people: settings, one line a measurement, ratios, memory and verdict."""
    lines = [
        f"{report.bench}, one round not counted, {_counts(report.measured)}",
        *(f"{name}: {_plain(value)}" for name, value in {**report.origin, "settings": report.settings}.items()),
        *(f"{state}: {remark}" for state, remark in report.remarks.items()),
        "",
        f"{'':44}{'GB/s':>8}{'min':>8}{'max':>8}{'ms':>10}{'1st layer':>11}",
    ]
    lines += [_row(measurement) for measurement in report.measured]
    lines += ["", f"{'ratio of throughputs, by rounds':44}{'median':>8}{'min':>8}{'max':>8}{'target':>8}"]
    lines += [_ratio_row(name, ratio) for name, ratio in report.ratios().items()]
    lines += [_ratio_row(name, ratio) for name, ratio in report.further_ratios().items()]
    lines += ["", f"{'first layer, ms':44}{'median':>8}{'limit':>8}"]
    for key, first in report.first_layers().items():
        lines.append(f"{key:44}{first.median_s * 1e3:8.2f}{first.limit_s * 1e3:8.2f}  {_met(first.is_met)}")
    lines += ["", *(f"{name} did not run: {reason}" for name, reason in report.missing.items())]
    for phase, peak in report.server_peak_rss_bytes.items():
        lines.append(f"server's peak memory, {phase}: {'unknown' if peak is None else format_bytes(peak)}")
    lines += ["every byte verified" if report.problem is None else f"WRONG BYTES: {report.problem}"]
    return "\n".join(lines)


def plot(report: Report, path: Path) -> None:
    """Bars of the throughputs, a panel for each state, whiskers from least to greatest. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels = [(state, [each for each in report.measured if each.state is state]) for state in State]
    panels = [(state, found) for state, found in panels if found]
    heights = [len(found) + 1 for _, found in panels]
    figure = Figure(figsize=(10, 0.32 * sum(heights) + 1.5), layout="constrained")
    grid = figure.subplots(max(1, len(panels)), 1, squeeze=False, sharex=True, height_ratios=heights or [1])
    for axes, (state, found) in zip(grid[:, 0], panels, strict=False):
        spreads = [spread([rate / 1e9 for rate in each.rates_bytes_per_s()]) for each in found]
        names = [each.key.removeprefix(f"{state.value}/").replace("_", " ") for each in found]
        whiskers = [[each.median - each.min for each in spreads], [each.max - each.median for each in spreads]]
        colors = ["tab:blue" if each.name.startswith(OURS) else _color_of(each.name) for each in found]
        bars = axes.barh(names, [each.median for each in spreads], xerr=whiskers, color=colors, capsize=2)
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=7)
        axes.tick_params(labelsize=7)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_title(state.value.replace("_", " "), fontsize=9, loc="left")
    grid[-1, 0].set_xlabel("GB/s, median; whiskers: least and greatest. Blue: ours, grey: raw limits, orange: peers")
    figure.suptitle(f"{report.bench}, {_counts(report.measured)}")
    figure.savefig(path, dpi=120)


def format_bytes(nbytes: int) -> str:
    """Bytes for people, in binary units."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _color_of(name: str) -> str:
    return "tab:gray" if name == MEMCPY or name.startswith("raw_") else "tab:orange"


def _measurement_json(measurement: Measurement) -> dict[str, Any]:
    first_layers_s = measurement.first_layers_s()
    return {
        "name": measurement.name,
        "state": measurement.state.value,
        "chunk_tokens": measurement.chunk_tokens,
        "nbytes": measurement.nbytes,
        "note": measurement.note,
        "sample_count": len(measurement.samples),
        "throughput_bytes_per_s": asdict(spread(measurement.rates_bytes_per_s())),
        "duration_s": asdict(spread([sample.duration_s for sample in measurement.samples])),
        "first_layer_s": asdict(spread(first_layers_s)) if first_layers_s else None,
        "samples": [asdict(sample) for sample in measurement.samples],
    }


def _ratio_json(ratio: Ratio) -> dict[str, Any]:
    return {**asdict(ratio), "is_met": ratio.is_met}


def _row(measurement: Measurement) -> str:
    values = _measurement_json(measurement)
    rate, first = values["throughput_bytes_per_s"], values["first_layer_s"]
    first_layer = "-" if first is None else f"{first['median'] * 1e3:.2f}"
    return (
        f"{measurement.key:44}{rate['median'] / 1e9:8.3f}{rate['min'] / 1e9:8.3f}{rate['max'] / 1e9:8.3f}"
        f"{values['duration_s']['median'] * 1e3:10.2f}{first_layer:>11}"
        + (f"  {measurement.note}" if measurement.note else "")
    )


def _ratio_row(name: str, ratio: Ratio) -> str:
    target = "" if ratio.target is None else f"{ratio.target:8.2f}  {_met(ratio.is_met)}"
    if ratio.median is None or ratio.least is None or ratio.greatest is None:
        return f"{name:44}{'-':>8}{'':16}{target}  ({ratio.reason})"
    figures = f"{ratio.median:8.2f}{ratio.least:8.2f}{ratio.greatest:8.2f}"
    return f"{name:44}{figures}{target or ' ' * 8}  ({ratio.ours} over {ratio.theirs})"


def _met(is_met: bool | None) -> str:
    return {True: "met", False: "missed", None: ""}[is_met]


def _counts(measurements: Sequence[Measurement]) -> str:
    counts = sorted({len(measurement.samples) for measurement in measurements})
    return f"samples: {'-'.join(map(str, counts)) or 0}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return str(value)
