"""The report as plain values, raw samples included. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.samples import spread
from bench.scheduler.cost import DecisionCost
from bench.scheduler.live import Live
from bench.scheduler.random_workloads import RandomOutcome, summarize
from bench.scheduler.results import Cell, added_error_spread, error_spread, model_error, ratios, targets
from bench.scheduler.run import SchedulerBenchSettings, SchedulerReport
from bench.scheduler.scale import Served


def report_json(report: SchedulerReport, origin: Mapping[str, Any]) -> dict[str, Any]:
    """`ratios` are those of the live run; the simulation's are apart. Parts that were not run are None."""
    live = report.live
    return {
        "bench": "scheduler",
        "verified": report.problem is None,
        "problem": report.problem,
        **origin,
        "settings": settings_json(report.settings),
        "ratios": {} if live is None else ratios(live.cells),
        "live": None if live is None else _live_json(live),
        "simulation": _simulation_json(report.simulated) if report.simulated else None,
        "random": _random_json(report.random) if report.random else None,
        "cost": [_cost_json(cost) for cost in report.costs] or None,
        "trace": [_served_json(each) for each in report.trace] or None,
        "scale": [_served_json(each) for each in report.scale] or None,
    }


def settings_json(settings: SchedulerBenchSettings) -> dict[str, Any]:
    """Plain values."""
    live, trace = settings.live, settings.trace
    return {
        **asdict(settings),
        "parts": [part.value for part in settings.parts],
        "live": {
            **asdict(live),
            "variants": [each.name for each in live.variants],
            "transport": live.transport.value,
            "folder": None if live.folder is None else str(live.folder),
            "per_layer_chunk_bytes": live.per_layer_chunk_bytes,
            "shrinks": "S",
        },
        "trace": {**asdict(trace), "file": trace.file.name},
    }


def _live_json(live: Live) -> dict[str, Any]:
    return {
        "stored_bytes": live.stored_bytes,
        "added_ttft_is_over": "computing alone",
        "repeated_runs": live.repeated_runs,
        "targets": [{**asdict(target), "is_met": target.is_met} for target in targets(ratios(live.cells))],
        "pace_error": asdict(spread([abs(error) for error in live.pace_errors])) if live.pace_errors else None,
        "cells": [_cell_json(cell) for cell in live.cells],
    }


def _simulation_json(cells: Sequence[Cell]) -> dict[str, Any]:
    has_paper = any(model_error(cell) is not None for cell in cells)
    return {
        "ratios": ratios(cells),
        "model_error": asdict(error_spread(cells)) if has_paper else None,
        "model_error_of_added_ttft": asdict(added_error_spread(cells)) if has_paper else None,
        "cells": [_cell_json(cell) for cell in cells],
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    error = model_error(cell)
    return {
        "workload": cell.workload,
        "variant": cell.variant.name,
        "rates_bytes_per_s": cell.rates_bytes_per_s(),
        "ttfts_s": cell.ttfts_s(),
        "added_ttft_s": asdict(cell.added()),
        "added_ttft_over_no_limit_s": asdict(cell.added_over_no_limit()),
        "error": None if error is None else asdict(error),
        "rounds": [asdict(one) for one in cell.rounds],
    }


def _random_json(outcomes: Sequence[RandomOutcome]) -> dict[str, Any]:
    names = list(asdict(outcomes[0]))
    return {
        "summary": asdict(summarize(outcomes)),
        "workloads": {name: [round(getattr(each, name), 6) for each in outcomes] for name in names},
    }


def _cost_json(cost: DecisionCost) -> dict[str, Any]:
    return {**asdict(cost), "variant": cost.variant.name}


def _served_json(served: Served) -> dict[str, Any]:
    return {**asdict(served), "variant": served.variant.name, "requests_per_wall_s": served.requests_per_wall_s}
