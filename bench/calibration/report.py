"""What a calibration came to: for people, as JSON, as a chart. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.calibration.costs import Costs, chunk_major_costs, layer_major_costs
from bench.calibration.decision import (
    CONFIDENCE,
    Curve,
    Sensitivity,
    Side,
    Theta,
    find_theta,
    make_curves,
    sensitivities,
    sign_changes,
)
from bench.calibration.points import Point
from bench.report import format_bytes
from bench.samples import State

RATIO_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True)
class OwnTheta:
    """The Theta that one curve alone would have."""

    state: State
    transport: str
    compute_s: float
    theta: Theta
    sign_changes: int


@dataclass(frozen=True, slots=True)
class TransportCosts:
    """Fitted costs of one transport in one state."""

    state: State
    transport: str
    chunk_major: Costs
    layer_major: Costs


@dataclass(frozen=True, slots=True)
class Calibration:
    """Theta and what follows from the same points; `origin` is date, commit and machine."""

    origin: Mapping[str, Any]
    settings: Mapping[str, Any]
    points: Sequence[Point]
    curves: Sequence[Curve]
    theta: Theta
    own_thetas: Sequence[OwnTheta]
    sensitivities: Sequence[Sensitivity]
    costs: Sequence[TransportCosts]
    missing: Mapping[str, str]
    remarks: Mapping[str, str]


def conclude(
    points: Sequence[Point],
    computes_s: Sequence[float],
    seed: int,
    origin: Mapping[str, Any],
    settings: Mapping[str, Any],
    missing: Mapping[str, str],
    remarks: Mapping[str, str],
) -> Calibration:
    """Everything that follows from the points. Raises ValueError where there are none or they make no sense."""
    curves = make_curves(points, computes_s)
    theta = find_theta(curves, seed)
    own = [
        OwnTheta(curve.state, curve.transport, curve.compute_s, find_theta([curve], seed), sign_changes(curve))
        for curve in curves
    ]
    costs = []
    for state, transport in dict.fromkeys((point.state, point.transport) for point in points):
        some = [point for point in points if (point.state, point.transport) == (state, transport)]
        costs.append(TransportCosts(state, transport, chunk_major_costs(some), layer_major_costs(some)))
    found = sensitivities(curves, theta.theta_bytes)
    return Calibration(origin, settings, points, curves, theta, own, found, costs, missing, remarks)


def table(calibration: Calibration) -> str:
    """The curve, Theta, what a wrong one costs, and the costs of a delivery."""
    lines = [f"{name}: {_plain(value)}" for name, value in calibration.origin.items()]
    lines += [f"{state}: {remark}" for state, remark in calibration.remarks.items()]
    lines += [f"{name} did not run: {reason}" for name, reason in calibration.missing.items()]
    computes = sorted({curve.compute_s for curve in calibration.curves})
    heads = "".join(f"{f'{compute_s * 1e6:g} us a layer':>16}" for compute_s in computes)
    lines += [
        "",
        "medians of the rounds, ms; for each compute time what layer-major saves of TTFT (Eq. 3)",
        f"{'state':12}{'over':6}{'W':>10}  {'chunks':22}{'N':>6}"
        f"{'chunk-major':>12}{'layer-major':>12}{'1st layer':>10}{heads}",
    ]
    for state, transport in dict.fromkeys((point.state, point.transport) for point in calibration.points):
        lines += _curve_rows(calibration, state, transport)
    lines += ["", *_theta_lines(calibration), "", *_sensitivity_lines(calibration), "", *_cost_lines(calibration)]
    return "\n".join(lines)


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Plain values, raw samples included."""
    return {
        "bench": "calibrate",
        "verified": True,
        **calibration.origin,
        "settings": dict(calibration.settings),
        "remarks": dict(calibration.remarks),
        "missing": dict(calibration.missing),
        "theta": {**asdict(calibration.theta), "side": calibration.theta.side.value, "confidence": CONFIDENCE},
        "own_thetas": [
            {
                **asdict(own),
                "state": own.state.value,
                "theta": {**asdict(own.theta), "side": own.theta.side.value},
            }
            for own in calibration.own_thetas
        ],
        "sensitivity": [
            {**asdict(each), "theta_bytes": each.theta_bytes if np.isfinite(each.theta_bytes) else None}
            for each in calibration.sensitivities
        ],
        "costs": [{**asdict(each), "state": each.state.value} for each in calibration.costs],
        "points": [{**asdict(point), "state": point.state.value} for point in calibration.points],
    }


def plot(calibration: Calibration, path: Path) -> None:
    """TTFT of chunk-major over layer-major's, a panel for each state and transport, with Theta. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    states = list(dict.fromkeys(curve.state for curve in calibration.curves))
    transports = list(dict.fromkeys(curve.transport for curve in calibration.curves))
    figure = Figure(figsize=(1.5 + 4.5 * len(transports), 1.5 + 3.2 * len(states)), layout="constrained")
    panels = figure.subplots(len(states), len(transports), squeeze=False, sharex=True)
    theta = calibration.theta
    for curve in calibration.curves:
        axes = panels[states.index(curve.state), transports.index(curve.transport)]
        ratios = curve.chunk_major_s / curve.layer_major_s
        middle = np.median(curve.chunk_major_s, axis=0) / np.median(curve.layer_major_s, axis=0)
        reach = np.abs(np.quantile(ratios, [0.1, 0.9], axis=0) - middle)
        name = f"{curve.compute_s * 1e6:g} µs a layer"
        axes.errorbar(curve.payload_bytes, middle, reach, fmt="o", markersize=3, linewidth=0.8, capsize=2, label=name)
        axes.set_title(f"{curve.state.value.replace('_', ' ')}, {curve.transport}", fontsize=9)
    for axes in panels.flat:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_ylim(1 / RATIO_SHOWN_MAX, RATIO_SHOWN_MAX)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.axhline(1, color="black", linewidth=0.6)
        axes.axvline(theta.theta_bytes, color="tab:red", linewidth=1)
        axes.axvspan(theta.low_bytes, theta.high_bytes, color="tab:red", alpha=0.12)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(int(value))))
        axes.tick_params(labelsize=7)
    panels[0, 0].legend(fontsize=7)
    figure.supylabel("TTFT of chunk-major over layer-major's; above 1: layer-major is faster", fontsize=8)
    figure.supxlabel("payload W", fontsize=8)
    figure.suptitle(
        f"Theta {format_bytes(theta.theta_bytes)} ({theta.side.value.replace('_', ' ')}), red: its interval"
    )
    figure.savefig(path, dpi=120)


def _curve_rows(calibration: Calibration, state: State, transport: str) -> list[str]:
    points = sorted(
        (point for point in calibration.points if (point.state, point.transport) == (state, transport)),
        key=lambda point: point.payload_bytes,
    )
    curves = sorted(
        (curve for curve in calibration.curves if (curve.state, curve.transport) == (state, transport)),
        key=lambda curve: curve.compute_s,
    )
    rows = []
    for column, point in enumerate(points):
        chunk_ms = np.median([run.chunk_major_s for run in point.runs]) * 1e3
        layer_ms = np.median([max(run.layers_s) for run in point.runs]) * 1e3
        first_ms = np.median([run.layers_s[0] for run in point.runs]) * 1e3
        saved = ""
        for curve in curves:
            gain_s = np.median(curve.chunk_major_s[:, column]) - np.median(curve.layer_major_s[:, column])
            share = gain_s / min(np.median(curve.chunk_major_s[:, column]), np.median(curve.layer_major_s[:, column]))
            saved += f"{gain_s * 1e3:9.2f}{share:+7.0%}"
        rows.append(
            f"{state.value:12}{transport:6}{format_bytes(point.payload_bytes):>10}  {point.family:22}"
            f"{point.chunk_count:6}{chunk_ms:12.2f}{layer_ms:12.2f}{first_ms:10.2f}{saved}"
        )
    return rows


def _theta_lines(calibration: Calibration) -> list[str]:
    lines = [f"Theta for all of it: {_theta_text(calibration.theta)}", "alone, each would have:"]
    lines += [
        f"  {own.state.value:12}{own.transport:6}{own.compute_s * 1e6:6g} us a layer: {_theta_text(own.theta)};"
        f" the better order changes {own.sign_changes} times"
        for own in calibration.own_thetas
    ]
    return lines


def _theta_text(theta: Theta) -> str:
    where = {
        Side.BETWEEN: "",
        Side.BELOW_ALL: "; layer-major was better from the smallest payload on: Theta may be less",
        Side.ABOVE_ALL: "; chunk-major was better up to the largest payload: Theta may be more",
    }[theta.side]
    interval = f"{format_bytes(theta.low_bytes)} to {format_bytes(theta.high_bytes)}"
    return f"{format_bytes(theta.theta_bytes)} ({CONFIDENCE:.0%} of resampled rounds: {interval}{where})"


def _sensitivity_lines(calibration: Calibration) -> list[str]:
    lines = [
        "how TTFT changes with another Theta, and how far it is from always choosing right",
        f"{'':20}{'bytes':>12}{'mean':>8}{'worst':>8}{'ms':>8}{'over best':>11}  worst case",
    ]
    for each in calibration.sensitivities:
        size = format_bytes(int(each.theta_bytes)) if np.isfinite(each.theta_bytes) else "-"
        lines.append(
            f"{each.name:20}{size:>12}{each.mean_change:+8.1%}{each.worst_change:+8.1%}"
            f"{each.worst_change_s * 1e3:8.2f}{each.mean_cost:11.1%}"
            f"  {each.worst_case if each.worst_change > 0 else '-'}"
        )
    return lines


def _cost_lines(calibration: Calibration) -> list[str]:
    lines = [
        "costs of a delivery (least squares): request + N chunks + L layers + bytes/rate",
        f"{'':32}{'request us':>12}{'chunk us':>10}{'layer us':>10}{'GB/s':>8}{'error':>8}",
    ]
    for each in calibration.costs:
        for order, costs in (("chunk-major", each.chunk_major), ("layer-major", each.layer_major)):
            lines.append(
                f"{each.state.value:12}{each.transport:6}{order:14}{costs.request_s * 1e6:12.0f}"
                f"{costs.chunk_s * 1e6:10.2f}{costs.layer_s * 1e6:10.1f}{costs.bytes_per_s / 1e9:8.2f}"
                f"{costs.error:8.1%}"
            )
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(entry)}" for name, entry in value.items())
    return str(value)
