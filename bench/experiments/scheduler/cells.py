"""Workloads A, B and C, simulated or live: cells as rows of the result, and what follows from them. Pure.

Times and rates are unscaled: those of the paper's sizes. Added TTFT is that over computing alone, simulated and live;
beside it stands what the paper's tables have, added TTFT over the same round's without a limit, which flatters whoever
has a slow transport: a run without a limit holds the time of the transport itself. Ratios are of one round, and then
their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.experiment import plain
from bench.core.show import Json
from bench.core.targets import Target
from bench.experiments.scheduler.simulation import simulate
from bench.experiments.scheduler.variants import CALIBRATED, EQUAL, SLACK, VARIANTS, WORK_CONSERVING
from bench.experiments.scheduler.workloads import paper_batch
from bench.paper.tables import PaperPolicy, workload
from calibration.samples import spread

PAPER_FRACTION = 0.9
SLACK_TARGETS = {"added_ttft_calibrated_over_slack": 1.5, "added_ttft_best_work_conserving_over_slack": 1.1}
"""Of the issue of this project, on each workload."""


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
    """Of the live run: Equal over Calibrated by 0.9 of the paper's own factor, and slack below both kinds of rates."""
    listed = []
    for name, values in found.items():
        equal, calibrated = (
            workload(name).added(policy).added_ttft_s
            for policy in (PaperPolicy.EQUAL, PaperPolicy.CALIBRATED_STALL_OPT)
        )
        limits = {"added_ttft_equal_over_calibrated": PAPER_FRACTION * equal / calibrated, **SLACK_TARGETS}
        listed += [Target(f"{name}: {what}", least, values.get(what)).json("least") for what, least in limits.items()]
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
    """Of all requests of a round together."""
    return [sum(one["ttfts_s"]) - sum(one[over]) for one in rounds]


def _ratio(over: Json, under: Json) -> float:
    pairs = zip(_added_s(over["rounds"]), _added_s(under["rounds"]), strict=True)
    return statistics.median(one / other for one, other in pairs)
