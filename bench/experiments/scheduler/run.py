"""`objectcache bench scheduler` on the command line, and its parts, one after the other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from bench.core.experiment import Experiment, need_nixl, plain, published
from bench.core.options import Options, each, filled, names, number, real, some_of
from bench.core.show import Json
from bench.experiments.scheduler.cells import ratios, simulation
from bench.experiments.scheduler.live import LiveSettings, measure_live
from bench.experiments.scheduler.scale import measure_costs, random_result, serve_scale, serve_trace
from bench.experiments.scheduler.show import plot, show
from bench.experiments.scheduler.workloads import EXCERPT, read_trace, trace_requests
from bench.paper.tables import WORKLOADS
from descriptors.descriptor import CHUNK_TOKENS_MAX
from descriptors.units import KIB, MIB, bytes_per_s_from_gbps
from nixl_client.client import Transport

COSTS = {False: ((1, 10, 100, 1000), 1000, 3), True: ((1, 10), 20, 1)}
"""Active requests, payloads and runs by which decisions are timed, in a full and in a smoke run."""
TRANSPORTS = (Transport.SHM, Transport.UCX, Transport.HTTP)


class Part(Enum):
    """By their names on the command line."""

    SIMULATION = "simulation"
    RANDOM = "random"
    LIVE = "live"
    COST = "cost"
    TRACE = "trace"
    SCALE = "scale"


def _declare(options: Options) -> None:
    every = tuple(Part)
    text = f"default: {names(every)}"
    options.add("--parts", type=some_of(every), default=every, metavar="LIST", help=text)
    some, text = each(str, WORKLOADS), "default: A,B,C"
    options.add("--workloads", type=some, metavar="LIST", full=WORKLOADS, smoke=("A",), help=text)
    options.seed()
    group = options.group("simulation")
    text = "of the simulated server's payloads for A, B and C; default: 16MiB"
    size = number(64 * KIB, 1024 * MIB)
    group.add("--payload-bytes", dest="payload_bytes_max", type=size, default=16 * MIB, metavar="N", help=text)
    many = number(1, 10_000_000)
    group.add("--count", type=many, metavar="K", full=10_000, smoke=6, help="random workloads; default: 10000")
    group.add("--processes", type=number(1, 256), metavar="P", full=2, smoke=1, help="for them; default: 2")
    text = "a request trace in the form of Mooncake's FAST'25 release; default: 400 of its requests"
    group.add("--trace", type=Path, default=EXCERPT, metavar="FILE", help=text)
    group.add("--trace-requests", type=many, metavar="K", smoke=60, help="the first ones only")
    group.add("--trace-load", type=real(0.001, 100), default=0.3, metavar="X", help="of the link; default: 0.3")
    group.add("--gpus", type=number(1, 1_000_000), metavar="K", help="for the trace; default: one a request")
    group.add("--tenants", type=number(1, 100_000), metavar="K", full=1000, smoke=20, help="at once; default: 1000")
    text = "the tenants' link; default: 800"
    group.add("--scale-gbps", type=real(1, 1e6), default=800.0, metavar="X", help=text)
    group = options.group("live")
    group.runs(3)
    factor = real(1e-4, 10)
    text = "link and bytes over the paper's, N kept and S shrunk; default: 0.1"
    group.add("--link-scale", type=factor, metavar="X", full=0.1, smoke=0.05, help=text)
    text = "compute windows, and bytes once more, over the paper's; 1 is its own times; default: 0.25"
    group.add("--time-scale", type=factor, metavar="X", full=0.25, smoke=0.005, help=text)
    grain = number(1, CHUNK_TOKENS_MAX)
    group.add("-G", "--chunk-tokens", type=grain, default=64, metavar="G", help="default: 64")
    choices = [transport.value for transport in TRANSPORTS]
    group.add("--transport", choices=choices, default="shm", help="default: shm")
    text = "how long an epoch's first request waits for company; default: 0.05"
    group.add("--gather-s", type=real(0, 10), default=0.05, metavar="X", help=text)
    group.folder("for the store")


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    parts, seed = options.parts, options.seed
    live = filled(LiveSettings, options, rounds=options.runs, transport=Transport(options.transport))
    need_nixl(live.transport is Transport.UCX and Part.LIVE in parts, "--transport shm")
    entries = read_trace(options.trace, options.trace_requests) if Part.TRACE in parts else []
    arrivals = trace_requests(entries) if entries else []
    costs = dict(zip(("cost_counts", "cost_payloads", "cost_runs"), COSTS[options.smoke], strict=True))
    scale = {
        "tenant_count": options.tenants,
        "request_count": 3 * options.tenants,
        "link_bytes_per_s": bytes_per_s_from_gbps(options.scale_gbps),
    }
    variants = [each.name for each in live.variants]
    settings = {
        "parts": parts,
        "live": {
            **plain(live),
            "variants": variants,
            "per_layer_chunk_bytes": live.per_layer_chunk_bytes,
            "shrinks": "S",
        },
        "trace": {
            "file": options.trace.name,
            "count_max": options.trace_requests,
            "load": options.trace_load,
            "gpu_count": options.gpus,
            "payload_bytes_max": None,
        },
        "scale": scale,
        "payload_bytes_max": options.payload_bytes_max,
        "random_count": options.count,
        "processes": options.processes,
        **costs,
        "seed": seed,
    }
    found: dict[str, Any] = {"ratios": {}, **dict.fromkeys(part.value for part in Part)}
    problem = None
    if Part.SIMULATION in parts:
        found["simulation"] = simulation(live.workloads, options.payload_bytes_max)
    if Part.RANDOM in parts:
        found["random"] = random_result(options.count, seed, options.processes)
    if Part.LIVE in parts:
        found["live"], problem = measure_live(live)
        found["ratios"] = ratios(found["live"]["cells"])
    if Part.COST in parts:
        found["cost"] = measure_costs(*COSTS[options.smoke], seed)
    if Part.TRACE in parts:
        found["trace"] = serve_trace(arrivals, options.trace_load, options.gpus)
        found["trace_entry_count"] = len(entries)
    if Part.SCALE in parts:
        found["scale"] = serve_scale(**scale, seed=seed)
    return published("scheduler", origin, settings, problem, **found)


SCHEDULER = Experiment(
    name="scheduler",
    help="the paper's policies and slack-aware dispatch: simulated, on a server, on random workloads and traces",
    description="Workloads A, B and C of the paper under every policy, with rates held and work-conserving, and under "
    "slack-aware dispatch: simulated unscaled, and on a real server with its transport and clients that play the "
    "compute windows.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
    charts="DIR",
)
