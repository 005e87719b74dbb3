"""`objectcache bench engine` on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bench.arguments import complain, number, writable
from bench.child import BaselineError
from bench.engine.advised import advised_json, advised_lines, measure_advised
from bench.engine.bed import why_no_engines
from bench.engine.cases import BLOCK_TOKENS
from bench.engine.plots import plot_engines
from bench.engine.report import settings_json, tables, to_json
from bench.engine.run import measure_engines
from bench.engine.settings import EngineSettings
from bench.engine.shapes import Dtype, Shape
from bench.engine.ways import OURS, Way
from bench.machine import describe_commit, describe_machine
from bench.server import BenchServerError
from descriptors.descriptor import CHUNK_TOKENS_MAX
from nixl_client.transport import Transport

RUNS, RUNS_SMOKE = 5, 1
CONTEXTS, CONTEXTS_SMOKE = (2048, 4096, 8192, 16384), (1024,)
HITS, HITS_SMOKE = (0.5, 0.875), (0.875,)
WAYS = tuple(way for way in Way if way is not Way.ADVISED)
WAYS_SMOKE = (Way.RECOMPUTE, Way.LAYERWISE)
SHAPE = Shape()
SHAPE_SMOKE = Shape(num_layers=2, hidden=256, intermediate=512)
CONTEXT_TOKENS_MAX = 1 << 16
Number = TypeVar("Number", int, float)


def add_engine(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    names = ",".join(way.value for way in WAYS)
    parser = commands.add_parser(
        "engine",
        help="TTFT of vLLM on the CPU with stored prefixes: our connector, vLLM's own, LMCache, and recomputing",
        description="An engine for each way, side by side; in each round each stores a prefix of its own and answers "
        "prompts that begin with it. Every token is compared with that of recomputing. Needs the environment "
        "'engines': python -m bench.kv_peers.install engines.",
    )
    parser.add_argument("--ways", type=_ways, metavar="LIST", help=f"default: {names}")
    parser.add_argument(
        "--advised",
        action="store_true",
        help="instead: loading what is advised, all and nothing, over links paced to 4, 1 and 0.25 of the break-even",
    )
    parser.add_argument("--lengths", type=_lengths, metavar="LIST", help="tokens of prompts; default: 2K,4K,8K,16K")
    parser.add_argument("--hits", type=_hits, metavar="LIST", help="stored share in percent; default: 50,87.5")
    parser.add_argument("--runs", type=number(1, 1000), metavar="K", help=f"counted rounds; default: {RUNS}")
    parser.add_argument(
        "-G",
        "--chunk-tokens",
        type=number(1, CHUNK_TOKENS_MAX),
        default=BLOCK_TOKENS,
        metavar="G",
        help=f"tokens of our chunks; default: {BLOCK_TOKENS}, a block of the engine",
    )
    parser.add_argument("--transport", choices=[each.value for each in Transport], default="auto", help="default: auto")
    shape = parser.add_argument_group("the model")
    shape.add_argument("--layers", type=number(1, 256), metavar="L", help=f"default: {SHAPE.num_layers}")
    shape.add_argument("--hidden", type=number(64, 16384), metavar="WIDTH", help=f"default: {SHAPE.hidden}")
    shape.add_argument("--intermediate", type=number(64, 65536), metavar="WIDTH", help=f"default: {SHAPE.intermediate}")
    shape.add_argument("--heads", type=number(1, 256), metavar="COUNT", help=f"default: {SHAPE.heads}")
    shape.add_argument("--kv-heads", type=number(1, 256), metavar="COUNT", help=f"default: {SHAPE.kv_heads}")
    shape.add_argument("--head-dim", type=number(32, 256), metavar="WIDTH", help=f"default: {SHAPE.head_dim}")
    shape.add_argument(
        "--dtype",
        choices=[each.value for each in Dtype],
        help="default: float32, in which tokens do not hang on the sequence of sums, and no slower on most CPUs",
    )
    parser.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    parser.add_argument("--smoke", action="store_true", help="two ways, 1K, one run: does it work, not how fast")
    parser.add_argument(
        "--serve-options", type=shlex.split, default=[], metavar="TEXT", help="further options of `objectcache serve`"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for stores and model; default: temporary files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the TTFTs; needs the extra 'plot'")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        settings = settings_of(options)
    except ValueError as error:
        return complain(str(error), 2)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return complain("--plot needs matplotlib: pip install 'objectcache[plot]'", 2)
    unwritable = writable(options.json, options.plot) or why_no_engines()
    if unwritable is not None:
        return complain(unwritable, 2)
    origin = {**describe_commit(), "machine": describe_machine()}
    try:
        if options.advised:
            return _run_advised(settings, options.json, origin)
        found = measure_engines(settings)
    except (BaselineError, BenchServerError, OSError) as error:
        return complain(str(error), 1)
    print(tables(settings, found))
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(settings, found, origin), indent=2) + "\n")
    if options.plot is not None and found.cells:
        plot_engines(found.cells, options.plot)
    return 0 if found.problem is None else 1


def _run_advised(settings: EngineSettings, file: Path | None, origin: Mapping[str, Any]) -> int:
    found = measure_advised(settings)
    print("\n".join(advised_lines(found)))
    if file is not None:
        result = {"benchmark": "engine", **origin, **settings_json(settings), "advised": advised_json(found)}
        file.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if found.problem is None else complain(found.problem, 1)


def settings_of(options: argparse.Namespace) -> EngineSettings:
    """Explicit options win over the size of the run. Recomputing is always among the ways, since it is what the tokens
    of all are compared with. Raises ValueError for what does not fit together.
    """
    is_smoke = options.smoke
    asked = options.ways or (WAYS_SMOKE if is_smoke else WAYS)
    settings = EngineSettings(
        shape=_shape(options),
        ways=tuple(way for way in Way if way in asked or way is Way.RECOMPUTE),
        contexts=options.lengths or (CONTEXTS_SMOKE if is_smoke else CONTEXTS),
        hit_rates=options.hits or (HITS_SMOKE if is_smoke else HITS),
        runs=options.runs or (RUNS_SMOKE if is_smoke else RUNS),
        chunk_tokens=options.chunk_tokens,
        transport=Transport(options.transport),
        seed=options.seed,
        serve_options=tuple(options.serve_options),
        folder=options.folder,
    )
    if settings.chunk_tokens % BLOCK_TOKENS and BLOCK_TOKENS % settings.chunk_tokens and set(OURS) & set(settings.ways):
        raise ValueError(f"--chunk-tokens must be a multiple or a divisor of the engine's {BLOCK_TOKENS}")
    if not settings.cases:
        raise ValueError("no cases")
    return settings


def _shape(options: argparse.Namespace) -> Shape:
    given = {
        "num_layers": options.layers,
        "hidden": options.hidden,
        "intermediate": options.intermediate,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "dtype": None if options.dtype is None else Dtype(options.dtype),
    }
    base = SHAPE_SMOKE if options.smoke else SHAPE
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def _ways(text: str) -> tuple[Way, ...]:
    known = {way.value: way for way in Way}
    names = text.split(",")
    if not set(names) <= set(known) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, with commas between")
    return tuple(known[name] for name in names)


def _lengths(text: str) -> tuple[int, ...]:
    one = number(2 * BLOCK_TOKENS, CONTEXT_TOKENS_MAX)
    return _ascending([one(f"{part[:-1]}KiB" if part[-1:] in ("K", "k") else part) for part in text.split(",")])


def _hits(text: str) -> tuple[float, ...]:
    try:
        rates = [float(part) / 100 for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise argparse.ArgumentTypeError("must be percentages between 0 and 100, with commas between")
    return _ascending(rates)


def _ascending(values: list[Number]) -> tuple[Number, ...]:
    if values != sorted(set(values)):
        raise argparse.ArgumentTypeError("must ascend")
    return tuple(values)
