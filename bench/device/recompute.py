"""What coarse chunks cost: tokens of the last chunk, which missed, computed again (Tables A1, A2, A6). Needs torch.

As in the paper: of a prompt of C tokens whose first M = r*C would hit, M - G are reused, and G = 512 computes 496
tokens more than G = 16. Their KV is on the device already, so that nothing but computing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.compute.shapes import ModelShape
from bench.content import VerificationError
from bench.device.accelerator import Accelerator
from bench.device.model import Model
from bench.device.subject import Subject, make_model, make_subject, prefill_s
from bench.device.ttft import LOGITS_ERROR_MAX
from bench.ladder.results import Cell
from bench.ladder.rounds import Task, run_rounds
from bench.overlap.grids import COARSE, FINE, PAPER_NAMES
from bench.paper import context_tokens, table_a1_a2
from bench.samples import Spread, spread


@dataclass(frozen=True, slots=True)
class RecomputeSettings:
    """`chunk_tokens` ascend; the first is what the others' cost is over."""

    shapes: tuple[ModelShape, ...]
    vocabularies: Mapping[str, int]
    contexts: tuple[str, ...]
    hit_rates: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    runs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """TTFTs at one hit boundary of one model, round by round, by chunk size."""

    model: str
    context: str
    hit_rate: float
    ttft_s: Mapping[int, tuple[float, ...]]

    def added_s(self, chunk_tokens: int) -> Spread:
        """Over the finest chunks of the same rounds."""
        finest = self.ttft_s[min(self.ttft_s)]
        return spread([ours - theirs for ours, theirs in zip(self.ttft_s[chunk_tokens], finest, strict=True)])

    def paper_added_s(self, gpu: str) -> float | None:
        """The paper's, for the coarsest over the finest of its tables; None for what they do not have."""
        for row in table_a1_a2():
            is_same = (row.model, row.context, row.hit_rate) == (
                PAPER_NAMES.get(self.model),
                self.context,
                self.hit_rate,
            )
            if is_same and row.gpu == gpu:
                return row.ttft_s_by_chunk_tokens[COARSE] - row.ttft_s_by_chunk_tokens[FINE]
        return None


@dataclass(frozen=True, slots=True)
class Recompute:
    """What was measured on `device`. `problem` says which logits were wrong."""

    device: str
    boundaries: tuple[Boundary, ...]
    problem: str | None = None


def measure_recompute(settings: RecomputeSettings, accelerator: Accelerator) -> Recompute:
    """Every model, context, boundary and chunk size. Raises DeviceError, and RuntimeError (torch's)."""
    found: list[Boundary] = []
    longest = max(context_tokens(context) for context in settings.contexts)
    try:
        for shape in settings.shapes:
            model = make_model(shape, settings.vocabularies[shape.name], accelerator, settings.seed, longest)
            for context in settings.contexts:
                found += _measure_context(settings, model, context)
            del model  # before the next one's weights are made
    except VerificationError as error:
        return Recompute(accelerator.title, tuple(found), str(error))
    return Recompute(accelerator.title, tuple(found))


def boundary_tokens(context: str, hit_rate: float) -> int:
    """M."""
    return round(context_tokens(context) * hit_rate)


def _measure_context(settings: RecomputeSettings, model: Model, context: str) -> list[Boundary]:
    highest = boundary_tokens(context, max(settings.hit_rates))
    subject = make_subject(model, context_tokens(context), highest, settings.seed)
    places = [(hit_rate, grain) for hit_rate in settings.hit_rates for grain in settings.chunk_tokens]
    tasks = [_task(subject, boundary_tokens(context, hit_rate) - grain) for hit_rate, grain in places]
    cells = dict(zip(places, run_rounds(tasks, settings.runs, f"{model.shape.title}, {context}"), strict=True))
    return [_boundary(settings, model.shape.name, context, hit_rate, cells) for hit_rate in settings.hit_rates]


def _boundary(
    settings: RecomputeSettings, model: str, context: str, hit_rate: float, cells: Mapping[tuple[float, int], Cell]
) -> Boundary:
    times = {grain: cells[hit_rate, grain].samples_s for grain in settings.chunk_tokens}
    return Boundary(model, context, hit_rate, times)


def _task(subject: Subject, cached_tokens: int) -> Task:
    def run() -> float:
        seconds, logits = prefill_s(subject, cached_tokens)
        error = subject.logits_error(logits)
        if not error <= LOGITS_ERROR_MAX:
            raise VerificationError(f"after {cached_tokens} cached tokens the logits are off by {error:.3g}")
        return seconds

    return Task({"cached_tokens": cached_tokens}, 0, run)
