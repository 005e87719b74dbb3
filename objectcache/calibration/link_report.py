"""The result of calibrating a link: its text, entries of the config file, and chart. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from descriptors.layout import ChunkLayout
from descriptors.units import format_bytes, gbps_from_bytes_per_s
from objectcache.calibration.charts import chart
from objectcache.calibration.knee import CONFIDENCE, Side, falling_curve
from objectcache.calibration.link import TOLERANCE, LinkPlan, increase_at, rounds_of, without_first
from objectcache.calibration.text import aligned, origin_entries, six_digits, spread_text
from storage_server.delivery.scheduler.policies import MARGIN_BYTES_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = Mapping[str, Any]
_BOUND = {
    Side.BETWEEN.value: "",
    Side.BELOW_ALL.value: ", at most: no rate was too low",
    Side.ABOVE_ALL.value: ", at least: TTFT still fell",
}


def link_result(plan: LinkPlan, found: Json, origin: Json, storage: Json) -> dict[str, Any]:
    """Plain values, raw samples included; `found` is that of `measure_links`."""
    settings = {**asdict(plan), "storage": dict(storage), "tolerance": TOLERANCE, "confidence": CONFIDENCE}
    return {"bench": "calibrate", "what": "link", "verified": True, **origin, "settings": settings, **found}


def link_table(result: Json) -> str:
    """The bytes per second of each transport, its knees, and the margin that follows from them."""
    plan, links = result["settings"], result["links"]
    payload = format_bytes(ChunkLayout(**plan["layout"]).delivery_bytes(plan["together_chunks"]))
    lines = [f"{name}: {text}" for name, text in origin_entries(result).items()]
    lines += [f"chunks are in: {result['state']}; every byte was compared"]
    lines += [f"{name} did not run: {reason}" for name, reason in result["missing"].items()]
    lines += ["", f"layer-major, payloads of {payload}, medians of {plan['runs']} rounds (least to greatest)"]
    lines += [
        f"{name}: {spread_text(rounds_of(link), '.2f', 1e-9)} GB/s, {plan['together']} requests at once"
        for name, link in links.items()
    ]
    lines += [
        "",
        "TTFT of one request held to a rate, computed from when its layers were there with compute windows c (Eq. 3;",
        f"first layer left out), over that at its largest rate; knee: within {TOLERANCE:.0%} of it, and "
        f"{CONFIDENCE:.0%} of resampled rounds",
    ]
    rows = [_swept_row(name, each) for name, link in links.items() for each in link["requests"]]
    lines += aligned(["over", "request", "s", "c, ms", "r*, Gbps", "at r*", "knee, Gbps", "interval"], rows)
    lines += ["", "margin over r*: median of the requests, none where negative (least to greatest)"]
    return "\n".join([*lines, *(_margin_line(name, link) for name, link in links.items())])


def scheduler_entries(link: Json) -> dict[str, str | int | float | bool]:
    """The table `[scheduler]`."""
    rates = {"link_bytes_per_s": link["bytes_per_s"], "margin_bytes_per_s": link["margin_bytes_per_s"]}
    return {name: six_digits(rate) for name, rate in rates.items()}


def plot_links(result: Json, path: Path) -> None:
    """Figure 15 of this machine: a row for each transport, a panel for each request. Needs matplotlib."""
    links = result["links"]
    columns = max(len(link["requests"]) for link in links.values())
    title = "TTFT of a layer-major request held to a rate, its first layer left out"
    with chart(path, title, (1 + 3.4 * columns, 1 + 2.8 * len(links)), len(links), columns) as panels:
        for (name, link), row in zip(links.items(), panels, strict=True):
            for each, axes in zip(link["requests"], row, strict=True):
                _panel(axes, link, each)
            row[0].set_ylabel(f"{name}: TTFT over the largest rate's, %", fontsize=8)
        panels[0][0].legend(fontsize=7)
        panels[0][0].figure.supxlabel("rate, Gbps", fontsize=8)


def _panel(axes: Axes, link: Json, swept: Json) -> None:
    samples = without_first(swept)
    curve = falling_curve(samples)
    least_s = curve[-1].ttft_s
    for points, style in ((samples, "."), (curve, "-")):
        at = [gbps_from_bytes_per_s(each.rate_bytes_per_s) for each in points]
        axes.plot(at, [100 * (each.ttft_s / least_s - 1) for each in points], style, color="tab:blue", markersize=3)
    star, knee = swept["zero_stall_bytes_per_s"], swept["knee"]
    for rate, style, color, name in (
        (star, "--", "black", "r*"),
        (star + link["margin_bytes_per_s"], "-.", "tab:red", "r* + the link's margin"),
        (star + link["paper_margin_bytes_per_s"], "-.", "tab:gray", "r* + 5 % of the link"),
        (knee["rate_bytes_per_s"], ":", "tab:green", "knee"),
    ):
        axes.axvline(gbps_from_bytes_per_s(rate), linestyle=style, color=color, linewidth=1, label=name)
    interval = (knee["low_bytes_per_s"], knee["high_bytes_per_s"])
    axes.axvspan(*map(gbps_from_bytes_per_s, interval), color="tab:green", alpha=0.15)
    highest = 100 * (curve[0].ttft_s / least_s - 1)
    axes.set_ylim(top=1.5 * max(highest, 1.0))  # single requests may be far above it
    axes.set_title(f"{swept['name']}, layers of {format_bytes(swept['layer_bytes'])}", fontsize=9)
    axes.tick_params(labelsize=7)


def _swept_row(transport: str, swept: Json) -> list[str]:
    star, knee = swept["zero_stall_bytes_per_s"], swept["knee"]
    interval = f"{_gbps(knee['low_bytes_per_s'])} to {_gbps(knee['high_bytes_per_s'])}{_BOUND[knee['side']]}"
    layer, window = format_bytes(swept["layer_bytes"]), f"{swept['compute_s'] * 1e3:.2f}"
    over_star, rate = f"{increase_at(swept, star):+.1%}", _gbps(knee["rate_bytes_per_s"])
    return [transport, swept["name"], layer, window, _gbps(star), over_star, rate, interval]


def _margin_line(transport: str, link: Json) -> str:
    margins, moved = link["margins_bytes_per_s"], link["bytes_per_s"]
    own, papers = link["margin_bytes_per_s"], link["paper_margin_bytes_per_s"]
    own_increase, papers_increase = (
        max(increase_at(each, each["zero_stall_bytes_per_s"] + margin) for each in link["requests"])
        for margin in (own, papers)
    )
    return (
        f"{transport}: {_gbps(own)} Gbps ({_gbps(margins['min'])} to {_gbps(margins['max'])}), "
        f"{own / moved:.1%} of the link: TTFT at most {own_increase:+.1%}. "
        f"The paper's 5 Gbps would be {MARGIN_BYTES_PER_S / moved:.1%} of it; "
        f"{_gbps(papers)} Gbps, as they are to its link, TTFT at most {papers_increase:+.1%}"
    )


def _gbps(bytes_per_s: float) -> str:
    return f"{gbps_from_bytes_per_s(bytes_per_s):.2f}"
