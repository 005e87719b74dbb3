"""`objectcache bench s3` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench.arguments import complain, number, writable
from bench.child import BaselineError
from bench.jobs import LIST_NBYTES
from bench.peers import PeerName
from bench.profiler import find_py_spy
from bench.s3 import measure_s3
from bench.s3_bed import S3Settings
from bench.s3_report import Operation, s3_json, s3_plot, s3_table
from bench.server import BenchServerError
from descriptors.units import GIB, KIB, MIB

T = TypeVar("T")
NBYTES_MAX = GIB
IN_FLIGHT_MAX = 512
FULL_NBYTES = (4 * KIB, 64 * KIB, 2 * MIB, 32 * MIB)
FULL_PEERS = tuple(PeerName)
SMOKE_PEERS = (PeerName.OURS, PeerName.CANNED, PeerName.RAW_SOCKET)


def add_s3(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "s3",
        help="plain S3 requests: put, get and list, beside Ceph RGW and moto",
        description="The same load, by obstore in processes of its own, on a server of ours, on Ceph RGW, on moto and "
        "on the cheapest senders there can be, in the same rounds.",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, one run, no foreign peers: does it work")
    parser.add_argument("--sizes", type=_sizes, metavar="LIST", help="default: 4KiB,64KiB,2MiB,32MiB")
    parser.add_argument("--in-flight", type=_counts, metavar="LIST", help="default: 8,32")
    parser.add_argument("--operations", type=_operations, metavar="LIST", help="default: put,get,list")
    parser.add_argument("--peers", type=_peers, metavar="LIST", help="default: ours,rgw,moto,canned,raw_socket")
    parser.add_argument("--runs", type=number(1, 1000), metavar="K", help="counted rounds; default: 5")
    parser.add_argument("--seconds", type=_seconds, metavar="S", help="length of a sample; default: 1")
    parser.add_argument("--requests", type=number(1, 1 << 20), metavar="COUNT", help="most in a sample; default: 20000")
    parser.add_argument(
        "--sample-bytes", type=number(MIB, 64 * GIB), metavar="BYTES", help="most in a sample; default: 1GiB"
    )
    parser.add_argument("--list-keys", type=number(0, 1 << 20), metavar="COUNT", help="default: 100000")
    parser.add_argument("--list-seconds", type=_seconds, metavar="S", help="most for one list; default: 15")
    parser.add_argument("--load-processes", type=number(1, 64), default=1, metavar="COUNT", help="default: 1")
    parser.add_argument("--unsigned-payload", action="store_true", help="spare both sides the SHA-256 of bodies")
    parser.add_argument("--workers", type=number(1, 1024), metavar="COUNT", help="of our server; default: cores")
    parser.add_argument(
        "--serve-options", type=shlex.split, default=[], metavar="TEXT", help="further options of `objectcache serve`"
    )
    parser.add_argument("--moto", default=sys.executable, metavar="PYTHON", help="an interpreter that has moto[server]")
    parser.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for the stores; default: temporary files")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="sample our server's stacks there; needs py-spy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates; needs the extra 'plot'")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("obstore") is None:
        return complain("the load is obstore: pip install 'objectcache[bench]'", 2)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("--plot needs matplotlib: pip install 'objectcache[plot]'", 2)
    unwritable = writable(options.json, options.plot)
    if unwritable is not None:
        return complain(unwritable, 2)
    if options.profile is not None and find_py_spy() is None:
        return complain("--profile needs py-spy: pip install py-spy", 2)
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    try:
        report = measure_s3(_settings(options))
    except (BaselineError, BenchServerError) as error:
        return complain(str(error), 1)
    print(s3_table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(s3_json(report), indent=2) + "\n")
    if options.plot is not None:
        s3_plot(report, options.plot)
    return 0 if report.problem is None else 1


def _settings(options: argparse.Namespace) -> S3Settings:
    """Explicit options win over the size of the run."""
    is_smoke: bool = options.smoke
    return S3Settings(
        nbytes=options.sizes or ((4 * KIB, MIB) if is_smoke else FULL_NBYTES),
        in_flight=options.in_flight or ((2,) if is_smoke else (8, 32)),
        operations=options.operations or tuple(Operation),
        peers=options.peers or (SMOKE_PEERS if is_smoke else FULL_PEERS),
        runs=options.runs or (1 if is_smoke else 5),
        seconds=options.seconds or (0.2 if is_smoke else 1.0),
        requests_max=options.requests or (10 if is_smoke else 20_000),
        sample_bytes_max=options.sample_bytes or (8 * MIB if is_smoke else GIB),
        list_keys=_chosen(options.list_keys, 1100 if is_smoke else 100_000),
        list_seconds=options.list_seconds or 15.0,
        load_processes=options.load_processes,
        is_signed=not options.unsigned_payload,
        seed=options.seed,
        disk_bytes=MIB if is_smoke else 256 * MIB,
        workers=options.workers,
        serve_options=tuple(options.serve_options),
        moto_python=options.moto,
        folder=options.folder,
        profile_folder=options.profile,
    )


def _chosen(explicit: int | None, default: int) -> int:
    return default if explicit is None else explicit


def _sizes(text: str) -> tuple[int, ...]:
    return _each(text, number(LIST_NBYTES + 1, NBYTES_MAX))


def _counts(text: str) -> tuple[int, ...]:
    return _each(text, number(1, IN_FLIGHT_MAX))


def _operations(text: str) -> tuple[Operation, ...]:
    return _each(text, _operation)


def _peers(text: str) -> tuple[PeerName, ...]:
    return _each(text, _peer)


def _each(text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    """The parts of a list with commas, each once."""
    values = tuple(parse(part.strip()) for part in text.split(","))
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError("names something twice")
    return values


def _operation(text: str) -> Operation:
    try:
        return Operation(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not put, get or list") from None


def _peer(text: str) -> PeerName:
    try:
        return PeerName(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(p.value for p in PeerName)}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError("must be more than 0 and at most 3600")
    return seconds
