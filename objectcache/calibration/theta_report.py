"""The result of a calibration of Theta: what follows from its points, its text, and its chart. Pure but for the chart's
file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from descriptors.units import format_bytes
from objectcache.calibration.charts import chart
from objectcache.calibration.knee import Side
from objectcache.calibration.text import aligned, plain_text
from objectcache.calibration.theta import (
    CONFIDENCE,
    by_place,
    costs,
    find_theta,
    make_curves,
    sensitivities,
    sign_changes,
)

Json = Mapping[str, Any]
ORIGIN = ("measured_at", "commit", "has_local_changes", "machine")
ORDERS = {"chunk_major": "chunk-major", "layer_major": "layer-major"}
RATIO_SHOWN_MAX = 4
_WHERE = {
    Side.BETWEEN.value: "",
    Side.BELOW_ALL.value: "; layer-major was better from the smallest payload on: Theta may be less",
    Side.ABOVE_ALL.value: "; chunk-major was better up to the largest payload: Theta may be more",
}


def conclude(found: Json, computes_s: Sequence[float], seed: int, origin: Json, settings: Json) -> dict[str, Any]:
    """Everything that follows from what `measure` found, as plain values, raw samples included. Raises ValueError where
    there are no points or they make no sense.
    """
    curves = make_curves(found["points"], computes_s)
    cases = list(chain(*curves))
    theta = find_theta(cases, seed)
    return {
        "bench": "calibrate",
        "verified": True,
        **origin,
        "settings": dict(settings),
        "remarks": found["remarks"],
        "missing": found["missing"],
        "theta": {**theta, "confidence": CONFIDENCE},
        "own_thetas": [
            {
                **dict(zip(("state", "transport", "compute_s"), curve[0].curve, strict=True)),
                "theta": find_theta(curve, seed),
                "sign_changes": sign_changes(curve),
            }
            for curve in curves
        ],
        "sensitivity": sensitivities(cases, theta["theta_bytes"]),
        "costs": [
            {"state": state, "transport": transport, **costs(some)}
            for (state, transport), some in by_place(found["points"]).items()
        ],
        "points": found["points"],
    }


def table(result: Json) -> str:
    """The curve, Theta, what a wrong one costs, and the costs of a delivery."""
    heads = ["state", "over", "W", "chunks", "N", "chunk-major", "layer-major", "1st layer"]
    heads += [f"{compute_us:g} us a layer" for compute_us in sorted(result["settings"]["compute_us"])]
    lines = [f"{name}: {plain_text(result[name])}" for name in ORIGIN]
    lines += [f"{state}: {remark}" for state, remark in result["remarks"].items()]
    lines += [f"{name} did not run: {reason}" for name, reason in result["missing"].items()]
    lines += ["", "medians of the rounds, ms; for each compute time what layer-major saves of TTFT (Eq. 3)"]
    lines += aligned(heads, _curve_rows(result))
    lines += ["", f"Theta for all of it: {_theta_text(result['theta'])}", "alone, each would have:"]
    lines += [
        f"  {own['state']}, {own['transport']}, {own['compute_s'] * 1e6:g} us a layer: "
        f"{_theta_text(own['theta'])}; the better order changes {own['sign_changes']} times"
        for own in result["own_thetas"]
    ]
    lines += ["", "how TTFT changes with another Theta, and how far it is from always choosing right"]
    heads = ["Theta", "bytes", "mean", "worst", "ms", "over best", "worst case"]
    lines += aligned(heads, [_sensitivity_row(each) for each in result["sensitivity"]])
    lines += ["", "costs of a delivery (least squares): request + N chunks + L layers + bytes/rate"]
    heads = ["state", "over", "order", "request us", "chunk us", "layer us", "GB/s", "error"]
    lines += aligned(heads, [_cost_row(each, order) for each in result["costs"] for order in ORDERS])
    return "\n".join(lines)


def plot(result: Json, path: Path) -> None:
    """TTFT of chunk-major over layer-major's, a panel for each state and transport, with Theta. Needs matplotlib."""
    from matplotlib.ticker import FuncFormatter

    curves = make_curves(result["points"], _computes_s(result))
    states, transports = (list(dict.fromkeys(curve[0].curve[at] for curve in curves)) for at in (0, 1))
    theta = result["theta"]
    title = f"Theta {format_bytes(theta['theta_bytes'])} ({theta['side'].replace('_', ' ')}), red: its interval"
    size = (1.5 + 4.5 * len(transports), 1.5 + 3.2 * len(states))
    with chart(path, title, size, len(states), len(transports), sharex=True) as panels:
        for curve in curves:
            state, transport, compute_s = curve[0].curve
            axes = panels[states.index(state), transports.index(transport)]
            middle = np.array([np.median(each.chunk_major_s) / np.median(each.layer_major_s) for each in curve])
            ratios = [np.quantile(each.chunk_major_s / each.layer_major_s, [0.1, 0.9]) for each in curve]
            style: dict[str, Any] = {"fmt": "o", "markersize": 3, "linewidth": 0.8, "capsize": 2}
            reach = np.abs(np.array(ratios).T - middle)
            sizes = [each.payload_bytes for each in curve]
            axes.errorbar(sizes, middle, reach, label=f"{compute_s * 1e6:g} µs a layer", **style)
            axes.set_title(f"{state.replace('_', ' ')}, {transport}", fontsize=9)
        for axes in panels.flat:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_ylim(1 / RATIO_SHOWN_MAX, RATIO_SHOWN_MAX)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(int(value))))
            axes.axhline(1, color="black", linewidth=0.6)
            axes.axvline(theta["theta_bytes"], color="tab:red", linewidth=1)
            axes.axvspan(theta["low_bytes"], theta["high_bytes"], color="tab:red", alpha=0.12)
            axes.tick_params(labelsize=7)
        panels[0, 0].legend(fontsize=7)
        figure = panels[0, 0].figure
        figure.supylabel("TTFT of chunk-major over layer-major's; above 1: layer-major is faster", fontsize=8)
        figure.supxlabel("payload W", fontsize=8)


def _computes_s(result: Json) -> list[float]:
    return [compute_us / 1e6 for compute_us in sorted(result["settings"]["compute_us"])]


def _curve_rows(result: Json) -> list[list[str]]:
    """A row for each point, by place and payload: its times, and a cell for each compute time."""
    rows: dict[int, list[str]] = {}
    for case in chain(*make_curves(result["points"], _computes_s(result))):
        point = case.point
        row = rows.setdefault(id(point), [])
        if not row:
            runs = [(run["chunk_major_s"], max(run["layers_s"]), run["layers_s"][0]) for run in point["runs"]]
            row += [point["state"], point["transport"], format_bytes(case.payload_bytes), point["family"]]
            row += [str(point["chunk_count"]), *(f"{each * 1e3:.2f}" for each in np.median(runs, axis=0))]
        chunk_s, layer_s = np.median(case.chunk_major_s), np.median(case.layer_major_s)
        row.append(f"{(chunk_s - layer_s) * 1e3:.2f} {(chunk_s - layer_s) / min(chunk_s, layer_s):+.0%}")
    return list(rows.values())


def _theta_text(theta: Json) -> str:
    interval = f"{format_bytes(theta['low_bytes'])} to {format_bytes(theta['high_bytes'])}{_WHERE[theta['side']]}"
    return f"{format_bytes(theta['theta_bytes'])} ({CONFIDENCE:.0%} of resampled rounds: {interval})"


def _sensitivity_row(each: Json) -> list[str]:
    return [
        each["name"],
        "-" if each["theta_bytes"] is None else format_bytes(int(each["theta_bytes"])),
        f"{each['mean_change']:+.1%}",
        f"{each['worst_change']:+.1%}",
        f"{each['worst_change_s'] * 1e3:.2f}",
        f"{each['mean_cost']:.1%}",
        each["worst_case"] if each["worst_change"] > 0 else "-",
    ]


def _cost_row(each: Json, order: str) -> list[str]:
    costs = each[order]
    times = f"{costs['request_s'] * 1e6:.0f}", f"{costs['chunk_s'] * 1e6:.2f}", f"{costs['layer_s'] * 1e6:.1f}"
    rate, error = f"{costs['bytes_per_s'] / 1e9:.2f}", f"{costs['error']:.1%}"
    return [each["state"], each["transport"], ORDERS[order], *times, rate, error]
