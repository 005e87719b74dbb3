"""The `objectcache bench` command: one sub-command per benchmark."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from adapters.nixl_agent import NixlFailure, is_available
from bench.aggregate import AggregateSettings, measure_aggregate
from bench.arguments import complain, number, writable
from bench.child import BaselineError
from bench.concurrency.command import add_concurrency
from bench.content import STAMP_BYTES
from bench.device.command import add_copies, add_recompute
from bench.engine.command import add_engine
from bench.kv_peers.running import PeerName
from bench.ladder.command import add_ladder
from bench.overlap.command import add_overlap
from bench.report import Report, plot, table, to_json
from bench.s3_cli import add_s3
from bench.samples import State
from bench.scheduler.command import add_scheduler
from bench.server import BenchServerError
from bench.ttft.command import add_ttft
from descriptors.descriptor import CHUNK_COUNT_MAX, CHUNK_TOKENS_MAX, NUM_LAYERS_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.errors import ObjectCacheError
from descriptors.units import KIB, MIB
from nixl_client.client import Transport

FULL = {"chunks": 512, "layers": 32, "slice_bytes": 64 * KIB, "runs": 5, "slices_max": 4096}
SMOKE = {"chunks": 16, "layers": 4, "slice_bytes": 4 * KIB, "runs": 1, "slices_max": 1024}
GRAINS = "16,64,256"
GRAINS_SMOKE = "16,64"
MEMCPY_BYTES = 256 * MIB
MEMCPY_BYTES_SMOKE = 16 * MIB
RUNS_MAX = 1000


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark; its exit status: 0 done and every byte right, 1 failed, 2 wrong use."""
    options = _parser().parse_args(arguments)
    status: int = options.command(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="objectcache bench", description="Measure; each figure comes with what it is a ratio of."
    )
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    aggregate = commands.add_parser(
        "aggregate",
        help="one request for many chunks, layer-major and chunk-major, over each transport, beside its peers",
        description="Store the same payload in chunks of several sizes in servers of its own and fetch it in one "
        "request over each transport: from the page cache, from the server's DRAM tier, over TCP, and cold. Raw limits "
        "of the machine and other software doing the same work are measured in the same rounds.",
    )
    _add_shape(aggregate)
    aggregate.add_argument("--smoke", action="store_true", help="tiny sizes, one run: does it work, not how fast")
    aggregate.add_argument("--runs", type=number(1, RUNS_MAX), metavar="K", help="counted runs; default: 5")
    aggregate.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    aggregate.add_argument(
        "--transports", type=_transports, default="shm,ucx,http", metavar="LIST", help="default: shm,ucx,http"
    )
    aggregate.add_argument(
        "--states", type=_states, default="page_cache,dram,tcp,cold", metavar="LIST", help="default: all of %(default)s"
    )
    names = ",".join(name.value for name in PeerName)
    aggregate.add_argument(
        "--peers", type=_peers, default=names, metavar="LIST", help=f"none, or some of {names} (default: all)"
    )
    aggregate.add_argument(
        "--no-rgw", action="store_true", help="S3 peers go against our gateway only, not Ceph RGW too"
    )
    aggregate.add_argument(
        "--slices-max", type=number(1, 1 << 26), metavar="COUNT", help="slices for peers that ask for one at a time"
    )
    aggregate.add_argument("--folder", type=Path, metavar="DIR", help="for the stores; default: temporary files")
    aggregate.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    aggregate.add_argument("--plot", type=Path, metavar="FILE", help="draw the throughputs; needs the extra 'plot'")
    aggregate.set_defaults(command=_aggregate)
    add_s3(commands)
    add_ladder(commands)
    add_concurrency(commands)
    add_scheduler(commands)
    add_ttft(commands)
    add_overlap(commands)
    add_recompute(commands)
    add_copies(commands)
    add_engine(commands)
    for benchmark in commands.choices.values():
        benchmark.usage = f"{benchmark.prog} [options]"
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-N",
        "--chunks",
        type=number(1, CHUNK_COUNT_MAX),
        metavar="N",
        help="chunks of the first size; default: 512",
    )
    parser.add_argument("-L", "--layers", type=number(1, NUM_LAYERS_MAX), metavar="L", help="layers; default: 32")
    parser.add_argument(
        "-S",
        "--slice-bytes",
        type=number(STAMP_BYTES, PER_LAYER_CHUNK_BYTES_MAX),
        metavar="S",
        help="bytes of one layer in one chunk of the first size, KiB and MiB understood; default: 64KiB",
    )
    parser.add_argument(
        "-G",
        "--chunk-tokens",
        type=_grains,
        metavar="LIST",
        help=f"sizes of chunks, ascending, each a multiple of the first; default: {GRAINS}",
    )


def _aggregate(options: argparse.Namespace) -> int:
    settings = _aggregate_settings(options)
    if Transport.UCX in settings.transports and not is_available():
        return complain("NIXL is not installed: pip install 'objectcache[ucx]', or pass --transports shm,http", 2)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("--plot needs matplotlib: pip install 'objectcache[plot]'", 2)
    unwritable = writable(options.json, options.plot)
    if unwritable is not None:
        return complain(unwritable, 2)
    try:
        report = measure_aggregate(settings)
    except (BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError) as error:
        return complain(str(error), 1)
    except MemoryError:
        return complain("not enough memory for a buffer of N*L*S bytes", 1)
    _publish(report, options.json, options.plot)
    return 0 if report.problem is None else 1


def _aggregate_settings(options: argparse.Namespace) -> AggregateSettings:
    """Explicit options win over the size of the run."""
    defaults = SMOKE if options.smoke else FULL

    def chosen(name: str) -> int:
        value: int | None = getattr(options, name)
        return defaults[name] if value is None else value

    grains = options.chunk_tokens or _grains(GRAINS_SMOKE if options.smoke else GRAINS)
    return AggregateSettings(
        chunk_count=chosen("chunks"),
        num_layers=chosen("layers"),
        grains=grains,
        per_layer_chunk_bytes=chosen("slice_bytes"),
        runs=chosen("runs"),
        seed=options.seed,
        states=options.states,
        transports=options.transports,
        peers=options.peers,
        rgw=not (options.no_rgw or options.smoke),
        slices_max=chosen("slices_max"),
        memcpy_bytes=MEMCPY_BYTES_SMOKE if options.smoke else MEMCPY_BYTES,
        folder=options.folder,
    )


def _publish(report: Report, json_path: Path | None, plot_path: Path | None) -> None:
    print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(to_json(report), indent=2) + "\n")
    if plot_path is not None:
        plot(report, plot_path)


def _transports(text: str) -> tuple[Transport, ...]:
    return tuple(Transport(name) for name in _some_of(text, ("shm", "ucx", "http")))


def _states(text: str) -> tuple[State, ...]:
    return tuple(State(name) for name in _some_of(text, [state.value for state in State]))


def _peers(text: str) -> tuple[PeerName, ...]:
    return () if text == "none" else tuple(PeerName(name) for name in _some_of(text, [name.value for name in PeerName]))


def _some_of(text: str, known: Sequence[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names or len(set(names)) != len(names) or not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(known)}, with commas between")
    return names


def _grains(text: str) -> tuple[int, ...]:
    one = number(1, CHUNK_TOKENS_MAX)
    grains = tuple(one(part) for part in text.split(","))
    if list(grains) != sorted(set(grains)) or any(grain % grains[0] for grain in grains):
        raise argparse.ArgumentTypeError("must ascend, each a multiple of the first")
    return grains
