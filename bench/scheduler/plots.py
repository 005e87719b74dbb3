"""Figure 16 and the histogram of random workloads. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.paper import workload
from bench.scheduler.random_workloads import RandomOutcome
from bench.scheduler.results import Cell
from bench.scheduler.run import SchedulerReport
from descriptors.units import gbps_from_bytes_per_s

DPI = 120
PAPER_COLOR = "0.75"


def plot_report(report: SchedulerReport, folder: Path) -> list[Path]:
    """A file for each part that has a picture."""
    drawn = []
    if report.simulated:
        drawn.append(folder / "scheduler-simulated.png")
        plot_workloads(report.simulated, "simulated, unscaled", drawn[-1])
    if report.live is not None and report.live.cells:
        drawn.append(folder / "scheduler-live.png")
        plot_workloads(report.live.cells, _live_title(report), drawn[-1])
    if report.random:
        drawn.append(folder / "scheduler-random.png")
        plot_random(report.random, drawn[-1])
    return drawn


def plot_workloads(cells: Sequence[Cell], title: str, path: Path) -> None:
    """Figure 16: what each policy allocates, and the added TTFT, a row for each workload."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(cell.workload for cell in cells))
    canvas = Figure(figsize=(14, 1 + 3.6 * len(names)), layout="constrained")
    panels = canvas.subplots(len(names), 2, squeeze=False)
    for name, (left, right) in zip(names, panels, strict=True):
        here = [cell for cell in cells if cell.workload == name]
        titles = [cell.variant.title for cell in here]
        places = range(len(here))
        bottoms = [0.0] * len(here)
        for index, request in enumerate(workload(name).requests):
            rates = [gbps_from_bytes_per_s(cell.rates_bytes_per_s()[index]) for cell in here]
            left.bar(places, rates, bottom=bottoms, label=request.name)
            bottoms = [bottom + rate for bottom, rate in zip(bottoms, rates, strict=True)]
        left.axhline(workload(name).cap_gbps, linestyle="--", color="black", linewidth=0.8)
        left.set_ylabel("Gbps")
        left.set_title(f"{name}: allocation")
        left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        added = [cell.added() for cell in here]
        medians = [each.median for each in added]
        below = [each.median - each.min for each in added]
        above = [each.max - each.median for each in added]
        right.bar(
            [place + 0.2 for place in places],
            medians,
            0.4,
            yerr=[below, above],
            capsize=2,
            label="here, over computing alone",
        )
        papers = [_paper_added(cell) for cell in here]
        right.bar(
            [place - 0.2 for place in places],
            papers,
            0.4,
            color=PAPER_COLOR,
            label="the paper, over a link without limit",
        )
        for place, median in zip(places, medians, strict=True):
            right.annotate(f"{median:.2f}", (place + 0.2, max(median, 0.0)), ha="center", va="bottom", fontsize=7)
        right.set_ylabel("added TTFT, s")
        right.set_title(f"{name}: added TTFT of all requests")
        right.legend(fontsize=7)
        for axes in (left, right):
            axes.set_xticks(list(places), titles, rotation=35, ha="right", fontsize=7)
    canvas.suptitle(title)
    canvas.savefig(path, dpi=DPI)


def plot_random(outcomes: Sequence[RandomOutcome], path: Path) -> None:
    """How often slack is how much better, and the worst delays."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(12, 4), layout="constrained")
    left, right = canvas.subplots(1, 2)
    ratios = [each.calibrated_s / each.slack_s for each in outcomes]
    wrong = [each.wrong_calibrated_s / each.wrong_slack_s for each in outcomes]
    top = sorted(ratios)[int(0.995 * (len(ratios) - 1))]
    for values, label in ((ratios, "compute times right"), (wrong, "stated wrong by up to 30 %")):
        left.hist([min(value, top) for value in values], bins=60, range=(0, top), histtype="step", label=label)
    left.axvline(1, color="black", linewidth=0.8)
    left.set_xlabel("added TTFT, held Calibrated over slack")
    left.set_ylabel("workloads")
    left.legend(fontsize=8)
    delays = [each.delay_over_equal_work_conserving for each in outcomes]
    delays_wrong = [each.wrong_delay_over_equal_work_conserving for each in outcomes]
    for values, label in ((delays, "compute times right"), (delays_wrong, "stated wrong by up to 30 %")):
        right.hist(values, bins=60, histtype="step", label=label, log=True)
    right.set_xlabel("worst TTFT of a workload over that under Equal, work-conserving")
    right.legend(fontsize=8)
    canvas.suptitle(f"{len(outcomes)} random workloads, simulated")
    canvas.savefig(path, dpi=DPI)


def _paper_added(cell: Cell) -> float:
    policy = cell.variant.paper_policy
    return 0.0 if policy is None else workload(cell.workload).added(policy).added_ttft_s


def _live_title(report: SchedulerReport) -> str:
    live = report.settings.live
    return (
        f"live over {live.transport.value}: rates and bytes x{live.link_scale:g}, windows x{live.time_scale:g}, shown "
        f"unscaled; {live.rounds} rounds, median and extremes"
    )
