"""`objectcache bench concurrency` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from adapters.nixl_agent import NixlFailure, is_available
from bench.arguments import complain, number, writable
from bench.child import BaselineError
from bench.concurrency.report import plot, table, to_json
from bench.concurrency.run import ConcurrencySettings, measure_concurrency
from bench.content import STAMP_BYTES
from bench.machine import describe_commit, describe_machine
from bench.server import BenchServerError
from descriptors.descriptor import CHUNK_COUNT_MAX, NUM_LAYERS_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.errors import ObjectCacheError
from descriptors.units import GIB, KIB, MIB
from nixl_client.client import FETCHES_MAX

TRANSPORTS = ("shm", "ucx", "http")
FULL = {"chunks": 16, "layers": 32, "slice_bytes": 64 * KIB, "runs": 5, "processes": 4, "prefixes": 8}
SMOKE = {"chunks": 4, "layers": 4, "slice_bytes": 4 * KIB, "runs": 1, "processes": 2, "prefixes": 3}
COUNTS, COUNTS_SMOKE = (1, 4, 16, 64), (1, 4)
MEMCPY_BYTES, MEMCPY_BYTES_SMOKE = 256 * MIB, 16 * MIB
CHUNK_TOKENS = 16
PROCESSES_MAX, WORKERS_MAX, COUNT_MAX = 64, 256, 1024


def add_concurrency(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "concurrency",
        help="1, 4, 16 and 64 descriptor GETs at once: throughput, fairness and the server's memory",
        description="Fetch different payloads at the same moment from several client processes over each transport.",
    )
    parser.add_argument("--counts", type=_counts, metavar="LIST", help="fetches at once; default: 1,4,16,64")
    parser.add_argument("--transports", type=_transports, metavar="LIST", help="default: shm,ucx,http")
    parser.add_argument("--workers", type=number(1, WORKERS_MAX), default=1, help="of `objectcache serve`; default: 1")
    parser.add_argument("--processes", type=number(1, PROCESSES_MAX), metavar="P", help="client processes; default: 4")
    parser.add_argument("-N", "--chunks", type=number(1, CHUNK_COUNT_MAX), metavar="N", help="of a fetch; default: 16")
    parser.add_argument("-L", "--layers", type=number(1, NUM_LAYERS_MAX), metavar="L", help="default: 32")
    parser.add_argument(
        "-S",
        "--slice-bytes",
        type=number(STAMP_BYTES, PER_LAYER_CHUNK_BYTES_MAX),
        metavar="S",
        help="bytes of one layer in one chunk, KiB and MiB understood; default: 64KiB",
    )
    parser.add_argument("--prefixes", type=number(1, 4096), metavar="P", help="different payloads; default: 8")
    parser.add_argument("--dram-bytes", type=number(0, 1024 * GIB), metavar="N", help="of `objectcache serve`")
    parser.add_argument("--runs", type=number(1, 1000), metavar="K", help="counted rounds; default: 5")
    parser.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the store; default: temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it; needs the extra 'plot'")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one run: does it work, not how fast")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if "ucx" in settings.transports and not is_available():
        return complain("NIXL is not installed: pip install 'objectcache[ucx]', or pass --transports shm,http", 2)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("--plot needs matplotlib: pip install 'objectcache[plot]'", 2)
    unwritable = writable(options.json, options.plot)
    if unwritable is not None:
        return complain(unwritable, 2)
    busiest = -(-max(settings.counts) // settings.processes)
    if busiest > FETCHES_MAX:
        return complain(f"{busiest} fetches in one process; a client makes at most {FETCHES_MAX} at once", 2)
    try:
        found = measure_concurrency(settings)
    except (BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError) as error:
        return complain(str(error), 1)
    print(table(settings, found))
    if options.json is not None:
        origin = {**describe_commit(), "machine": describe_machine()}
        options.json.write_text(json.dumps(to_json(settings, found, origin), indent=2) + "\n")
    if options.plot is not None:
        plot(settings, found, options.plot)
    return 0 if found.problem is None else 1


def _settings(options: argparse.Namespace) -> ConcurrencySettings:
    """Explicit options win over the size of the run."""
    defaults = SMOKE if options.smoke else FULL

    def chosen(name: str) -> int:
        value: int | None = getattr(options, name)
        return defaults[name] if value is None else value

    return ConcurrencySettings(
        counts=options.counts or (COUNTS_SMOKE if options.smoke else COUNTS),
        transports=options.transports or TRANSPORTS,
        workers=options.workers,
        processes=chosen("processes"),
        chunk_count=chosen("chunks"),
        num_layers=chosen("layers"),
        chunk_tokens=CHUNK_TOKENS,
        per_layer_chunk_bytes=chosen("slice_bytes"),
        prefix_count=chosen("prefixes"),
        runs=chosen("runs"),
        seed=options.seed,
        memcpy_bytes=MEMCPY_BYTES_SMOKE if options.smoke else MEMCPY_BYTES,
        dram_bytes=options.dram_bytes,
        folder=options.folder,
    )


def _counts(text: str) -> tuple[int, ...]:
    one = number(1, COUNT_MAX)
    counts = tuple(one(part) for part in text.split(","))
    if len(set(counts)) != len(counts):
        raise argparse.ArgumentTypeError("names a count twice")
    return counts


def _transports(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(TRANSPORTS) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(TRANSPORTS)}, with commas between")
    return names
