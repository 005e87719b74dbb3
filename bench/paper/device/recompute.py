"""`objectcache bench recompute`: what coarse chunks cost at each hit boundary (Tables A1, A2, A6). Imports torch late.

As in the paper: of a prompt of C tokens whose first M = r*C would hit, M - G are reused, and G = 512 computes 496
tokens more than G = 16. Their KV is on the device already, so that nothing but computing is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core import options
from bench.core.experiment import Experiment, plain, published
from bench.core.options import ascending, each, number
from bench.core.plots import Chart, Kind, draw
from bench.core.show import Column, Json, Section, fixed, table
from bench.paper.device.command import CONTEXT_SMOKE, DeviceSettings, model_of, opened_device
from bench.paper.overlap.run import COARSE, FINE, HIT_RATES, PAPER_NAMES
from bench.paper.tables import context_tokens, table_a1_a2
from bench.paper.ttft.results import CONTEXTS
from objectcache.calibration.compute.shapes import ModelShape, shape
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import interleaved, spread

if TYPE_CHECKING:
    from bench.paper.device.model import Model

MODELS = ("llama-3.1-8b", "deepseek-r1-7b")
CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
PAPER_GPUS = ("A100", "H100")
CPU_SCALE_MIN = 4
SCALED = "layers, heads and width are divided by it; from 4 on a CPU will do"
REQUESTS_PER_S = 1000
"""The rate of Table A6's caption."""
Row = dict[str, Any]


def _chunk_tokens(text: str) -> tuple[int, ...]:
    grains: tuple[int, ...] = ascending(each(number(1, 512)))(text)
    if len(grains) < 2:
        raise argparse.ArgumentTypeError("must be two or more")
    return grains


@dataclass(frozen=True, slots=True)
class RecomputeSettings(DeviceSettings):
    """Prompts, and the sizes of chunks that cut their hits."""

    models: tuple[str, ...] = options.setting("--models", MODELS[:1], MODELS[:1], each(str, MODELS), ",".join(MODELS))
    contexts: tuple[str, ...] = options.setting("--contexts", CONTEXTS, CONTEXT_SMOKE, each(str, CONTEXTS))
    chunk_tokens: tuple[int, ...] = options.setting(
        "-G --chunk-tokens", CHUNK_TOKENS, (16, 64, 512), _chunk_tokens, "ascending"
    )
    scale: int = options.count("--scale", 1, 1, most=8, text=SCALED)
    runs: int = options.runs(3)
    seed: int = options.seed()


def _measure(asked: RecomputeSettings, origin: Mapping[str, Any]) -> Json:
    """Every model, context, boundary and chunk size; wrong logits end it and are the result's `problem`. Raises
    WrongUse, BaselineError.
    """
    models = [model_of(name, asked.smoke, asked.scale) for name in asked.models]
    settings = {
        "shapes": [model for model, _ in models],
        "vocabularies": {model.name: vocabulary for model, vocabulary in models},
        "contexts": asked.contexts,
        "hit_rates": (0.5, 0.875) if asked.smoke else HIT_RATES,
        "chunk_tokens": asked.chunk_tokens,
        "scale": asked.scale,
        "runs": asked.runs,
        "seed": asked.seed,
    }
    boundaries: list[Row] = []
    table_a6: list[Row] = []
    problem = None
    with opened_device(asked.device, asked.smoke or asked.scale >= CPU_SCALE_MIN, origin) as (accelerator, described):
        from bench.paper.device.model import Model

        longest = max(map(context_tokens, asked.contexts))
        try:
            for of, vocabulary in models:
                model = Model(of, vocabulary, accelerator, asked.seed, longest)
                for context in asked.contexts:
                    here = _measure_context(settings, model, context)
                    boundaries += here
                    table_a6.append(_summary(of, context, here))
                del model  # before the next one's weights are made
        except VerificationError as error:
            problem = str(error)
    notes = [
        "of a prompt whose first M tokens would hit, M - G are reused and their KV is on the device; random weights",
        f"the paper's columns are G=512 over G=16 of its Tables A1 and A2; {asked.runs} counted rounds",
        f"GPU hours: of {REQUESTS_PER_S} requests/s for a day, as in the caption of Table A6",
    ]
    if asked.scale > 1:
        notes.append(f"layers, heads and width are those of the model over {asked.scale}: compare ratios only")
    found = {"notes": notes, "boundaries": boundaries, "table_a6": table_a6}
    return published("recompute", described, settings, problem, device=accelerator.title, **found)


def _measure_context(settings: Row, model: Model, context: str) -> list[Row]:
    from bench.paper.device.model import LOGITS_ERROR_MAX, make_subject

    tokens, hit_rates, grains = context_tokens(context), settings["hit_rates"], settings["chunk_tokens"]
    subject = make_subject(model, tokens, round(tokens * max(hit_rates)), settings["seed"])
    samples_s: dict[tuple[float, int], list[float]] = {(rate, grain): [] for rate in hit_rates for grain in grains}
    for round_index, place in interleaved(list(samples_s), settings["runs"], f"{model.shape.title}, {context}"):
        cached_tokens = round(tokens * place[0]) - place[1]
        seconds, logits = model.timed_prefill(subject.tokens, subject.cache, cached_tokens)
        error = subject.logits_error(logits)
        if not error <= LOGITS_ERROR_MAX:
            raise VerificationError(f"after {cached_tokens} cached tokens the logits are off by {error:.3g}")
        if round_index > 0:
            samples_s[place].append(seconds)
    by_rate = {rate: {grain: samples_s[rate, grain] for grain in grains} for rate in hit_rates}
    return [boundary_row(model.shape.name, context, rate, found) for rate, found in by_rate.items()]


def boundary_row(model: str, context: str, hit_rate: float, samples_s: Mapping[int, Sequence[float]]) -> Row:
    """TTFTs at one hit boundary of one model by chunk size, added ones over the finest of the same rounds."""
    boundary_tokens, finest_s = round(context_tokens(context) * hit_rate), samples_s[min(samples_s)]
    return {
        "model": model,
        "context": context,
        "hit_rate": hit_rate,
        "boundary_tokens": boundary_tokens,
        "by_chunk_tokens": {
            str(grain): {
                "reused_tokens": boundary_tokens - grain,
                "ttft_s": plain(spread(found_s)),
                "added_s": plain(spread([ours_s - base_s for ours_s, base_s in zip(found_s, finest_s, strict=True)])),
                "sample_count": len(found_s),
                "samples_s": found_s,
            }
            for grain, found_s in samples_s.items()
        },
        "paper_added_s": {gpu: paper_added_s(model, gpu, context, hit_rate) for gpu in PAPER_GPUS},
    }


def paper_added_s(model: str, gpu: str, context: str, hit_rate: float) -> float | None:
    """The paper's, for the coarsest over the finest of its tables; None for what they do not have."""
    for row in table_a1_a2():
        if (row.model, row.gpu, row.context, row.hit_rate) == (PAPER_NAMES.get(model), gpu, context, hit_rate):
            return row.ttft_s_by_chunk_tokens[COARSE] - row.ttft_s_by_chunk_tokens[FINE]
    return None


def _summary(model: ModelShape, context: str, boundaries: Sequence[Row]) -> Row:
    """Table A6: mean and standard deviation over the boundaries, and operations, the same at all of them but for
    attention.
    """
    finest, *_, coarsest = boundaries[0]["by_chunk_tokens"]
    added_s = [each["by_chunk_tokens"][coarsest]["added_s"]["median"] for each in boundaries]

    def operations(grain: str) -> list[float]:
        reused = [each["by_chunk_tokens"][grain]["reused_tokens"] for each in boundaries]
        return [model.prefill_operations(count, context_tokens(context)) for count in reused]

    more = [coarse - fine for coarse, fine in zip(operations(coarsest), operations(finest), strict=True)]
    return {
        "model": model.name,
        "context": context,
        "added_mean_s": statistics.mean(added_s),
        "added_stdev_s": statistics.stdev(added_s) if len(added_s) > 1 else 0.0,
        "added_operations": statistics.mean(more),
        "gpu_hours_per_day": statistics.mean(added_s) * REQUESTS_PER_S * 24,
    }


def show(result: Json) -> dict[str, Section]:
    """A line for each boundary, and Table A6 from them beside the paper's."""
    grains = [str(grain) for grain in result["settings"]["chunk_tokens"]]
    boundaries = table(
        result["boundaries"],
        Column("TTFT, ms", _title),
        "hit = hit_rate:.1%",
        *(Column(f"G={grain}", f"by_chunk_tokens.{grain}.ttft_s.median", fixed(1, 1e3)) for grain in grains),
        Column(f"G={grains[-1]} over the finest", f"by_chunk_tokens.{grains[-1]}.added_s", fixed(1, 1e3)),
        *(Column(f"paper's {gpu}", f"paper_added_s.{gpu}", fixed(1, 1e3)) for gpu in PAPER_GPUS),
    )
    table_a6 = table(
        result["table_a6"],
        Column("Table A6, added, ms", _title),
        Column("here", lambda row: f"{row['added_mean_s'] * 1e3:.1f} ± {row['added_stdev_s'] * 1e3:.1f}"),
        *(Column(f"paper's {gpu}", partial(_paper_mean, result, gpu)) for gpu in PAPER_GPUS),
        Column("T operations", "added_operations", fixed(1, 1e-12)),
        "GPU hours a day = gpu_hours_per_day:.0",
    )
    notes = (f"* {note}" for note in result["notes"])
    return {"boundaries": (f"device: {result['device']}", *notes, boundaries), "table-a6": (table_a6,)}


def _title(row: Json) -> str:
    return f"{shape(row['model']).title}, {row['context']}"


def _paper_mean(result: Json, gpu: str, summary: Json) -> str:
    here = [each["paper_added_s"][gpu] for each in result["boundaries"] if _title(each) == _title(summary)]
    known_ms = [1e3 * added_s for added_s in here if added_s is not None]
    return f"{statistics.mean(known_ms):.1f} ± {statistics.stdev(known_ms):.1f}" if len(known_ms) > 1 else ""


def plot(result: Json, path: Path) -> None:
    """What each size of chunks adds at each boundary, and the paper's points."""
    rows = []
    for boundary in result["boundaries"]:
        added = {f"G={grain}": cell["added_s"] for grain, cell in boundary["by_chunk_tokens"].items()}
        added |= {f"paper, G=512, {gpu}": added_s for gpu, added_s in boundary["paper_added_s"].items() if added_s}
        rows += [{**boundary, "of": of, "added_s": added_s} for of, added_s in added.items()]
    draw(CHART, rows, f"What coarse chunks cost on {result['device']}", path)


CHART = Chart(
    Kind.LINES,
    lambda row: f"{100 * row['hit_rate']:g}",
    "added_s",
    "TTFT added over the finest chunks, ms",
    "of",
    column=_title,
    across_title="hit boundary, %",
    scale=1e3,
)


RECOMPUTE = Experiment(
    name="recompute",
    help="what coarse chunks cost at each hit boundary, on a GPU (tables A1, A2 and A6)",
    description="See what a chunk size costs in recomputed tokens, on a GPU. Prefill of what is left when a hit is "
    "cut to M - G tokens, with random weights of real shapes.",
    settings=RecomputeSettings,
    measure=_measure,
    show=show,
    plot=plot,
)
