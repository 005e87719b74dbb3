"""`objectcache calibrate` on the command line: measure this machine, and write the results into the config file."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

RUNS, RUNS_SMOKE = 5, 2
RUNS_LINK = 7
RUNS_MAX = 1000
COMPUTES_US = "100,500,2000"
STATES = ("warm", "cold")
HIT_RATE = 0.5
WRONG_USE = 2


def add_calibrate(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], parents: Sequence[argparse.ArgumentParser]
) -> None:
    """Add the sub-command, with the options of `parents`."""
    parser = commands.add_parser(
        "calibrate",
        parents=parents,
        help="measure this machine and write the results into the config file",
        usage="%(prog)s [--link | --model NAME | --quality MODEL] [options]",
        description="Run it once on a new machine. By itself: start servers on loopback with the config file's "
        "[storage], fetch payloads of many sizes in both orders, every byte compared, and find the payload from which "
        "layer-major is the better one (theta_bytes). With --link, --model or --quality: measure that instead.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--link",
        action="store_true",
        help="measure what a transport moves and the margin its rates need: [scheduler] link_bytes_per_s and "
        "margin_bytes_per_s; needs --transport where it is to be written",
    )
    what.add_argument(
        "--model", metavar="NAME", help="measure a layer of that model: [[compute_profiles]]; needs the extra 'torch'"
    )
    what.add_argument(
        "--quality",
        metavar="MODEL",
        help="measure what each codec changes in the answers of a model, a directory or a Hugging Face name, on "
        "--texts: [compression.codecs]; needs the extra 'torch'",
    )
    parser.add_argument(
        "--texts", type=Path, metavar="FILE", help="for --quality: text of the kind that the model is asked about"
    )
    parser.add_argument(
        "--class",
        dest="content_class",
        metavar="NAME",
        help="for --quality: the texts are of this class of content (x-amz-objectcache-class): [compression.classes]",
    )
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="also write [compression] memory_bytes_per_s and home_bytes_per_s, and how fast codecs are decoded",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML, edited in place or made; without: printed")
    parser.add_argument("--data", type=Path, metavar="DIR", help="on the disk to be measured; default: temporary files")
    parser.add_argument(
        "--transport",
        choices=("auto", "shm", "ucx", "http"),
        default="auto",
        help="auto (default): each that can run here",
    )
    parser.add_argument("--states", type=_states, metavar="LIST", help="for theta; default: warm,cold")
    parser.add_argument(
        "--runs", type=_runs, metavar="N", help=f"counted rounds; default: {RUNS}, with --link {RUNS_LINK}"
    )
    parser.add_argument(
        "--compute-us",
        type=_computes,
        metavar="LIST",
        help=f"for theta: compute times of a layer, in microseconds, to weigh the orders by; default: {COMPUTES_US}",
    )
    parser.add_argument(
        "--hit-rate",
        type=_hit_rate,
        metavar="F",
        help=f"for --model: the part of a context that servers assume to be cached; default: {HIT_RATE}",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="for --model; default: cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve; needs the extra 'demo'")
    parser.add_argument("--dry-run", action="store_true", help="measure and show, write no config")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes: does it work, not how fast; implies --dry-run"
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 done; 1 could not be measured, or wrong bytes; 2 wrong use. Raises ConfigError."""
    problem = _problem(options)
    if problem is not None:
        print(f"objectcache calibrate: {problem}", file=sys.stderr)
        return WRONG_USE
    if options.data is not None:
        options.data.mkdir(exist_ok=True)
    runs = options.runs or (RUNS_SMOKE if options.smoke else RUNS_LINK if options.link else RUNS)
    options.states = options.states or STATES
    options.compute_us = options.compute_us or _computes(COMPUTES_US)
    options.hit_rate = options.hit_rate or HIT_RATE
    options.device = options.device or "cpu"
    if options.link:
        from objectcache.calibration.link import full_link_plan, smoke_link_plan
        from objectcache.cli.calibrate_link import calibrate_link

        return calibrate_link(options, smoke_link_plan(runs) if options.smoke else full_link_plan(runs))
    if options.quality is not None:
        from objectcache.cli.calibrate_quality import calibrate_quality

        return calibrate_quality(options)
    if options.model is not None:
        from objectcache.cli.calibrate_model import calibrate_model

        return calibrate_model(options, runs)
    from objectcache.calibration.theta import full_plan, smoke_plan
    from objectcache.cli.calibrate_theta import calibrate_theta

    return calibrate_theta(options, smoke_plan(runs) if options.smoke else full_plan(runs))


def _problem(options: argparse.Namespace) -> str | None:
    """The problem of the options, checked before anything is started; None where there is none."""
    for file in (options.config, options.json, options.plot):
        if file is not None and not file.absolute().parent.is_dir():
            return f"{file.parent}: no such folder"
    if options.data is not None and not options.data.absolute().parent.is_dir():
        return f"{options.data.parent}: no such folder"
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    if options.config is not None and not os.access(options.config.resolve().parent, os.W_OK):
        return f"{options.config}: its folder cannot be written to"
    return _problem_of_what(options)


def _problem_of_what(options: argparse.Namespace) -> str | None:
    """The option that does not fit the measurement; None where all do."""
    is_theta = not options.link and options.model is None and options.quality is None
    if options.tiers and not is_theta:
        return "--tiers goes with theta: not with --link, --model or --quality"
    if options.content_class is not None and options.quality is None:
        return "--class is for --quality"
    if options.quality is not None:
        from objectcache.cli.calibrate_quality import texts_problem

        if importlib.util.find_spec("transformers") is None:
            return "--quality needs torch and transformers: pip install torch transformers"
        return texts_problem(options.texts, options.content_class)
    if not is_theta and (options.states is not None or options.compute_us is not None):
        return "--states and --compute-us are for theta: not with --link or --model"
    if options.model is None:
        if options.hit_rate is not None or options.device is not None:
            return "--hit-rate and --device are for --model"
        will_write = options.config is not None and not options.dry_run and not options.smoke
        if options.link and options.transport == "auto" and will_write:
            return "--link writes the figures of one transport: pass --transport, or --dry-run to see all of them"
        return None
    from objectcache.calibration.compute.shapes import SHAPES

    if options.transport != "auto" or options.data is not None:
        return "--transport and --data do not go with --model"
    names = [shape.name for shape in SHAPES]
    if options.model not in names:
        return f"--model: must be one of {', '.join(names)}"
    if importlib.util.find_spec("torch") is None:
        return "--model needs torch: pip install torch transformers"
    return None


def _states(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(STATES) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(STATES)}, with commas between")
    return names


def _runs(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= RUNS_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 to {RUNS_MAX}")
    return int(text)


def _computes(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if not all(0 <= compute_us < 1e9 for compute_us in found) or len(set(found)) != len(found):
        raise argparse.ArgumentTypeError("must be different times in microseconds")
    return found


def _hit_rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError("must be a number between 0 and 1")
    return found
