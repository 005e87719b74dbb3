"""The parts as text, beside the paper's figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.paper import PaperPolicy, workload
from bench.samples import Spread
from bench.scheduler.cost import DecisionCost
from bench.scheduler.live import Live, LiveSettings
from bench.scheduler.random_workloads import (
    DELAY_BOUND,
    LOST_GAIN_TARGET,
    MEAN_TARGET,
    PERCENTILE_TARGET,
    RandomOutcome,
    summarize,
)
from bench.scheduler.results import (
    TIME_SCALE_MIN,
    Cell,
    added_error_spread,
    error_spread,
    model_error,
    paper_rates_gbps,
    ratios,
    targets,
)
from bench.scheduler.run import Part, SchedulerReport
from bench.scheduler.scale import Served
from descriptors.units import gbps_from_bytes_per_s

NAME_WIDTH = 22
COLUMN_WIDTH = 19
NOT_OF_THE_PAPER = "-"


def part_text(part: Part, report: SchedulerReport) -> str:
    """One part's tables."""
    match part:
        case Part.SIMULATION:
            return simulation_text(report.simulated)
        case Part.RANDOM:
            return random_text(report.random)
        case Part.LIVE:
            assert report.live is not None
            return live_text(report.settings.live, report.live)
        case Part.COST:
            return cost_text(report.costs)
        case Part.TRACE:
            trace = report.settings.trace
            head = (
                f"{trace.file.name}: {report.entry_count} requests, of which {report.trace[0].request_count} load "
                f"something; their bytes need {trace.load:g} of the link on the average"
            )
            return "\n".join([head, served_text(report.trace)])
        case Part.SCALE:
            return served_text(report.scale)


def simulation_text(cells: Sequence[Cell]) -> str:
    """Workloads A, B and C, and how far the model is from what the paper measured."""
    lines = ["simulated, unscaled; in brackets what the paper measured"]
    lines += [_workload_text(name, _of(cells, name)) for name in _names(cells)]
    return "\n".join([*lines, _errors_text(cells)])


def live_text(settings: LiveSettings, live: Live) -> str:
    """The same on the server, with the ratios and their targets."""
    lines = [
        f"live, {settings.transport.value}, {settings.rounds} rounds, medians. Rates and bytes are "
        f"{settings.link_scale:g} of the paper's: S is {settings.per_layer_chunk_bytes} bytes "
        f"(G={settings.chunk_tokens}), N is the paper's.",
    ]
    if settings.time_scale != 1:
        lines.append(
            f"Compute windows, and bytes once more, are {settings.time_scale:g} of the paper's; times are shown "
            "unscaled."
        )
    lines.append(f"The {settings.gather_s * 1e3:g} ms that an epoch waits for company are taken off every TTFT.")
    if live.problem is not None:
        return "\n".join([*lines, f"WRONG BYTES: {live.problem}"])
    lines += [_workload_text(name, _of(live.cells, name)) for name in _names(live.cells)]
    if settings.time_scale < TIME_SCALE_MIN:
        return "\n".join([*lines, "windows this short say nothing about targets", "every byte verified"])
    for target in targets(ratios(live.cells)):
        verdict = {None: "not measured", True: "met", False: "MISSED"}[target.is_met]
        value = "" if target.value is None else f"{target.value:.2f} "
        lines.append(f"{target.what}: {value}of {target.least:.2f}: {verdict}")
    if live.pace_errors:
        sizes = sorted(map(abs, live.pace_errors))
        lines.append(
            f"held rates, layer 0 to the last: {sizes[len(sizes) // 2]:.2%} off (median of {len(sizes)}), "
            f"{sizes[-1]:.2%} at most"
        )
    if live.repeated_runs:
        lines.append(f"{live.repeated_runs} runs were repeated: their requests had fallen into several epochs")
    return "\n".join([*lines, "every byte verified"])


def random_text(outcomes: Sequence[RandomOutcome]) -> str:
    """The distribution's figures, with their targets."""
    found = summarize(outcomes)
    rows = (
        ("held Calibrated over slack, mean", found.mean_calibrated_over_slack, f"at least {MEAN_TARGET}"),
        ("held Calibrated over slack, all seconds added up", found.calibrated_over_slack_sums, ""),
        (
            "slack over held Calibrated, 99th percentile",
            found.p99_slack_over_calibrated,
            f"at most {PERCENTILE_TARGET}",
        ),
        ("slack over held Calibrated, greatest", found.max_slack_over_calibrated, ""),
        ("worst TTFT over that under Equal, held", found.worst_delay_over_equal, f"bound {DELAY_BOUND}"),
        ("... under Equal, work-conserving", found.worst_delay_over_equal_work_conserving, f"bound {DELAY_BOUND}"),
        ("wrong c_i: part of slack's gain over Equal lost", found.lost_gain, f"at most {LOST_GAIN_TARGET}"),
        ("wrong c_i: held Calibrated over slack, mean", found.mean_wrong_calibrated_over_slack, ""),
        ("wrong c_i: worst TTFT over that under Equal, held", found.wrong_worst_delay_over_equal, ""),
        ("wrong c_i: ... work-conserving", found.wrong_worst_delay_over_equal_work_conserving, ""),
    )
    lines = [f"{found.count} random workloads, simulated; added TTFT of all requests of each"]
    return "\n".join([*lines, *(f"  {name:<52}{value:8.3f}  {target}".rstrip() for name, value, target in rows)])


def cost_text(costs: Sequence[DecisionCost]) -> str:
    """Beside the time that a payload takes on the link."""
    lines = [f"{'decisions, processor time':<{NAME_WIDTH}}{'active':>10}{'an epoch, ms':>15}{'a payload, us':>15}"]
    lines += [
        f"{cost.variant.title:<{NAME_WIDTH}}{cost.active_count:>13}{cost.plan.median * 1e3:>15.2f}"
        f"{cost.payload.median * 1e6:>15.1f}"
        for cost in costs
    ]
    return "\n".join([*lines, f"the payload itself: {costs[0].transfer_s * 1e6:.0f} us on the link"])


def served_text(served: Sequence[Served]) -> str:
    """One line a variant."""
    head = ("mean TTFT, s", "median", "p99", "added, mean", "added, p99")
    lines = []
    for arrivals in dict.fromkeys(each.arrivals for each in served):
        some = [each for each in served if each.arrivals == arrivals]
        gbps = gbps_from_bytes_per_s(some[0].link_bytes_per_s)
        lines.append(f"{arrivals}: {some[0].request_count} requests, a link of {gbps:.1f} Gbps, simulated")
        lines.append(f"  {'':<{NAME_WIDTH}}" + "".join(f"{title:>14}" for title in head) + "  requests/s simulated")
        for each in some:
            values = (each.ttft_mean_s, each.ttft_p50_s, each.ttft_p99_s, each.added_mean_s, each.added_p99_s)
            figures = "".join(f"{value:>14.3f}" for value in values)
            lines.append(f"  {each.variant.title:<{NAME_WIDTH}}{figures}{each.requests_per_wall_s:>22.0f}")
    return "\n".join(lines)


def _workload_text(name: str, cells: Sequence[Cell]) -> str:
    paper = workload(name)
    columns = [request.name for request in paper.requests]
    computing_ms = 1e3 * sum(request.compute_s for request in paper.requests)
    no_limit_ms = 1e3 * paper.added(PaperPolicy.EQUAL).no_limit_s
    lines = [
        f"\nworkload {name}, {paper.cap_gbps:g} Gbps; computing alone takes {computing_ms:.0f} ms (Table A8), and "
        f"the paper measured {no_limit_ms:.0f} without a limit (A12)"
    ]
    lines.append(_head("allocation, Gbps", columns))
    lines += [_row(cell, _rates(cell), paper_rates_gbps(cell), "{:.2f}") for cell in cells]
    lines.append(_head("TTFT, ms", columns))
    lines += [_row(cell, [1e3 * ttft for ttft in cell.ttfts_s()], _measured_ms(cell), "{:.0f}") for cell in cells]
    lines.append(_head("added TTFT, ms", ["over computing", "over slack's", "over no limit"]))
    slack = next((cell.added() for cell in cells if cell.variant.policy is None), None)
    lines += [_added_row(cell, slack) for cell in cells]
    return "\n".join(lines)


def _added_row(cell: Cell, slack: Spread | None) -> str:
    policy = cell.variant.paper_policy
    added = cell.added()
    paper = None if policy is None else workload(cell.workload).added(policy).added_ttft_s
    no_limit = _pair(1e3 * cell.added_over_no_limit().median, None if paper is None else 1e3 * paper, "{:.0f}")
    spread = f"  ({1e3 * added.min:.0f} to {1e3 * added.max:.0f})" if len(cell.rounds) > 1 else ""
    over = "" if slack is None or slack.median <= 0 else f"{added.median / slack.median:.2f}"
    columns = (f"{1e3 * added.median:.0f}", over, no_limit)
    return f"  {cell.variant.title:<{NAME_WIDTH}}" + "".join(f"{text:>{COLUMN_WIDTH}}" for text in columns) + spread


def _errors_text(cells: Sequence[Cell]) -> str:
    if all(model_error(cell) is None for cell in cells):
        return ""
    sizes = error_spread(cells)
    added = added_error_spread(cells)
    lines = [
        f"model against the paper's measured TTFTs: {sizes.median:.1%} off (median), {sizes.max:.1%} at most; "
        f"against its added TTFTs: {added.median:.0%}, {added.max:.0%} at most"
    ]
    for cell in cells:
        error = model_error(cell)
        if error is not None:
            each = " ".join(f"{one:+.1%}" for one in error.ttft)
            lines.append(f"  {cell.workload} {cell.variant.title:<{NAME_WIDTH}} {each}; added TTFT {error.added:+.0%}")
    return "\n".join(lines)


def _row(cell: Cell, ours: Sequence[float], paper: Sequence[float] | None, form: str) -> str:
    theirs: Sequence[float | None] = [None] * len(ours) if paper is None else paper
    texts = [_pair(value, other, form) for value, other in zip(ours, theirs, strict=True)]
    return f"  {cell.variant.title:<{NAME_WIDTH}}" + "".join(f"{text:>{COLUMN_WIDTH}}" for text in texts)


def _pair(ours: float, paper: float | None, form: str) -> str:
    return f"{form.format(ours)} ({NOT_OF_THE_PAPER if paper is None else form.format(paper)})"


def _head(title: str, columns: Sequence[str]) -> str:
    return f"  {title:<{NAME_WIDTH}}" + "".join(f"{column:>{COLUMN_WIDTH}}" for column in columns)


def _rates(cell: Cell) -> list[float]:
    to_gbps: Callable[[float], float] = gbps_from_bytes_per_s
    return [to_gbps(rate) for rate in cell.rates_bytes_per_s()]


def _measured_ms(cell: Cell) -> list[float] | None:
    policy = cell.variant.paper_policy
    return None if policy is None else [1e3 * row.ttft_s for row in workload(cell.workload).measured(policy)]


def _names(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.workload for cell in cells))


def _of(cells: Sequence[Cell], name: str) -> list[Cell]:
    return [cell for cell in cells if cell.workload == name]
