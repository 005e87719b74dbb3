"""`objectcache bench ttft` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from adapters.nixl_agent import NixlFailure, is_available
from bench.arguments import complain, number, writable
from bench.child import BaselineError
from bench.device.command import add_device_options, run_on_device
from bench.machine import describe_commit, describe_machine
from bench.samples import State
from bench.server import BenchServerError
from bench.ttft.bed import BedSettings
from bench.ttft.cases import CHUNK_TOKENS, CONTEXTS, HIT_RATES, Scale
from bench.ttft.play import Waits
from bench.ttft.plots import plot_figures
from bench.ttft.report import tables, to_json
from bench.ttft.run import FigureName, TtftSettings, measure_ttft
from descriptors.errors import ObjectCacheError
from descriptors.units import bytes_per_s_from_gbps
from nixl_client.client import Transport

RUNS, RUNS_SMOKE = 5, 1
SWEEP_RUNS = 3
LINK_GBPS, CAP_GBPS = 100.0, 10.0
BYTES_SCALE = 0.125
TIME_SCALE_SMOKE = 0.02
SWEEP_HIT_RATES = (0.5, 0.875)
SWEEP_CHUNK_TOKENS = 64
RATE_FACTORS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
RATE_FACTORS_SMOKE = (0.5, 1.0, 2.0)
Value = TypeVar("Value")


def add_ttft(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "ttft",
        help="the paper's figures 13, 14 and 15: time to first token with played compute windows",
        description="Prefixes of Llama 3.1 8B, 4K and 64K, fetched from a server of its own over a played link, or "
        "copied out of local memory, while compute windows of Table A8 pass; every byte compared.",
    )
    figures = ",".join(name.value for name in FigureName)
    parser.add_argument(
        "--figures", type=_figures, default=tuple(FigureName), metavar="LIST", help=f"default: {figures}"
    )
    parser.add_argument("--contexts", type=_some(str, CONTEXTS), metavar="LIST", help="default: 4K,64K")
    parser.add_argument(
        "--hits",
        type=_hits,
        metavar="LIST",
        help="hit rates in percent; default: 12.5,50,87.5, and 50,87.5 in figure 15",
    )
    parser.add_argument(
        "-G", "--chunk-tokens", type=_some(int, CHUNK_TOKENS), metavar="LIST", help="default: 16,64,256"
    )
    parser.add_argument(
        "--scale", type=_real(1e-4, 1), default=BYTES_SCALE, help=f"of bytes and link; default: {BYTES_SCALE}"
    )
    parser.add_argument(
        "--time-scale", type=_real(1e-4, 1), metavar="F", help="of windows, and once more of bytes; default: 1"
    )
    parser.add_argument(
        "--link-gbps",
        type=_real(0, 1e5),
        metavar="R",
        help="unscaled; 0: not limited; default: 100, with --device not limited",
    )
    parser.add_argument("--cap-gbps", type=_real(0.01, 1e5), default=CAP_GBPS, metavar="R", help="default: 10")
    parser.add_argument(
        "--play", action="store_true", help="wait for every window, also when all layers are there: minutes longer"
    )
    parser.add_argument(
        "--gather-ms", type=_real(0, 1e4), metavar="MS", help="the scheduler's gather_s; default: the server's"
    )
    parser.add_argument("--transport", choices=[each.value for each in Transport], default="shm", help="default: shm")
    parser.add_argument(
        "--state",
        choices=[each.value for each in (State.DRAM, State.PAGE_CACHE, State.COLD)],
        default=State.DRAM.value,
        help="where the stored chunks are; default: dram",
    )
    add_device_options(parser)
    parser.add_argument("--runs", type=number(1, 1000), metavar="K", help=f"counted rounds; default: {RUNS}")
    parser.add_argument("--sweep-runs", type=number(1, 1000), metavar="K", help=f"of figure 15; default: {SWEEP_RUNS}")
    parser.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one run: does it work, not how fast")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the stores; default: temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw a chart of each figure; needs the extra 'plot'")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    if options.device is not None:
        return run_on_device(options, settings)
    if settings.bed.transport is Transport.UCX and not is_available():
        return complain("NIXL is not installed: pip install 'objectcache[ucx]', or pass --transport shm", 2)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("--plot needs matplotlib: pip install 'objectcache[plot]'", 2)
    if settings.link_bytes_per_s is None and FigureName.OVERHEAD not in settings.figures:
        return complain("figures 14 and 15 are about a limited link: pass --link-gbps", 2)
    if settings.link_bytes_per_s is not None and settings.cap_bytes_per_s >= settings.link_bytes_per_s:
        return complain("--cap-gbps must be below --link-gbps", 2)
    unwritable = writable(options.json, options.plot)
    if unwritable is not None:
        return complain(unwritable, 2)
    origin = {**describe_commit(), "machine": describe_machine()}
    try:
        found = measure_ttft(settings)
    except (BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError, OSError) as error:
        return complain(str(error), 1)
    except MemoryError:
        return complain("not enough memory: pass a smaller --scale", 1)
    print(tables(settings, found))
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(settings, found, origin), indent=2) + "\n")
    if options.plot is not None:
        options.plot.mkdir(exist_ok=True)
        plot_figures(settings, found, options.plot)
    return 0 if found.problem is None else 1


def settings_of(options: argparse.Namespace) -> TtftSettings:
    """Explicit options win over the size of the run."""
    is_smoke = options.smoke
    link_gbps = LINK_GBPS if options.link_gbps is None else options.link_gbps
    link_bytes_per_s = bytes_per_s_from_gbps(link_gbps) or None
    figures = options.figures if link_bytes_per_s is not None else (FigureName.OVERHEAD,)
    chunk_tokens = options.chunk_tokens or ((SWEEP_CHUNK_TOKENS,) if is_smoke else CHUNK_TOKENS)
    return TtftSettings(
        bed=BedSettings(
            scale=Scale(options.scale, options.time_scale or (TIME_SCALE_SMOKE if is_smoke else 1.0)),
            waits=Waits.ALL if options.play else Waits.LOADING,
            transport=Transport(options.transport),
            seed=options.seed,
            gather_s=None if options.gather_ms is None else options.gather_ms / 1e3,
            folder=options.folder,
            state=State(options.state),
        ),
        figures=tuple(figure for figure in options.figures if figure in figures),
        contexts=options.contexts or (("4K",) if is_smoke else CONTEXTS),
        hit_rates=options.hits or (HIT_RATES[1:] if is_smoke else HIT_RATES),
        chunk_tokens=chunk_tokens,
        link_bytes_per_s=link_bytes_per_s,
        cap_bytes_per_s=bytes_per_s_from_gbps(options.cap_gbps),
        sweep_hit_rates=options.hits or (SWEEP_HIT_RATES[1:] if is_smoke else SWEEP_HIT_RATES),
        sweep_chunk_tokens=SWEEP_CHUNK_TOKENS if SWEEP_CHUNK_TOKENS in chunk_tokens else chunk_tokens[0],
        rate_factors=RATE_FACTORS_SMOKE if is_smoke else RATE_FACTORS,
        runs=options.runs or (RUNS_SMOKE if is_smoke else RUNS),
        sweep_runs=options.sweep_runs or (RUNS_SMOKE if is_smoke else SWEEP_RUNS),
    )


def _figures(text: str) -> tuple[FigureName, ...]:
    return tuple(FigureName(name) for name in _some(str, tuple(name.value for name in FigureName))(text))


def _hits(text: str) -> tuple[float, ...]:
    found: tuple[float, ...] = _some(float, tuple(100 * rate for rate in HIT_RATES))(text)
    return tuple(percent / 100 for percent in found)


def _some(of: Callable[[str], Value], known: tuple[Value, ...]) -> Callable[[str], tuple[Value, ...]]:
    def parse(text: str) -> tuple[Value, ...]:
        try:
            values = tuple(of(part.strip()) for part in text.split(","))
        except ValueError:
            values = ()
        if not values or not set(values) <= set(known) or len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(map(str, known))}, with commas between")
        return values

    return parse


def _real(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}")
        return value

    return parse
