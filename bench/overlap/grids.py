"""The heatmaps' cells: from the paper's tables, or from a layer's times measured here. Pure.

Each cell takes the best source there is for it: Table A8, then Tables A1 and A2, then the cost model fitted to all of
them for that model and device, then, for models without a table, Llama's fit scaled by operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.compute.cost_model import Fit, Observation, fit_cost_model, prefill_s, scaled
from bench.compute.shapes import ModelShape, shape
from bench.overlap.requirements import Grid, Origin, Requirement
from bench.paper import BoundaryTtft, table_a1_a2, table_a8

CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
HIT_RATES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
PAPER_DEVICES = ("A100", "H100")
A8_MODEL, A8_DEVICE = "llama-3.1-8b", "A100"
PAPER_NAMES = {"llama-3.1-8b": "Llama-3.1-8B", "deepseek-r1-7b": "DeepSeek-R1-Distill-Qwen-7B"}
"""What Tables A1 and A2 call the models they have."""
FINE, COARSE = 16, 512
"""The two G of Tables A1 and A2."""
Known = Mapping[tuple[int, int], tuple[float, Origin]]
"""Seconds of all layers by cached tokens and context."""


@dataclass(frozen=True, slots=True)
class _Source:
    known: Known
    fit: Fit
    fitted_to: str


def paper_grids(shapes: Sequence[ModelShape]) -> list[Grid]:
    """Both devices of the paper for each model."""
    return [paper_grid(model, device) for device in PAPER_DEVICES for model in shapes]


def paper_grid(model: ModelShape, device: str) -> Grid:
    """One model on one of the paper's devices."""
    if model.name in PAPER_NAMES:
        source = _tables(model, device)
        return Grid(model, device, _cells(model, source.known, source.fit), source.fit, source.fitted_to)
    base = shape(A8_MODEL)
    source = _tables(base, device)
    fit = Fit(scaled(source.fit.costs, base, model), ())
    return Grid(model, device, _cells(model, {}, fit), fit, f"{base.title}'s on {device}, scaled by operations")


def measured_grid(model: ModelShape, device: str, fit: Fit) -> Grid:
    """One model on this machine."""
    known = {
        (each.cached_tokens, each.context_tokens): (each.prefill_us / 1e6, Origin.MEASURED) for each in fit.observations
    }
    return Grid(model, device, _cells(model, known, fit), fit, f"{len(fit.observations)} prefills measured here")


def scaling_error(device: str) -> float:
    """How far Llama's fit, scaled to the other model that has tables, is from those tables' own: the greatest over what
    they give.
    """
    other, base = shape("deepseek-r1-7b"), shape(A8_MODEL)
    costs = scaled(_tables(base, device).fit.costs, base, other)
    return Fit(costs, _tables(other, device).fit.observations).greatest_error


def _cells(model: ModelShape, known: Known, fit: Fit) -> tuple[Requirement, ...]:
    return tuple(
        _cell(model, known, fit, context, hit_rate)
        for context in CONTEXTS
        if context <= model.context_max
        for hit_rate in HIT_RATES
    )


def _cell(model: ModelShape, known: Known, fit: Fit, context: int, hit_rate: float) -> Requirement:
    cached = round(context * hit_rate)
    if (cached, context) in known:
        compute_s, origin = known[cached, context]
    else:
        compute_s, origin = prefill_s(fit.costs, cached, context), _origin(fit, cached, context)
    layer_bytes = cached * model.token_layer_bytes
    return Requirement(context, hit_rate, cached, layer_bytes, compute_s / model.num_layers, origin)


def _origin(fit: Fit, cached: int, context: int) -> Origin:
    """A fit without observations of its own was scaled."""
    if not fit.observations:
        return Origin.SCALED
    return Origin.INTERPOLATED if fit.covers(cached, context) else Origin.EXTRAPOLATED


def _tables(model: ModelShape, device: str) -> _Source:
    rows = [row for row in table_a1_a2() if row.model == PAPER_NAMES[model.name] and row.gpu == device]
    known = {
        (round(row.hit_rate * row.context_tokens), row.context_tokens): (_whole_prefix_s(row), Origin.TABLES_A1_A2)
        for row in rows
    }
    observations = [
        Observation(row.cached_tokens(chunk_tokens), row.context_tokens, ttft_s * 1e6)
        for row in rows
        for chunk_tokens, ttft_s in row.ttft_s_by_chunk_tokens.items()
    ]
    fitted_to = "the TTFTs of Tables A1 and A2"
    if (model.name, device) == (A8_MODEL, A8_DEVICE):
        for request in table_a8():
            place = request.cached_tokens, request.context_tokens
            known[place] = (request.compute_s, Origin.TABLE_A8)
            observations.append(Observation(*place, request.compute_s * 1e6))
        fitted_to = "Table A8 and the TTFTs of Table A1"
    return _Source(known, fit_cost_model(observations), fitted_to)


def _whole_prefix_s(row: BoundaryTtft) -> float:
    """With M tokens reused: the rows have M - 16 and M - 512, and a straight line between is exact enough so close."""
    fine, coarse = row.ttft_s_by_chunk_tokens[FINE], row.ttft_s_by_chunk_tokens[COARSE]
    return fine - (coarse - fine) * FINE / (COARSE - FINE)
