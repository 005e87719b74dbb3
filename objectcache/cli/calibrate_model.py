"""`objectcache calibrate model`: the cost of a model's prefill here, for descriptors that state no compute times."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from descriptors.recompute import PrefillCosts
from objectcache.calibration.compute.cost_model import Fit, Profile, compute_profile
from objectcache.calibration.compute.layer import Dtype, present_device
from objectcache.calibration.compute.measure import (
    ComputePlan,
    compute_plan,
    measure_compute,
    model_json,
    model_table,
    plot_model,
    smoke_plan,
)
from objectcache.calibration.compute.shapes import shape
from objectcache.calibration.origin import describe_origin
from objectcache.cli.calibrate_run import (
    DONE,
    config_of,
    failure,
    print_unwritten,
    target_of,
    write_json,
)
from objectcache.cli.config_file import check_edit, edit_file
from objectcache.cli.config_tables import ComputeProfileConfig
from objectcache.cli.config_text import entry_lines, with_profile

SEED = 1
DTYPE = Dtype.BFLOAT16
"""The element type that models are served in."""


def calibrate_model(options: argparse.Namespace, runs: int) -> int:
    """The exit status: 0 done; 1 could not be measured. Raises ConfigError."""
    config = config_of(options)
    target = target_of(options)
    device = present_device()
    model = shape(options.model)
    if target is not None:  # before the minutes of measuring
        nothing = compute_profile(model, Fit(PrefillCosts(0.0, 0.0, 0.0), ()), options.hit_rate)
        check_edit(target, lambda text: with_profile(text, nothing))
    plan = smoke_plan(device, DTYPE, SEED) if options.smoke else compute_plan(device, DTYPE, runs, SEED)
    origin = describe_origin()
    try:
        measured = measure_compute(model, plan)
    except (RuntimeError, ValueError, MemoryError) as error:
        return failure(f"torch: {error}")
    profile = compute_profile(model, measured.fit, options.hit_rate)
    print(model_table(measured, profile, origin))
    write_json(options, model_json(measured, profile, origin, _settings(plan)))
    if options.plot is not None:
        plot_model(measured, options.plot)
    if target is not None:
        edit_file(target, lambda text: with_profile(text, profile))
        print(f"\n{target}: [[compute_profiles]] has {model.name}")
    else:
        print_unwritten(entry_lines("compute_profiles", profile))
    first = goes_by(config.compute_profiles, profile)
    if first != model.name:
        print(f"\nbut {first} has the same layers and bytes a token, and comes first: descriptors go by that one")
    return DONE


def goes_by(profiles: Sequence[ComputeProfileConfig], profile: Profile) -> str:
    """The name of the profile that a server uses for descriptors of this profile's shape, once it is written: the first
    profile of that shape.
    """
    wanted = (profile["num_layers"], profile["token_layer_bytes"])
    for each in profiles:
        if each.name == profile["name"] or (each.num_layers, each.token_layer_bytes) == wanted:
            return each.name
    return str(profile["name"])


def _settings(plan: ComputePlan) -> dict[str, object]:
    return {
        "device": plan.device.value,
        "dtype": plan.dtype.value,
        "runs": plan.runs,
        "seed": plan.seed,
        "is_smoke": plan.is_smoke,
    }
