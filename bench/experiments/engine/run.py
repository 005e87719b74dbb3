"""`bench engine`: one of three questions, and the command."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from bench.core.experiment import Experiment, WrongUse, plain, published
from bench.core.options import Options, ascending, each, filled, names, number, real, some_of
from bench.core.show import Json
from bench.experiments.engine.bed import why_no_engines
from bench.experiments.engine.cases import BLOCK_TOKENS, Dtype, Shape
from bench.experiments.engine.measure import measure_engines
from bench.experiments.engine.paced import measure_advised, measure_stated
from bench.experiments.engine.show import plot, show
from bench.experiments.engine.ways import OURS, EngineSettings, Way
from descriptors.descriptor import CHUNK_TOKENS_MAX
from nixl_client.transports.transport import Transport

WAYS = tuple(way for way in Way if way not in (Way.ADVISED, Way.STATED))
WAYS_SMOKE = (Way.RECOMPUTE, Way.LAYERWISE)
SHAPE = Shape()
SHAPE_SMOKE = Shape(num_layers=2, hidden=256, intermediate=512)
CONTEXT_TOKENS_MAX = 1 << 16
SHAPE_OPTIONS = {
    "num_layers": ("--layers", "L", 1, 256),
    "hidden": ("--hidden", "WIDTH", 64, 16384),
    "intermediate": ("--intermediate", "WIDTH", 64, 65536),
    "heads": ("--heads", "COUNT", 1, 256),
    "kv_heads": ("--kv-heads", "COUNT", 1, 256),
    "head_dim": ("--head-dim", "WIDTH", 32, 256),
}
"""Options by the fields that they set, with least and greatest values."""


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    try:
        settings = settings_of(options)
    except ValueError as error:
        raise WrongUse(str(error)) from error
    if (missing := why_no_engines()) is not None:
        raise WrongUse(missing)
    if options.advised:
        advised = measure_advised(settings)
        return result_of(settings, origin, advised["problem"], advised=advised)
    if options.stated:
        stated = measure_stated(settings)
        return result_of(settings, origin, stated[-1]["problem"], stated_compute=stated)
    return result_of(settings, origin, **measure_engines(settings))


def result_of(settings: EngineSettings, origin: Mapping[str, Any], problem: str | None, **found: Any) -> dict[str, Any]:
    """The result, which has always had its name under `benchmark` as well."""
    values = {**plain(settings), "block_tokens": BLOCK_TOKENS}
    del values["folder"]
    return {"benchmark": "engine", **published("engine", origin, values, problem, **found)}


def settings_of(options: argparse.Namespace) -> EngineSettings:
    """Recomputing is always among the ways, since it is what the tokens of all are compared with. Raises ValueError for
    what does not fit together.
    """
    if options.advised and options.stated:
        raise ValueError("--advised and --stated are two questions: ask one")
    shape = filled(Shape, options, dtype=Dtype(options.dtype), seed=SHAPE.seed)
    ways = tuple(way for way in Way if way in options.ways or way is Way.RECOMPUTE)
    settings = filled(EngineSettings, options, shape=shape, ways=ways, transport=Transport(options.transport))
    if settings.chunk_tokens % BLOCK_TOKENS and BLOCK_TOKENS % settings.chunk_tokens and set(OURS) & set(settings.ways):
        raise ValueError(f"--chunk-tokens must be a multiple or a divisor of the engine's {BLOCK_TOKENS}")
    if not settings.cases:
        raise ValueError("no cases")
    return settings


def _declare(options: Options) -> None:
    known = (*WAYS, Way.ADVISED)
    options.add("--ways", type=some_of(known), metavar="LIST", full=WAYS, smoke=WAYS_SMOKE, help=names(WAYS))
    text = "instead: loading what is advised, all and nothing, over links paced to 4, 1 and 0.25 of the break-even"
    options.flag("--advised", text)
    text = "instead: two and four engines on one paced link, by what they state of their compute times, one a liar"
    options.flag("--stated", text)
    lengths, text = ascending(each(_length)), "tokens of prompts; default: 2K,4K,8K,16K"
    full, smoke = (2048, 4096, 8192, 16384), (1024,)
    options.add("--lengths", dest="contexts", type=lengths, metavar="LIST", full=full, smoke=smoke, help=text)
    share = ascending(each(lambda text: real(0.001, 99.999)(text) / 100))
    text = "stored share in percent; default: 50,87.5"
    options.add("--hits", dest="hit_rates", type=share, metavar="LIST", full=(0.5, 0.875), smoke=(0.875,), help=text)
    options.runs(5)
    text = f"tokens of our chunks; default: {BLOCK_TOKENS}, a block of the engine"
    grain = number(1, CHUNK_TOKENS_MAX)
    options.add("-G", "--chunk-tokens", type=grain, default=BLOCK_TOKENS, metavar="G", help=text)
    options.choice("--transport", tuple(Transport), Transport.AUTO)
    model = options.group("the model")
    for field, (name, metavar, least, most) in SHAPE_OPTIONS.items():
        kind, size, tiny = number(least, most), getattr(SHAPE, field), getattr(SHAPE_SMOKE, field)
        text = f"default: {size}"
        model.add(name, dest=field, type=kind, metavar=metavar, full=size, smoke=tiny, help=text)
    text = "default: float32, in which tokens do not hang on the sequence of sums, and no slower on most CPUs"
    model.choice("--dtype", tuple(Dtype), SHAPE.dtype, text)
    options.seed()
    options.serve_options()
    options.folder("for stores and model")


def _length(text: str) -> int:
    one = number(2 * BLOCK_TOKENS, CONTEXT_TOKENS_MAX)
    return one(f"{text[:-1]}KiB" if text[-1:] in ("K", "k") else text)


ENGINE = Experiment(
    name="engine",
    help="TTFT of vLLM on the CPU with stored prefixes: our connector, vLLM's own, LMCache, and recomputing",
    description="An engine for each way, side by side; in each round each stores a prefix of its own and answers "
    "prompts that begin with it. Every token is compared with that of recomputing. Needs the environment 'engines': "
    "python -m bench.beds.kv_peers.install engines.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
)
