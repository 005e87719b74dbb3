"""`objectcache calibrate`: both delivery orders on this machine, and the threshold between them."""

from __future__ import annotations

import argparse
from typing import Any

from bench.calibration.measure import measure, warm_state
from bench.calibration.origin import describe_origin, origin_entries, six_digits
from bench.calibration.points import CalibrationPlan
from bench.calibration.report import Calibration, conclude, plot, table, to_json
from bench.samples import State
from objectcache.calibrate_run import (
    DONE,
    FAILURES,
    cannot_run,
    config_of,
    failure,
    print_unwritten,
    storage_of,
    target_of,
    transports_of,
    where_of,
    write_json,
)
from objectcache.config import Config
from objectcache.config_file import check_edit, edit_file
from objectcache.config_text import table_lines, with_calibration


def calibrate_theta(options: argparse.Namespace, plan: CalibrationPlan) -> int:
    """0: done; 1: could not be measured, or wrong bytes. Raises ConfigError."""
    config = config_of(options)
    target = target_of(options)
    if target is not None:  # before the minutes of measuring
        check_edit(target, lambda text: with_calibration(text, 1, {"rounds": 1}))
    try:
        calibration = _measured(options, plan, config)
    except FAILURES as error:
        return failure(error)
    if isinstance(calibration, str):
        return failure(calibration)
    print(table(calibration))
    write_json(options, to_json(calibration))
    if options.plot is not None:
        plot(calibration, options.plot)
    theta_bytes, found = calibration.theta.theta_bytes, calibration_table(calibration)
    if target is not None:
        edit_file(target, lambda text: with_calibration(text, theta_bytes, found))
        print(f"\n{target}: theta_bytes and [calibration] are written")
    else:
        storage = [*table_lines(("storage",), {"theta_bytes": theta_bytes}), ""]
        print_unwritten([*storage, *table_lines(("calibration",), found)])
    return DONE


def calibration_table(calibration: Calibration) -> dict[str, Any]:
    """What goes under `[calibration]`."""
    table: dict[str, Any] = {
        **origin_entries(calibration.origin),
        "rounds": calibration.settings["runs"],
        "theta_low_bytes": calibration.theta.low_bytes,
        "theta_high_bytes": calibration.theta.high_bytes,
        "theta_side": calibration.theta.side.value,
    }
    for each in calibration.costs:
        table.setdefault(each.state.value, {})[each.transport] = {
            order: {
                name: six_digits(getattr(costs, name)) for name in ("request_s", "chunk_s", "layer_s", "bytes_per_s")
            }
            for order, costs in (("chunk_major", each.chunk_major), ("layer_major", each.layer_major))
        }
    return table


def _measured(options: argparse.Namespace, plan: CalibrationPlan, config: Config) -> Calibration | str:
    """The calibration, or why there is none. Raises FAILURES."""
    where = where_of(options, config)
    states = [warm_state(plan, where.storage) if name == "warm" else State.COLD for name in options.states]
    origin = describe_origin()
    found = measure(plan, states, transports_of(options), where)
    reason = cannot_run(options, found.missing)
    if reason is not None:
        return reason
    settings = {
        "runs": plan.runs,
        "seed": plan.seed,
        "compute_us": list(options.compute_us),
        "storage": storage_of(config),
    }
    computes_s = [compute_us / 1e6 for compute_us in options.compute_us]
    return conclude(found.points, computes_s, plan.seed, origin, settings, found.missing, found.remarks)
