"""`objectcache bench ladder` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.arguments import complain, number, writable
from bench.baselines import MemoryCopy
from bench.ladder.bed import LadderSettings
from bench.ladder.plots import plot_figure
from bench.ladder.results import Cell, FigureName, State, cell_json, figure_json, figure_table
from bench.ladder.run import LadderReport, run_figures
from bench.machine import describe_commit, describe_machine
from descriptors.units import MIB
from nixl_client.client import Transport

RUNS_FULL, RUNS_SMOKE = 5, 1
COPY_BYTES, COPY_BYTES_SMOKE = 256 * MIB, 16 * MIB


def add_ladder(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "ladder",
        help="the paper's figures 2, 4, 8, 9, 10, 11 and A8 and table A7, on this machine",
        description="From the raw store up to aggregated layers: each figure with its bytes checked, raw samples, "
        "median and extremes.",
    )
    names = ",".join(name.value for name in FigureName)
    parser.add_argument("--figures", type=_figures, default=tuple(FigureName), metavar="LIST", help=f"default: {names}")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one run: does it work, not how fast")
    parser.add_argument("--runs", type=number(1, 1000), metavar="K", help=f"counted runs; default: {RUNS_FULL}")
    parser.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    parser.add_argument(
        "--transport",
        choices=[each.value for each in Transport],
        default=Transport.UCX.value,
        help="of descriptor GETs; default: ucx",
    )
    parser.add_argument(
        "--serve-options", type=shlex.split, default=[], metavar="TEXT", help="further options of `objectcache serve`"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the stores; default: temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw a chart of each figure; needs the extra 'plot'")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("--plot needs matplotlib: pip install 'objectcache[plot]'", 2)
    unwritable = writable(options.json, options.plot)
    if unwritable is not None:
        return complain(unwritable, 2)
    settings = LadderSettings(
        runs=options.runs or (RUNS_SMOKE if options.smoke else RUNS_FULL),
        seed=options.seed,
        is_smoke=options.smoke,
        transport=options.transport,
        serve_options=tuple(options.serve_options),
        folder=options.folder,
    )
    origin = {**describe_commit(), "machine": describe_machine()}
    copies = _copies(COPY_BYTES_SMOKE if options.smoke else COPY_BYTES, settings.runs)
    report = run_figures(options.figures, settings, origin, lambda figure: print(figure_table(figure), flush=True))
    print(f"\none thread copies memory at {copies.nbytes / copies.median_s() / 1e9:.2f} GB/s here")
    print(_verdict(report))
    if options.json is not None:
        options.json.write_text(json.dumps({**ladder_json(report), "memcpy": cell_json(copies)}, indent=2) + "\n")
    if options.plot is not None:
        options.plot.mkdir(exist_ok=True)
        for figure in report.figures:
            if figure.state is State.DONE:
                plot_figure(figure, options.plot / f"figure-{figure.name.value.lower()}.png")
    return 0 if report.problem is None else 1


def _copies(nbytes: int, runs: int) -> Cell:
    """What one thread copies on this machine: no path can be expected to beat it for long."""
    copy = MemoryCopy(nbytes)
    return Cell({"what": "memcpy, one thread"}, copy.nbytes, tuple(copy.run() for _ in range(runs + 1))[1:])


def ladder_json(report: LadderReport) -> dict[str, Any]:
    """The report as plain values, raw samples included."""
    settings = asdict(report.settings)
    settings["folder"] = None if report.settings.folder is None else str(report.settings.folder)
    return {
        "bench": "ladder",
        "verified": report.problem is None,
        "problem": report.problem,
        **report.origin,
        "settings": settings,
        "figures": {figure.name.value: figure_json(figure) for figure in report.figures},
    }


def _verdict(report: LadderReport) -> str:
    if report.problem is not None:
        return report.problem
    left_out = [figure.name.value for figure in report.figures if figure.state is State.NOT_RUN]
    return "every byte verified" + (f"; not run: {', '.join(left_out)}" if left_out else "")


def _figures(text: str) -> tuple[FigureName, ...]:
    try:
        names = tuple(FigureName(part.strip().upper()) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; there are {', '.join(name.value for name in FigureName)}") from None
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError("names a figure twice")
    return names
