"""`objectcache bench scheduler` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from adapters.nixl_agent import NixlFailure, is_available
from bench.arguments import complain, number, writable
from bench.child import BaselineError
from bench.machine import describe_commit, describe_machine
from bench.paper import WORKLOADS
from bench.scheduler.live import LiveSettings
from bench.scheduler.plots import plot_report
from bench.scheduler.report import report_json
from bench.scheduler.run import Part, ScaleSettings, SchedulerBenchSettings, TraceSettings, run_parts
from bench.scheduler.tables import part_text
from bench.scheduler.trace import EXCERPT, TraceError
from bench.server import BenchServerError
from descriptors.descriptor import CHUNK_TOKENS_MAX
from descriptors.errors import ObjectCacheError
from descriptors.units import KIB, MIB, bytes_per_s_from_gbps
from nixl_client.client import Transport

RANDOM_COUNT, RANDOM_COUNT_SMOKE = 10_000, 6
COST_COUNTS, COST_COUNTS_SMOKE = (1, 10, 100, 1000), (1, 10)
COST_PAYLOADS, COST_PAYLOADS_SMOKE = 1000, 20
TRACE_COUNT_SMOKE = 60
TENANTS, TENANTS_SMOKE = 1000, 20
LINK_SCALE, LINK_SCALE_SMOKE = 0.1, 0.05
TIME_SCALE, TIME_SCALE_SMOKE = 0.25, 0.005
ROUNDS, RUNS = 3, 3
WORKLOADS_SMOKE = ("A",)


def add_scheduler(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "scheduler",
        help="the paper's policies and slack-aware dispatch: simulated, on a server, on random workloads and traces",
        description="Workloads A, B and C of the paper under every policy, with rates held and work-conserving, and "
        "under slack-aware dispatch: simulated unscaled, and on a real server with its transport and clients that play "
        "the compute windows.",
    )
    names = ",".join(part.value for part in Part)
    parser.add_argument("--parts", type=_parts, default=tuple(Part), metavar="LIST", help=f"default: {names}")
    parser.add_argument("--workloads", type=_workloads, metavar="LIST", help="default: A,B,C")
    parser.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one round: does it work, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw charts there; needs the extra 'plot'")
    _add_simulated(parser)
    _add_live(parser)
    parser.set_defaults(command=_run)


def _add_simulated(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--payload-bytes",
        type=number(64 * KIB, 1024 * MIB),
        default=16 * MIB,
        metavar="N",
        help="of the simulated server's payloads for A, B and C; default: 16MiB",
    )
    group.add_argument(
        "--count", type=number(1, 10_000_000), metavar="K", help=f"random workloads; default: {RANDOM_COUNT}"
    )
    group.add_argument("--processes", type=number(1, 256), default=2, metavar="P", help="for them; default: 2")
    group.add_argument(
        "--trace",
        type=Path,
        default=EXCERPT,
        metavar="FILE",
        help="a request trace in the form of Mooncake's FAST'25 release; default: 400 of its requests",
    )
    group.add_argument("--trace-requests", type=number(1, 10_000_000), metavar="K", help="the first ones only")
    group.add_argument(
        "--trace-load", type=_real(0.001, 100), default=0.3, metavar="X", help="of the link; default: 0.3"
    )
    group.add_argument("--gpus", type=number(1, 1_000_000), metavar="K", help="for the trace; default: one a request")
    group.add_argument("--tenants", type=number(1, 100_000), metavar="K", help=f"at once; default: {TENANTS}")
    group.add_argument(
        "--scale-gbps", type=_real(1, 1e6), default=800.0, metavar="X", help="the tenants' link; default: 800"
    )


def _add_live(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("live")
    group.add_argument("--runs", type=number(1, 1000), metavar="K", help=f"counted rounds; default: {ROUNDS}")
    group.add_argument(
        "--link-scale",
        type=_real(1e-4, 10),
        metavar="X",
        help=f"link and bytes over the paper's, N kept and S shrunk; default: {LINK_SCALE}",
    )
    group.add_argument(
        "--time-scale",
        type=_real(1e-4, 10),
        metavar="X",
        help=f"compute windows, and bytes once more, over the paper's; 1 is its own times; default: {TIME_SCALE}",
    )
    group.add_argument(
        "-G", "--chunk-tokens", type=number(1, CHUNK_TOKENS_MAX), default=64, metavar="G", help="default: 64"
    )
    group.add_argument(
        "--transport",
        choices=[each.value for each in (Transport.SHM, Transport.UCX, Transport.HTTP)],
        default=Transport.SHM.value,
        help="default: shm",
    )
    group.add_argument(
        "--gather-s",
        type=_real(0, 10),
        default=0.05,
        metavar="X",
        help="how long an epoch's first request waits for company; default: 0.05",
    )
    group.add_argument("--folder", type=Path, metavar="DIR", help="for the store; default: temporary files")


def _run(options: argparse.Namespace) -> int:
    settings = bench_settings(options)
    if settings.live.transport is Transport.UCX and Part.LIVE in settings.parts and not is_available():
        return complain("NIXL is not installed: pip install 'objectcache[ucx]', or pass --transport shm", 2)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("--plot needs matplotlib: pip install 'objectcache[plot]'", 2)
    unwritable = writable(options.json, options.plot)
    if unwritable is not None:
        return complain(unwritable, 2)
    origin = {**describe_commit(), "machine": describe_machine()}
    try:
        report = run_parts(settings, lambda part, so_far: print(part_text(part, so_far) + "\n", flush=True))
    except TraceError as error:
        return complain(str(error), 2)
    except (BaselineError, BenchServerError, ObjectCacheError, NixlFailure, OSError) as error:
        return complain(str(error), 1)
    if options.json is not None:
        options.json.write_text(json.dumps(report_json(report, origin), indent=2) + "\n")
    if options.plot is not None:
        options.plot.mkdir(exist_ok=True)
        plot_report(report, options.plot)
    return 0 if report.problem is None else 1


def bench_settings(options: argparse.Namespace) -> SchedulerBenchSettings:
    """Explicit options win over the size of the run."""
    smoke: bool = options.smoke
    tenants = options.tenants or (TENANTS_SMOKE if smoke else TENANTS)
    live = LiveSettings(
        workloads=options.workloads or (WORKLOADS_SMOKE if smoke else WORKLOADS),
        rounds=options.runs or (1 if smoke else ROUNDS),
        link_scale=options.link_scale or (LINK_SCALE_SMOKE if smoke else LINK_SCALE),
        time_scale=options.time_scale or (TIME_SCALE_SMOKE if smoke else TIME_SCALE),
        chunk_tokens=options.chunk_tokens,
        transport=Transport(options.transport),
        gather_s=options.gather_s,
        seed=options.seed,
        folder=options.folder,
    )
    trace_count: int | None = options.trace_requests or (TRACE_COUNT_SMOKE if smoke else None)
    return SchedulerBenchSettings(
        parts=options.parts,
        live=live,
        trace=TraceSettings(options.trace, trace_count, options.trace_load, options.gpus),
        scale=ScaleSettings(tenants, 3 * tenants, bytes_per_s_from_gbps(options.scale_gbps)),
        payload_bytes_max=options.payload_bytes,
        random_count=options.count or (RANDOM_COUNT_SMOKE if smoke else RANDOM_COUNT),
        processes=1 if smoke else options.processes,
        cost_counts=COST_COUNTS_SMOKE if smoke else COST_COUNTS,
        cost_payloads=COST_PAYLOADS_SMOKE if smoke else COST_PAYLOADS,
        cost_runs=1 if smoke else RUNS,
        seed=options.seed,
    )


def _parts(text: str) -> tuple[Part, ...]:
    try:
        parts = tuple(Part(name.strip()) for name in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; there are {', '.join(part.value for part in Part)}") from None
    if len(set(parts)) != len(parts):
        raise argparse.ArgumentTypeError("names a part twice")
    return parts


def _workloads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(WORKLOADS) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(WORKLOADS)}, with commas between")
    return names


def _real(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least:g} to {most:g}, not {text}")
        return value

    return parse
