"""Workloads A, B and C, simulated or live: cells as rows of the result, and what follows from them. Pure.

Times and rates are unscaled: those of the paper's sizes. Added TTFT is that over computing alone, simulated and live;
beside it stands what the paper's tables have, added TTFT over the same round's without a limit, which flatters whoever
has a slow transport: a run without a limit holds the time of the transport itself. Ratios are of one round, and then
their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.core.experiment import plain
from bench.core.plots import Chart, Kind, draw
from bench.core.rounds import Target
from bench.core.show import (
    NOT_MEASURED,
    Block,
    Column,
    Form,
    Json,
    Section,
    Table,
    crossed,
    fixed,
    significant,
    table,
    written,
)
from bench.paper.scheduler.simulation import (
    CALIBRATED,
    EQUAL,
    SLACK,
    VARIANTS,
    WORK_CONSERVING,
    paper_batch,
    simulate,
)
from bench.paper.tables import PaperPolicy, workload
from descriptors.units import gbps_from_bytes_per_s
from objectcache.calibration.charts import chart
from objectcache.calibration.samples import spread

PAPER_FRACTION = 0.9
SLACK_TARGETS = {"added_ttft_calibrated_over_slack": 1.5, "added_ttft_best_work_conserving_over_slack": 1.1}
"""The goals of this project, on each workload."""


def paper_policy(variant: str) -> PaperPolicy | None:
    """The paper measured rates held for an epoch, under the five policies; None for other variants."""
    return next((policy for policy in PaperPolicy if policy.value == variant), None)


def cell(name: str, variant: str, rounds: Sequence[Json]) -> dict[str, Any]:
    """A workload under a variant. A round has a value for each request: `ttfts_s`, `compute_s` of computing alone,
    `no_limit_s`, the TTFTs over a link that is not limited, and `rates_bytes_per_s`.
    """
    found = {
        "workload": name,
        "variant": variant,
        "rates_bytes_per_s": _medians(rounds, "rates_bytes_per_s"),
        "ttfts_s": _medians(rounds, "ttfts_s"),
        "added_ttft_s": plain(spread(_added_s(rounds))),
        "added_ttft_over_no_limit_s": plain(spread(_added_s(rounds, "no_limit_s"))),
    }
    return {**found, "error": _model_error(found), "rounds": plain(rounds)}


def simulation(workloads: Sequence[str], payload_bytes_max: int) -> dict[str, Any]:
    """Every variant on the paper's workloads, unscaled. A GPU that never waits is its baseline."""
    cells = []
    for name in workloads:
        batch = paper_batch(name)
        for each in VARIANTS:
            found = simulate(batch, each.pool_settings(), payload_bytes_max).results
            compute_s = [result.ttft_s - result.added_ttft_s for result in found]
            rates = [result.rate_bytes_per_s for result in found]
            times = {"ttfts_s": [result.ttft_s for result in found], "compute_s": compute_s, "no_limit_s": compute_s}
            cells.append(cell(name, each.name, [{**times, "rates_bytes_per_s": rates}]))
    errors = [each["error"] for each in cells if each["error"] is not None]
    return {
        "ratios": ratios(cells),
        "model_error": plain(spread([abs(one) for error in errors for one in error["ttft"]])),
        "model_error_of_added_ttft": plain(spread([abs(error["added"]) for error in errors])),
        "cells": cells,
    }


def ratios(cells: Sequence[Json]) -> dict[str, dict[str, float]]:
    """By workload; only those of which all that is needed was measured. The best work-conserving variant is that of the
    least median.
    """
    found = {}
    for name in dict.fromkeys(each["workload"] for each in cells):
        here = {each["variant"]: each for each in cells if each["workload"] == name}
        pairs = {
            "added_ttft_equal_over_slack": (EQUAL.name, SLACK.name),
            "added_ttft_calibrated_over_slack": (CALIBRATED.name, SLACK.name),
            "added_ttft_equal_over_calibrated": (EQUAL.name, CALIBRATED.name),
        }
        conserving = [each.name for each in WORK_CONSERVING if each.name in here]
        if conserving:
            best = min(conserving, key=lambda each: float(here[each]["added_ttft_s"]["median"]))
            pairs["added_ttft_best_work_conserving_over_slack"] = (best, SLACK.name)
        found[name] = {
            what: _ratio(here[over], here[under])
            for what, (over, under) in pairs.items()
            if over in here and under in here
        }
    return found


def targets(found: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The targets of the live run: Equal over Calibrated by 0.9 of the paper's own factor; slack below both."""
    listed = []
    for name, values in found.items():
        equal, calibrated = (
            workload(name).added(policy).added_ttft_s
            for policy in (PaperPolicy.EQUAL, PaperPolicy.CALIBRATED_STALL_OPT)
        )
        limits = {"added_ttft_equal_over_calibrated": PAPER_FRACTION * equal / calibrated, **SLACK_TARGETS}
        listed += [
            Target(f"{name}: {what}", least, values.get(what)).json(limit_name="least")
            for what, least in limits.items()
        ]
    return listed


def _model_error(found: Json) -> dict[str, Any] | None:
    """Found over the paper's measurement, less one: of each request's TTFT (Tables A10 and A11), and of the workload's
    added TTFT over a link that is not limited, which is what Table A12 has. None for what the paper did not measure.
    """
    policy, paper = paper_policy(found["variant"]), workload(found["workload"])
    if policy is None:
        return None
    pairs = zip(found["ttfts_s"], paper.measured(policy), strict=True)
    added_s = found["added_ttft_over_no_limit_s"]["median"]
    return {
        "ttft": [ours_s / theirs.ttft_s - 1 for ours_s, theirs in pairs],
        "added": added_s / paper.added(policy).added_ttft_s - 1,
    }


def _medians(rounds: Sequence[Json], name: str) -> list[float]:
    return [statistics.median(each) for each in zip(*(one[name] for one in rounds), strict=True)]


def _added_s(rounds: Sequence[Json], over: str = "compute_s") -> list[float]:
    """The time that all requests of a round together waited beyond compute."""
    return [sum(one["ttfts_s"]) - sum(one[over]) for one in rounds]


def _ratio(over: Json, under: Json) -> float:
    pairs = zip(_added_s(over["rounds"]), _added_s(under["rounds"]), strict=True)
    return statistics.median(one / other for one, other in pairs)


POLICIES = {
    "equal": "Equal",
    "kv-prop": "KV-prop",
    "bw-prop": "BW-prop",
    "stall-opt": "Stall-opt",
    "calibrated": "Calibrated Stall-opt",
    "slack": "**slack**",
}
TIME_SCALE_MIN = 0.1
"""Shorter windows than that part of the paper's say more about this machine's timers than about the scheduler."""
RANDOM = (
    ("mean_calibrated_over_slack", "held Calibrated over slack, added TTFT, mean", "at least 1.3"),
    ("calibrated_over_slack_sums", "the same, all seconds added up", ""),
    ("p99_slack_over_calibrated", "slack over held Calibrated, 99th percentile", "at most 1.02"),
    ("max_slack_over_calibrated", "slack over held Calibrated, greatest", ""),
    ("worst_delay_over_equal", "worst TTFT over that under Equal", "at most 1.25"),
    ("worst_delay_over_equal_work_conserving", "the same, freed bandwidth shared again", "at most 1.25"),
    ("lost_gain", "part of slack's gain lost with every c wrong by up to 30 %", "at most 15 %"),
    ("mean_wrong_calibrated_over_slack", "held Calibrated over slack, mean, c wrong", ""),
    ("wrong_worst_delay_over_equal", "worst TTFT over that under Equal, c wrong", ""),
    ("wrong_worst_delay_over_equal_work_conserving", "the same, freed bandwidth shared again", ""),
)
RANDOM_FORMS: Mapping[str, Form] = {"lost_gain": "{:.1%}".format}
WHOLE_MS = fixed(0, 1e3)
VARIANT = Column("", lambda row: _title(row["variant"]))
COST = (
    Column("decisions, processor time", VARIANT.value),
    "active = active_count | an epoch, ms = plan:ms.2 | a payload, us = payload:us.1",
)
SERVED = (
    VARIANT,
    "mean TTFT, s = ttft_mean_s:.3 | median = ttft_p50_s:.3 | p99 = ttft_p99_s:.3 | "
    "added, mean = added_mean_s:.3 | added, p99 = added_p99_s:.3 | "
    "requests/s simulated = requests_per_wall_s:.0",
)
LIVE_TARGETS = (
    Column("target", lambda target: target["what"].replace("_", " ")),
    "at least = least:.2",
    Column("seen", lambda target: NOT_MEASURED if target["value"] is None else target["value"]),
    "= is_met:verdict",
)


def show(result: Json) -> dict[str, Section]:
    """Each part that was run."""
    settings, random = result["settings"], result["random"]
    made: dict[str, list[Block]] = {"simulated": []}
    if simulation := result["simulation"]:
        cells = simulation["cells"]
        made["simulated-workloads"] = [*_workloads(cells, "simulated, unscaled"), _added(cells), _errors(cells)]
        error, added = simulation["model_error"], simulation["model_error_of_added_ttft"]
        text = f"The model is {error['median']:.1%} (median) and {error['max']:.1%} (at most) from the paper's measured"
        made["simulated"].append(f"{text} TTFTs; from its *added* TTFTs {added['median']:.0%} and {added['max']:.0%}.")
    if random:
        found = random["summary"]
        rows = [(title, RANDOM_FORMS.get(key, significant)(found[key]), wanted) for key, title, wanted in RANDOM]
        made["simulated"].append(Table((f"{found['count']:,} random workloads, simulated", "", "wanted"), rows))
    if live := result["live"]:
        made["live"] = _workloads(live["cells"], _live_text(settings["live"]))
        made["shared-link"] = _shared_link(live, settings["live"]["time_scale"])
    if cost := result["cost"]:
        link = f"the payload itself: {cost[0]['transfer_s'] * 1e6:.0f} us on the link"
        made["cost"] = [table(cost, *COST), link]
    if trace := result["trace"]:
        of = f"of {result['trace_entry_count']} " if "trace_entry_count" in result else ""
        load = f"need {settings['trace']['load']:g} of the link on the average"
        text = f"{settings['trace']['file']}: the requests {of}that load something; their bytes {load}"
        made["trace"] = [text, *_served(trace)]
    if scale := result["scale"]:
        made["scale"] = _served(scale)
    return {name: section for name, section in made.items() if section}


def _title(variant: str) -> str:
    policy, _, shares = variant.partition("/")
    return POLICIES[policy] + (", freed bandwidth shared again" if shares else "")


def _live_text(settings: Json) -> str:
    times = f"Compute windows, and bytes once more, are {settings['time_scale']:g} of the paper's; times are unscaled."
    return (
        f"live, {settings['transport']}, {settings['rounds']} rounds, medians. Rates and bytes are "
        f"{settings['link_scale']:g} of the paper's: S is {settings['per_layer_chunk_bytes']} bytes "
        f"(G={settings['chunk_tokens']}), N is the paper's. {times} "
        f"The {settings['gather_s'] * 1e3:g} ms that an epoch waits for company are taken off every TTFT"
    )


def _shared_link(live: Json, time_scale: float) -> list[Block]:
    is_short = time_scale < TIME_SCALE_MIN
    judged = "Windows this short say nothing about targets." if is_short else table(live["targets"], *LIVE_TARGETS)
    found: list[Block] = [_added(live["cells"]), judged]
    if pace := live["pace_error"]:
        found.append(f"Held rates are {pace['median']:.2%} off (median), {pace['max']:.2%} at most.")
    found.append(f"{live['repeated_runs']} runs were repeated, since their requests fell into several epochs.")
    return found


def _crossed(cells: Iterable[Json], head: str, text: Callable[[Json], str]) -> Table:
    return crossed(cells, head, lambda cell: _title(cell["variant"]), lambda cell: cell["workload"], text)


def _added(cells: Iterable[Json]) -> Table:
    """Added TTFT of each workload under each variant."""

    def text(cell: Json) -> str:
        no_limit_s = cell["added_ttft_over_no_limit_s"]["median"]
        return f"{written(cell['added_ttft_s'], WHOLE_MS)}; over no limit {WHOLE_MS(no_limit_s)}"

    return _crossed(cells, "added TTFT of all requests, ms", text)


def _errors(cells: Iterable[Json]) -> Table:
    def text(cell: Json) -> str:
        return f"{' '.join(f'{one:+.1%}' for one in cell['error']['ttft'])}; added {cell['error']['added']:+.0%}"

    return _crossed((cell for cell in cells if cell["error"]), "TTFT, model over measured", text)


def _requests(cell: Json) -> list[Json]:
    """A row for each request of a cell, with what the paper measured, None where it measured nothing."""
    policy, paper = paper_policy(cell["variant"]), workload(cell["workload"])
    rates = map(gbps_from_bytes_per_s, cell["rates_bytes_per_s"])
    nothing = [None] * len(paper.requests)
    papers_gbps = nothing if policy is None else paper.rates_gbps[policy]
    papers_s = nothing if policy is None else [row.ttft_s for row in paper.measured(policy)]
    names = ("request", "gbps", "papers_gbps", "ttft_s", "papers_ttft_s")
    values = zip([each.name for each in paper.requests], rates, papers_gbps, cell["ttfts_s"], papers_s, strict=True)
    return [{"variant": cell["variant"], **dict(zip(names, each, strict=True))} for each in values]


def _workloads(cells: Sequence[Json], head: str) -> list[Block]:
    """For each workload the allocations and the TTFTs; and added TTFTs beside slack's and the paper's."""
    blocks: list[Block] = [f"{head}. In brackets what the paper measured."]
    for name in dict.fromkeys(each["workload"] for each in cells):
        paper, rows = workload(name), [row for cell in cells if cell["workload"] == name for row in _requests(cell)]
        computing_ms = 1e3 * sum(request.compute_s for request in paper.requests)
        blocks.append(
            f"workload {name}, {paper.cap_gbps:g} Gbps; computing alone takes {computing_ms:.0f} ms (Table A8), and "
            f"the paper measured {1e3 * paper.added(PaperPolicy.EQUAL).no_limit_s:.0f} without a limit (A12)"
        )
        for title, key, form in (("allocation, Gbps", "gbps", fixed(2)), ("TTFT, ms", "ttft_s", WHOLE_MS)):
            text = partial(_beside_papers, key, form)
            blocks.append(crossed(rows, title, VARIANT.of, lambda row: row["request"], text))
    slack_s = {each["workload"]: each["added_ttft_s"]["median"] for each in cells if each["variant"] == "slack"}

    def beside(cell: Json) -> str:
        name, policy = cell["workload"], paper_policy(cell["variant"])
        least_s = slack_s.get(name, 0.0)
        over = f"{cell['added_ttft_s']['median'] / least_s:.2f}" if least_s > 0 else "-"
        return f"{over} ({'-' if policy is None else WHOLE_MS(workload(name).added(policy).added_ttft_s)})"

    return [*blocks, _crossed(cells, "added TTFT over slack's (the paper's over no limit, ms)", beside)]


def _beside_papers(key: str, form: Form, row: Json) -> str:
    return f"{form(row[key])} ({written(row[f'papers_{key}'], form) or '-'})"


def _served(served: Sequence[Json]) -> list[Block]:
    blocks: list[Block] = []
    for arrivals in dict.fromkeys(each["arrivals"] for each in served):
        some = [each for each in served if each["arrivals"] == arrivals]
        gbps = gbps_from_bytes_per_s(some[0]["link_bytes_per_s"])
        head = f"{arrivals}: {some[0]['request_count']} requests, a link of {gbps:.1f} Gbps, simulated"
        blocks += [head, table(some, *SERVED)]
    return blocks


def plot(result: Json, folder: Path) -> None:
    """A file for each part that has a picture. Needs matplotlib."""
    if simulation := result["simulation"]:
        draw(WORKLOADS_CHART, _bars(simulation["cells"]), "simulated, unscaled", folder / "scheduler-simulated.png")
    if live := result["live"]:
        how = result["settings"]["live"]
        title = (
            f"live over {how['transport']}: rates and bytes x{how['link_scale']:g}, windows x{how['time_scale']:g}, "
            f"shown unscaled; {how['rounds']} rounds, median and extremes"
        )
        draw(WORKLOADS_CHART, _bars(live["cells"]), title, folder / "scheduler-live.png")
    if result["random"]:
        _plot_random(result["random"]["workloads"], folder / "scheduler-random.png")


WORKLOADS_CHART = Chart(
    Kind.BARS,
    lambda bar: bar["variant"].replace("/work-conserving", " (w.c.)"),
    "value",
    "",
    "of",
    row=lambda bar: f"{bar['workload']}, {workload(bar['workload']).cap_gbps:g} Gbps",
    column="panel",
)
"""Figure 16: what each policy allocates, and the added TTFT, a row for each workload."""


def _bars(cells: Iterable[Json]) -> list[Json]:
    bars = list[Json]()
    for cell in cells:
        policy, added = paper_policy(cell["variant"]), "added TTFT of all requests, s"
        values = [("allocation, Gbps", each["request"], each["gbps"]) for each in _requests(cell)]
        values.append((added, "here, over computing alone", cell["added_ttft_s"]))
        if policy is not None:
            papers_s = workload(cell["workload"]).added(policy).added_ttft_s
            values.append((added, "the paper, over a link without limit", papers_s))
        bars += [{**cell, "panel": panel, "of": name, "value": value} for panel, name, value in values]
    return bars


def _plot_random(of: Mapping[str, Sequence[float]], path: Path) -> None:
    """How often slack is how much better, and the worst delays."""
    with chart(path, f"{len(of['slack_s'])} random workloads, simulated", (12, 4), 1, 2) as panels:
        left, right = panels[0]
        top = 0.0
        for wrong, label in (("", "compute times right"), ("wrong_", "stated wrong by up to 30 %")):
            pairs = zip(of[f"{wrong}calibrated_s"], of[f"{wrong}slack_s"], strict=True)
            ratios = [calibrated_s / slack_s for calibrated_s, slack_s in pairs]
            top = top or sorted(ratios)[int(0.995 * (len(ratios) - 1))]
            left.hist([min(ratio, top) for ratio in ratios], bins=60, range=(0, top), histtype="step", label=label)
            delays = of[f"{wrong}delay_over_equal_work_conserving"]
            right.hist(delays, bins=60, histtype="step", label=label, log=True)
        left.axvline(1, color="black", linewidth=0.8)
        left.set(xlabel="added TTFT, held Calibrated over slack", ylabel="workloads")
        right.set(xlabel="worst TTFT of a workload over that under Equal, work-conserving")
        for axes in (left, right):
            axes.legend(fontsize=8)
