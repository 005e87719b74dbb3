"""`objectcache calibrate`: both delivery orders on this machine, and the threshold between them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from objectcache.calibration.chunks import state_of_warm
from objectcache.calibration.measure import measure
from objectcache.calibration.origin import describe_origin
from objectcache.calibration.samples import State
from objectcache.calibration.text import six_digits
from objectcache.calibration.theta import CalibrationPlan
from objectcache.calibration.theta_report import conclude, plot, table
from objectcache.cli.calibrate_quality import CODECS, codecs_table, decode_rates
from objectcache.cli.calibrate_run import (
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
from objectcache.cli.config import Config
from objectcache.cli.config_compression import CompressionPolicy
from objectcache.cli.config_file import check_edit, edit_file
from objectcache.cli.config_text import table_lines, with_table, with_values


def calibrate_theta(options: argparse.Namespace, plan: CalibrationPlan) -> int:
    """The exit status: 0 done; 1 could not be measured, or wrong bytes. Raises ConfigError."""
    config = config_of(options)
    target = target_of(options)
    if target is not None:  # before the minutes of measuring
        check_edit(target, lambda text: with_values(text, "storage", {"theta_bytes": 1}))
    try:
        result = _measured(options, plan, config)
    except FAILURES as error:
        return failure(error)
    if isinstance(result, str):
        return failure(result)
    print(table(result))
    write_json(options, result)
    if options.plot is not None:
        plot(result, options.plot)
    storage = {"theta_bytes": result["theta"]["theta_bytes"]}
    is_compressing = config.compression.policy is not CompressionPolicy.OFF
    tiers = tiers_of(result["costs"]) if is_compressing else {}
    codecs = codecs_table(config, {}, decode_rates(5)) if is_compressing else {}
    if target is not None:
        edit_file(target, lambda text: with_values(text, "storage", storage))
        print(f"\n{target}: theta_bytes is written")
        if is_compressing:
            edit_file(target, lambda text: with_values(text, "compression", tiers))
            edit_file(target, lambda text: with_table(text, CODECS, codecs))
            print(f"{target}: the rates of [compression] are written")
    else:
        compression = ["", *table_lines(("compression",), {**tiers, "codecs": codecs})] if is_compressing else []
        print_unwritten([*table_lines(("storage",), storage), *compression])
    return DONE


def tiers_of(costs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The rates of memory and of the home in `[compression]`: of the fastest transport, layer by layer. A state that
    was not measured is left out.
    """
    states = {"memory_bytes_per_s": (State.DRAM, State.TCP), "home_bytes_per_s": (State.COLD,)}
    found = {}
    for name, wanted in states.items():
        rates = [
            each["layer_major"]["bytes_per_s"] for each in costs if each["state"] in [state.value for state in wanted]
        ]
        if rates:
            found[name] = six_digits(max(rates))
    return found


def _measured(options: argparse.Namespace, plan: CalibrationPlan, config: Config) -> dict[str, Any] | str:
    """The result, or the reason why there is none. Raises FAILURES."""
    where = where_of(options, config)
    states = [
        state_of_warm(sum(plan.largest_bytes), where.storage) if name == "warm" else State.COLD
        for name in options.states
    ]
    origin = describe_origin()
    found = measure(plan, states, transports_of(options), where)
    reason = cannot_run(options, found["missing"])
    if reason is not None:
        return reason
    settings = {
        "runs": plan.runs,
        "seed": plan.seed,
        "compute_us": list(options.compute_us),
        "storage": storage_of(config),
    }
    computes_s = [compute_us / 1e6 for compute_us in options.compute_us]
    return conclude(found, computes_s, plan.seed, origin, settings)
