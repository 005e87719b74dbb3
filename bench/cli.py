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
from bench.content import STAMP_BYTES
from bench.report import Report, plot, table, to_json
from bench.s3_cli import add_s3
from bench.server import BenchServerError
from descriptors.descriptor import CHUNK_COUNT_MAX, CHUNK_TOKENS_MAX, NUM_LAYERS_MAX, PER_LAYER_CHUNK_BYTES_MAX
from descriptors.errors import ObjectCacheError
from descriptors.units import KIB, MIB
from nixl_client.client import Transport

FULL = {"chunks": 512, "layers": 32, "slice_bytes": 64 * KIB, "runs": 5, "naive_slices": 1024}
SMOKE = {"chunks": 16, "layers": 4, "slice_bytes": 4 * KIB, "runs": 1, "naive_slices": 1024}
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
        help="one request for many chunks, layer-major and chunk-major, over each transport",
        description="Store N chunks in a server of its own, fetch them in one request over each transport in both "
        "orders, and measure memcpy, raw NIXL writes, a raw socket and a naive S3 client in the same rounds.",
    )
    _add_shape(aggregate)
    aggregate.add_argument("--smoke", action="store_true", help="tiny sizes, one run: does it work, not how fast")
    aggregate.add_argument("--runs", type=number(1, RUNS_MAX), metavar="K", help="counted runs; default: 5")
    aggregate.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    aggregate.add_argument(
        "--transports", type=_transports, default="ucx,http", metavar="LIST", help="default: ucx,http"
    )
    aggregate.add_argument("--ucx-tls", metavar="TLS", help="set UCX_TLS for all ucx runs, for example tcp")
    aggregate.add_argument(
        "--naive-slices", type=number(1, 1 << 26), metavar="COUNT", help="bound of the naive sample; default: 1024"
    )
    aggregate.add_argument("--folder", type=Path, metavar="DIR", help="for the store; default: temporary files")
    aggregate.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    aggregate.add_argument("--plot", type=Path, metavar="FILE", help="draw the throughputs; needs the extra 'plot'")
    aggregate.set_defaults(command=_aggregate)
    add_s3(commands)
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-N", "--chunks", type=number(1, CHUNK_COUNT_MAX), metavar="N", help="chunks; default: 512")
    parser.add_argument("-L", "--layers", type=number(1, NUM_LAYERS_MAX), metavar="L", help="layers; default: 32")
    parser.add_argument(
        "-S",
        "--slice-bytes",
        type=number(STAMP_BYTES, PER_LAYER_CHUNK_BYTES_MAX),
        metavar="S",
        help="bytes of one layer in one chunk, KiB and MiB understood; default: 64KiB",
    )
    parser.add_argument(
        "-G", "--chunk-tokens", type=number(1, CHUNK_TOKENS_MAX), default=16, metavar="G", help="default: 16"
    )


def _aggregate(options: argparse.Namespace) -> int:
    settings = _aggregate_settings(options)
    if Transport.UCX in settings.transports and not is_available():
        return complain("NIXL is not installed: pip install 'objectcache[ucx]', or pass --transports http", 2)
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

    return AggregateSettings(
        chunk_count=chosen("chunks"),
        num_layers=chosen("layers"),
        chunk_tokens=options.chunk_tokens,
        per_layer_chunk_bytes=chosen("slice_bytes"),
        runs=chosen("runs"),
        seed=options.seed,
        transports=options.transports,
        memcpy_bytes=MEMCPY_BYTES_SMOKE if options.smoke else MEMCPY_BYTES,
        naive_slices_max=chosen("naive_slices"),
        ucx_tls=options.ucx_tls,
        folder=options.folder,
    )


def _publish(report: Report, json_path: Path | None, plot_path: Path | None) -> None:
    print(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(to_json(report), indent=2) + "\n")
    if plot_path is not None:
        plot(report, plot_path)


def _transports(text: str) -> tuple[Transport, ...]:
    names = [name for name in text.split(",") if name]
    if not names or len(set(names)) != len(names) or not set(names) <= {"ucx", "http"}:
        raise argparse.ArgumentTypeError("must be ucx, http or both, with a comma between")
    return tuple(Transport(name) for name in names)
