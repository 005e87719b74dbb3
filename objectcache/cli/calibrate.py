"""`objectcache calibrate` on the command line: measure this machine, and write the results into the config file."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from objectcache.calibration.compute.shapes import SHAPES

RUNS, RUNS_SMOKE = 5, 2
RUNS_LINK = 7
RUNS_MAX = 1000
COMPUTES_US = (100.0, 500.0, 2000.0)
STATES = ("warm", "cold")
HIT_RATE = 0.5
"""The part of a context that servers assume to be cached, until the file says another one."""
WRONG_USE = 2
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_calibrate(commands: _Commands, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the sub-command and its own, with the options of `parents`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine and write the results into the config file",
        usage="%(prog)s (theta | link | model NAME | quality MODEL) [options]",
        description="Run it once on a new machine. Each measurement edits the file of --config in place, or makes it; "
        "without, it prints what it would write.",
    )
    what = parser.add_subparsers(required=True, metavar="WHAT", prog=parser.prog)
    theta = what.add_parser(
        "theta",
        parents=parents,
        help="find the payload from which layer-major is the better order",
        usage="%(prog)s [options]",
        description="Start servers on loopback with the config file's [storage], fetch payloads of many sizes in both "
        "orders, every byte compared, and find the payload from which layer-major is the better one: [storage] "
        "theta_bytes. Where [compression] is on, also its rates and how fast codecs are decoded.",
    )
    _add_servers(theta)
    theta.set_defaults(command=_theta, states=STATES, compute_us=COMPUTES_US)

    link = what.add_parser(
        "link",
        parents=parents,
        help="measure what a transport moves, and the margin that its rates need",
        usage="%(prog)s [options]",
        description="Measure what a transport moves and the margin its rates need: [scheduler] link_bytes_per_s and "
        "margin_bytes_per_s. It needs --transport where it is to be written.",
    )
    _add_servers(link)
    link.set_defaults(command=_link)

    model = what.add_parser(
        "model",
        parents=parents,
        help="measure a layer of a model, for descriptors that state no compute times",
        usage="%(prog)s NAME [options]",
        description="Measure a decoder layer of that model with random weights, on a GPU where there is one: "
        "[[compute_profiles]]. It needs torch.",
    )
    names = [shape.name for shape in SHAPES]
    model.add_argument("model", choices=names, metavar="NAME", help=", ".join(names))
    _add_results(model)
    _add_plot(model)
    model.set_defaults(command=_model, hit_rate=HIT_RATE)

    quality = what.add_parser(
        "quality",
        parents=parents,
        help="measure what each codec changes in a model's answers",
        usage="%(prog)s MODEL [TEXTS] [options]",
        description="Measure what each codec changes in the answers of a model to texts of the kind that it is asked "
        "about, and to facts in them: [compression.codecs], and the losses file. It needs torch and transformers.",
    )
    quality.add_argument("quality", metavar="MODEL", help="a directory or a Hugging Face name")
    quality.add_argument(
        "texts", type=Path, nargs="?", metavar="TEXTS", help="a file of text; default: Python's own documentation"
    )
    quality.add_argument(
        "--class",
        dest="content_class",
        metavar="NAME",
        help="the texts are of this class of content (x-amz-objectcache-class): [compression.classes]",
    )
    _add_results(quality)
    _add_plot(quality)
    quality.set_defaults(command=_quality)


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML, edited in place or made; without: printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--runs", type=_runs, help=argparse.SUPPRESS)  # for tests and benches
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)  # tiny sizes, and nothing is written
    parser.set_defaults(data=None, transport="auto")


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve; needs the extra 'demo'")


def _add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the options of a measurement with servers of our own."""
    _add_results(parser)
    _add_plot(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="on the disk to be measured; default: temporary files")
    parser.add_argument(
        "--transport",
        choices=("auto", "shm", "ucx", "http"),
        default="auto",
        help="auto (default): each that can run here",
    )


def _theta(options: argparse.Namespace) -> int:
    def run() -> int:
        from objectcache.calibration.theta import full_plan, smoke_plan
        from objectcache.cli.calibrate_theta import calibrate_theta

        runs = options.runs or (RUNS_SMOKE if options.smoke else RUNS)
        return calibrate_theta(options, smoke_plan(runs) if options.smoke else full_plan(runs))

    return _checked(options, run)


def _link(options: argparse.Namespace) -> int:
    def run() -> int:
        from objectcache.calibration.link import full_link_plan, smoke_link_plan
        from objectcache.cli.calibrate_link import calibrate_link

        runs = options.runs or (RUNS_SMOKE if options.smoke else RUNS_LINK)
        return calibrate_link(options, smoke_link_plan(runs) if options.smoke else full_link_plan(runs))

    problem = None
    if options.config is not None and not options.smoke and options.transport == "auto":
        problem = "link writes the figures of one transport: pass --transport, or no --config to see all of them"
    return _checked(options, run, problem)


def _model(options: argparse.Namespace) -> int:
    def run() -> int:
        from objectcache.cli.calibrate_model import calibrate_model

        return calibrate_model(options, options.runs or (RUNS_SMOKE if options.smoke else RUNS))

    needs = "torch" if importlib.util.find_spec("torch") is None else None
    return _checked(options, run, None if needs is None else f"model needs torch: pip install {needs} transformers")


def _quality(options: argparse.Namespace) -> int:
    def run() -> int:
        from objectcache.cli.calibrate_quality import calibrate_quality

        return calibrate_quality(options)

    if importlib.util.find_spec("transformers") is None:
        return _checked(options, run, "quality needs torch and transformers: pip install torch transformers")
    from objectcache.cli.calibrate_quality import options_problem

    return _checked(options, run, options_problem(options))


def _checked(options: argparse.Namespace, run: Callable[[], int], problem: str | None = None) -> int:
    """Run it where nothing is wrong with the options, which is told before anything is started. The exit status: 0
    done; 1 could not be measured, or wrong bytes; 2 wrong use. Raises ConfigError.
    """
    problem = problem or _problem(options)
    if problem is not None:
        print(f"objectcache calibrate: {problem}", file=sys.stderr)
        return WRONG_USE
    if options.data is not None:
        options.data.mkdir(exist_ok=True)
    return run()


def _problem(options: argparse.Namespace) -> str | None:
    """The problem of the options that all measurements have; None where there is none."""
    for file in (options.config, options.json, options.plot):
        if file is not None and not file.absolute().parent.is_dir():
            return f"{file.parent}: no such folder"
    if options.data is not None and not options.data.absolute().parent.is_dir():
        return f"{options.data.parent}: no such folder"
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    if options.config is not None and not os.access(options.config.resolve().parent, os.W_OK):
        return f"{options.config}: its folder cannot be written to"
    return None


def _runs(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= RUNS_MAX:
        raise argparse.ArgumentTypeError(f"must be 1 to {RUNS_MAX}")
    return int(text)
