"""What a link came to: for people, as JSON, for the config file, as a chart. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.calibration.link_measure import LinksFound
from bench.calibration.link_points import LinkPlan
from bench.calibration.margin import TOLERANCE, LinkFound, Swept
from bench.calibration.origin import origin_entries, six_digits
from bench.paper import MARGIN_BYTES_PER_S
from bench.report import format_bytes
from bench.ttft.knee import CONFIDENCE, Side, falling_curve, without_first_layer
from descriptors.units import gbps_from_bytes_per_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BOUND = {
    Side.BETWEEN: "",
    Side.BELOW_ALL: ", at most: no rate was too low",
    Side.ABOVE_ALL: ", at least: TTFT still fell",
}


def link_table(plan: LinkPlan, found: LinksFound, origin: Mapping[str, Any]) -> str:
    """What each transport moves, its knees, and the margin that follows."""
    lines = [f"{name}: {text}" for name, text in origin_entries(origin).items()]
    lines.append(f"chunks are in: {found.state.value}; every byte was compared")
    lines += [f"{name} did not run: {reason}" for name, reason in found.missing.items()]
    payload = format_bytes(plan.layout.payload_bytes(plan.together_chunks))
    lines += ["", f"layer-major, payloads of {payload}, medians of {plan.runs} rounds (least to greatest)"]
    for link in found.links:
        rounds = link.moved.rounds_bytes_per_s
        lines.append(
            f"{link.transport:6}{_rate(link.moved.bytes_per_s)} ({_rate(rounds.min)} to {_rate(rounds.max)}),"
            f" {plan.together} requests at once"
        )
    lines += [
        "",
        "TTFT of one request held to a rate, computed from when its layers were there with compute windows c (Eq. 3;",
        f"first layer left out), over that at its largest rate; knee: within {TOLERANCE:.0%} of it, and "
        f"{CONFIDENCE:.0%} of resampled rounds",
        f"{'over':6}{'request':12}{'s':>10}{'c, ms':>8}{'r*':>11}{'at r*':>8}{'knee':>11}  interval",
    ]
    for link in found.links:
        lines += [_swept_line(link.transport, each) for each in link.swept]
    lines += ["", "margin over r*: median of the requests, none where negative (least to greatest)"]
    lines += [_margin_line(link) for link in found.links]
    return "\n".join(lines)


def link_json(
    plan: LinkPlan, found: LinksFound, origin: Mapping[str, Any], storage: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain values, raw samples included."""
    return {
        "bench": "calibrate",
        "what": "link",
        "verified": True,
        **origin,
        "settings": {**asdict(plan), "storage": dict(storage), "tolerance": TOLERANCE, "confidence": CONFIDENCE},
        "state": found.state.value,
        "missing": dict(found.missing),
        "links": {link.transport: _link_json(link) for link in found.links},
    }


def link_entries(plan: LinkPlan, link: LinkFound, origin: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The table `[calibration.link.TRANSPORT]`."""
    rounds, margins = link.moved.rounds_bytes_per_s, link.margins_bytes_per_s
    rates = {
        "bytes_per_s": link.moved.bytes_per_s,
        "low_bytes_per_s": rounds.min,
        "high_bytes_per_s": rounds.max,
        "margin_bytes_per_s": link.margin_bytes_per_s,
        "margin_low_bytes_per_s": margins.min,
        "margin_high_bytes_per_s": margins.max,
    }
    return {
        **origin_entries(origin),
        "rounds": plan.runs,
        **{name: six_digits(rate) for name, rate in rates.items()},
    }


def scheduler_entries(link: LinkFound) -> dict[str, str | int | float | bool]:
    """What `[scheduler]` is told."""
    return {
        "link_bytes_per_s": six_digits(link.moved.bytes_per_s),
        "margin_bytes_per_s": six_digits(link.margin_bytes_per_s),
    }


def plot_links(found: LinksFound, path: Path) -> None:
    """Figure 15 of this machine: a row for each transport, a panel for each request. Needs matplotlib."""
    from matplotlib.figure import Figure

    columns = max(len(link.swept) for link in found.links)
    figure = Figure(figsize=(1 + 3.4 * columns, 1 + 2.8 * len(found.links)), layout="constrained")
    panels = figure.subplots(len(found.links), columns, squeeze=False)
    for link, row in zip(found.links, panels, strict=True):
        for each, axes in zip(link.swept, row, strict=True):
            _panel(axes, link, each)
        row[0].set_ylabel(f"{link.transport}: TTFT over the largest rate's, %", fontsize=8)
    panels[0][0].legend(fontsize=7)
    figure.supxlabel("rate, Gbps", fontsize=8)
    figure.suptitle("TTFT of a layer-major request held to a rate, its first layer left out")
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, link: LinkFound, swept: Swept) -> None:
    samples = without_first_layer(swept.samples, swept.request.layer_bytes)
    curve = falling_curve(samples)
    least_s = curve[-1].ttft_s
    for points, style in ((samples, "."), (curve, "-")):
        axes.plot(
            [gbps_from_bytes_per_s(each.rate_bytes_per_s) for each in points],
            [100 * (each.ttft_s / least_s - 1) for each in points],
            style,
            color="tab:blue",
            markersize=3,
        )
    star, knee = swept.request.zero_stall_bytes_per_s, swept.knee
    margin, paper = link.margin_bytes_per_s, link.paper_margin_bytes_per_s
    for rate, style, color, name in (
        (star, "--", "black", "r*"),
        (star + margin, "-.", "tab:red", "r* + the link's margin"),
        (star + paper, "-.", "tab:gray", "r* + 5 % of the link"),
        (knee.rate_bytes_per_s, ":", "tab:green", "knee"),
    ):
        axes.axvline(gbps_from_bytes_per_s(rate), linestyle=style, color=color, linewidth=1, label=name)
    interval = (knee.low_bytes_per_s, knee.high_bytes_per_s)
    axes.axvspan(*map(gbps_from_bytes_per_s, interval), color="tab:green", alpha=0.15)
    highest = 100 * (curve[0].ttft_s / least_s - 1)
    axes.set_ylim(top=1.5 * max(highest, 1.0))  # single requests may be far above it
    axes.set_title(_name(swept), fontsize=9)
    axes.tick_params(labelsize=7)


def _swept_line(transport: str, swept: Swept) -> str:
    request, knee = swept.request, swept.knee
    star = request.zero_stall_bytes_per_s
    interval = f"{_gbps(knee.low_bytes_per_s)} to {_gbps(knee.high_bytes_per_s)}{_BOUND[knee.side]}"
    return (
        f"{transport:6}{request.name:12}{format_bytes(request.layer_bytes):>10}{request.compute_s * 1e3:8.2f}"
        f"{_gbps(star):>11}{swept.increase_at(star):+8.1%}{_gbps(knee.rate_bytes_per_s):>11}  {interval}"
    )


def _margin_line(link: LinkFound) -> str:
    margins, paper = link.margins_bytes_per_s, link.paper_margin_bytes_per_s
    starts = [each.request.zero_stall_bytes_per_s for each in link.swept]
    measured = [each.increase_at(star + link.margin_bytes_per_s) for each, star in zip(link.swept, starts, strict=True)]
    papers = [each.increase_at(star + paper) for each, star in zip(link.swept, starts, strict=True)]
    return (
        f"{link.transport:6}{_gbps(link.margin_bytes_per_s)} ({_gbps(margins.min)} to {_gbps(margins.max)}), "
        f"{link.margin_bytes_per_s / link.moved.bytes_per_s:.1%} of the link: TTFT at most {max(measured):+.1%}. "
        f"The paper's 5 Gbps would be {MARGIN_BYTES_PER_S / link.moved.bytes_per_s:.1%} of it; "
        f"{_gbps(paper)}, as they are to its link, TTFT at most {max(papers):+.1%}"
    )


def _link_json(link: LinkFound) -> dict[str, Any]:
    return {
        "bytes_per_s": link.moved.bytes_per_s,
        "together_bytes_per_s": list(link.moved.together_bytes_per_s),
        "single_bytes_per_s": list(link.moved.single_bytes_per_s),
        "margin_bytes_per_s": link.margin_bytes_per_s,
        "margins_bytes_per_s": asdict(link.margins_bytes_per_s),
        "paper_margin_bytes_per_s": link.paper_margin_bytes_per_s,
        "requests": [
            {
                **asdict(each.request),
                "zero_stall_bytes_per_s": each.request.zero_stall_bytes_per_s,
                "knee": {**asdict(each.knee), "side": each.knee.side.value},
                "margin_bytes_per_s": each.margin_bytes_per_s,
                "ttft_samples": [asdict(sample) for sample in each.samples],
                "held": [asdict(one) for one in held],
            }
            for each, held in zip(link.swept, link.held, strict=True)
        ],
    }


def _name(swept: Swept) -> str:
    return f"{swept.request.name}, layers of {format_bytes(swept.request.layer_bytes)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _gbps(bytes_per_s: float) -> str:
    return f"{gbps_from_bytes_per_s(bytes_per_s):.2f} Gbps"
