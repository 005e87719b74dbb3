"""`objectcache bench overlap` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.nixl_agent import is_available
from bench.arguments import complain, number, writable
from bench.compute.shapes import SHAPES, ModelShape
from bench.machine import describe_commit, describe_machine
from bench.overlap.plots import plot_overlap
from bench.overlap.report import overlap_json, overlap_table
from bench.overlap.run import run_overlap
from bench.overlap.throughput import FULL, SMOKE, ThroughputPlan
from descriptors.descriptor import CHUNK_TOKENS_MAX
from nixl_client.client import Transport

if TYPE_CHECKING:
    from bench.compute.measure import ComputePlan

RUNS_FULL, RUNS_SMOKE = 5, 1
CHUNK_TOKENS = 64
NAMES = tuple(model.name for model in SHAPES)
DEVICES = ("cpu", "cuda")
DTYPES = ("bfloat16", "float32")


def add_overlap(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "overlap",
        help="what hiding the transfer behind prefill asks of it (figures 12, A4 to A7), and what this machine carries",
        description="Layer bytes, layer compute and the throughput between them over contexts and hit rates, from the "
        "paper's tables and, with --measure, from layers timed here; marked against the layer-major throughput of a "
        "server of its own.",
    )
    parser.add_argument("--models", type=_models, default=SHAPES, metavar="LIST", help=f"default: {','.join(NAMES)}")
    parser.add_argument("--measure", action="store_true", help="time decoder layers here too; needs the extra 'torch'")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="for --measure; default: cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="for --measure; default: bfloat16")
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
        "-G",
        "--chunk-tokens",
        type=_chunk_tokens,
        default=CHUNK_TOKENS,
        metavar="G",
        help=f"tokens of a chunk, a power of two up to {_smallest_layer()}; default: {CHUNK_TOKENS}",
    )
    parser.add_argument(
        "--serve-options", type=shlex.split, default=[], metavar="TEXT", help="further options of `objectcache serve`"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the store; default: temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the heatmaps; needs the extra 'plot'")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    problem = _problem(options)
    if problem is not None:
        return complain(problem, 2)
    runs = options.runs or (RUNS_SMOKE if options.smoke else RUNS_FULL)
    throughput = ThroughputPlan(
        transport=Transport(options.transport),
        chunk_tokens=options.chunk_tokens,
        payloads=SMOKE if options.smoke else FULL,
        runs=runs,
        seed=options.seed,
        serve_options=tuple(options.serve_options),
        folder=options.folder,
    )
    compute = _compute_plan(options, runs) if options.measure else None
    origin = {**describe_commit(), "machine": describe_machine()}
    settings = {
        "models": [model.name for model in options.models],
        "measure": options.measure,
        "device": options.device,
        "dtype": options.dtype,
        "smoke": options.smoke,
        "runs": runs,
        "seed": options.seed,
        "transport": options.transport,
        "chunk_tokens": options.chunk_tokens,
        "serve_options": options.serve_options,
    }
    report = run_overlap(options.models, throughput, compute, origin, settings)
    print(overlap_table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(overlap_json(report), indent=2) + "\n")
    if options.plot is not None:
        plot_overlap(report, options.plot)
    return 0 if report.problem is None else 1


def _problem(options: argparse.Namespace) -> str | None:
    """What keeps these options from being carried out here."""
    if options.transport == Transport.UCX.value and not is_available():
        return "NIXL is not installed: pip install 'objectcache[ucx]', or pass --transport shm"
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'objectcache[plot]'"
    if options.measure:
        if importlib.util.find_spec("torch") is None:
            return "--measure needs torch: pip install 'objectcache[torch]'"
        from bench.compute.layer import Device, is_present

        if not is_present(Device(options.device)):
            return "torch sees no CUDA device here"
    return writable(options.json, options.plot)


def _compute_plan(options: argparse.Namespace, runs: int) -> ComputePlan:
    from bench.compute.layer import Device, Dtype
    from bench.compute.measure import compute_plan, smoke_plan

    device, dtype = Device(options.device), Dtype(options.dtype)
    if options.smoke:
        return smoke_plan(device, dtype, options.seed)
    return compute_plan(device, dtype, runs, options.seed)


def _models(text: str) -> tuple[ModelShape, ...]:
    names = text.split(",")
    if len(set(names)) != len(names) or not set(names) <= set(NAMES):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(NAMES)}, with commas between")
    return tuple(model for model in SHAPES if model.name in names)


def _chunk_tokens(text: str) -> int:
    value = number(1, min(CHUNK_TOKENS_MAX, _smallest_layer()))(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError("must be a power of two")
    return value


def _smallest_layer() -> int:
    return min(each.layer_tokens for each in SMOKE)
