"""What a prefill asks of the transfer (ObjectCache paper, section 5.3). Pure.

P context   r hit rate   D layer_bytes = 2 n_kv d p (P r)   t layer_compute_s   B_req = D / t

With B the throughput of layers, D/B <= t leaves only the first layer's transfer visible: the prefill is compute-bound.
Otherwise every layer adds its stall (Eq. 4), and the prefill is transfer-bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from bench.core.experiment import plain
from bench.paper.tables import table_a1_a2, table_a8
from calibration.compute.cost_model import Fit, Observation, fit_cost_model, prefill_s, scaled
from calibration.compute.shapes import ModelShape, shape
from descriptors.ttft import ttft_layerwise_s, zero_stall_rate_bytes_per_s


class Origin(Enum):
    """Where a layer's compute time comes from."""

    TABLE_A8 = "table_a8"
    TABLES_A1_A2 = "tables_a1_a2"
    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    SCALED = "scaled"


CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
HIT_RATES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
PAPER_DEVICES = ("A100", "H100")
A8_MODEL, A8_DEVICE = "llama-3.1-8b", "A100"
PAPER_NAMES = {"llama-3.1-8b": "Llama-3.1-8B", "deepseek-r1-7b": "DeepSeek-R1-Distill-Qwen-7B"}
"""What Tables A1 and A2 call the models they have."""
FINE, COARSE = 16, 512
"""The two G of Tables A1 and A2."""
Row = dict[str, Any]
Known = Mapping[tuple[int, int], tuple[float, Origin]]
"""Seconds of all layers by cached tokens and context."""


def paper_grids(shapes: Sequence[ModelShape]) -> list[Row]:
    """Both devices of the paper for each model."""
    return [paper_grid(model, device) for device in PAPER_DEVICES for model in shapes]


def paper_grid(model: ModelShape, device: str) -> Row:
    """One model on one of the paper's devices."""
    if model.name in PAPER_NAMES:
        return _grid(model, device, *_tables(model, device))
    base = shape(A8_MODEL)
    _, fit, _ = _tables(base, device)
    fitted_to = f"{base.title}'s on {device}, scaled by operations"
    return _grid(model, device, {}, Fit(scaled(fit.costs, base, model), ()), fitted_to)


def measured_grid(model: ModelShape, device: str, fit: Fit) -> Row:
    """One model on this machine."""
    known = {
        (each.cached_tokens, each.context_tokens): (each.prefill_us / 1e6, Origin.MEASURED) for each in fit.observations
    }
    return _grid(model, device, known, fit, f"{len(fit.observations)} prefills measured here")


def held_against(cell: Row, rate_bytes_per_s: float, num_layers: int) -> Row:
    """The cell at a throughput of layers: what a prefill waits for after its first layer, and Eq. 3 less compute."""
    is_enough = cell["required_bytes_per_s"] <= rate_bytes_per_s
    transfers_s, computes_s = [cell["layer_bytes"] / rate_bytes_per_s], [cell["layer_compute_s"]] * num_layers
    return {
        **cell,
        "host_bytes_per_s": rate_bytes_per_s,
        "bound": "compute" if is_enough else "transfer",
        "added_ttft_s": ttft_layerwise_s(transfers_s * num_layers, computes_s) - sum(computes_s),
    }


def share_below(cells: Sequence[Row], rate_bytes_per_s: float) -> float:
    """Share of the cells that a throughput suffices for. Raises ZeroDivisionError without a cell."""
    return [cell["required_bytes_per_s"] <= rate_bytes_per_s for cell in cells].count(True) / len(cells)


def scaling_error(device: str) -> float:
    """How far Llama's fit, scaled to the other model that has tables, is from those tables' own: the greatest over what
    they give.
    """
    other, base = shape("deepseek-r1-7b"), shape(A8_MODEL)
    (_, fit, _), (_, own_fit, _) = (_tables(model, device) for model in (base, other))
    return Fit(scaled(fit.costs, base, other), own_fit.observations).greatest_error


def _grid(model: ModelShape, device: str, known: Known, fit: Fit, fitted_to: str) -> Row:
    """`fit` gives the cells that no table and no measurement has; `fitted_to` says in words what it was fitted to."""
    return {
        "model": model.name,
        "source": model.source,
        "device": device,
        "num_layers": model.num_layers,
        "token_layer_bytes": model.token_layer_bytes,
        "costs": plain(fit.costs),
        "fitted_to": fitted_to,
        "fit_error_median": fit.median_error if fit.observations else None,
        "fit_error_greatest": fit.greatest_error if fit.observations else None,
        "cells": [
            _cell(model, known, fit, context, hit_rate)
            for context in CONTEXTS
            if context <= model.context_max
            for hit_rate in HIT_RATES
        ],
    }


def _cell(model: ModelShape, known: Known, fit: Fit, context: int, hit_rate: float) -> Row:
    """One cell of the heatmaps. Operations/s over the device's peak are Figure A6's model FLOP utilization."""
    cached = round(context * hit_rate)
    compute_s, origin = known.get((cached, context)) or (prefill_s(fit.costs, cached, context), Origin.SCALED)
    if origin is Origin.SCALED and fit.observations:  # a fit without observations of its own was scaled
        origin = Origin.INTERPOLATED if fit.covers(cached, context) else Origin.EXTRAPOLATED
    layer_bytes, layer_compute_s = cached * model.token_layer_bytes, compute_s / model.num_layers
    return {
        "context_tokens": context,
        "hit_rate": hit_rate,
        "cached_tokens": cached,
        "layer_bytes": layer_bytes,
        "layer_compute_s": layer_compute_s,
        "origin": origin.value,
        "total_bytes": layer_bytes * model.num_layers,
        "required_bytes_per_s": zero_stall_rate_bytes_per_s(layer_bytes, layer_compute_s),
        "operations_per_s": model.prefill_operations(cached, context) / compute_s,
    }


def _tables(model: ModelShape, device: str) -> tuple[Known, Fit, str]:
    """What the tables give, the cost model fitted to it, and what that is in words."""
    rows = [row for row in table_a1_a2() if row.model == PAPER_NAMES[model.name] and row.gpu == device]
    known: dict[tuple[int, int], tuple[float, Origin]] = {}
    observations = []
    for row in rows:
        fine_s, coarse_s = (row.ttft_s_by_chunk_tokens[grain] for grain in (FINE, COARSE))
        # The rows have M - 16 and M - 512 tokens reused; for M a straight line between is exact enough so close.
        whole_s = fine_s - (coarse_s - fine_s) * FINE / (COARSE - FINE)
        known[row.hit_tokens, row.context_tokens] = whole_s, Origin.TABLES_A1_A2
        for grain, ttft_s in row.ttft_s_by_chunk_tokens.items():
            observations.append(Observation(row.hit_tokens - grain, row.context_tokens, ttft_s * 1e6))
    fitted_to = "the TTFTs of Tables A1 and A2"
    if (model.name, device) == (A8_MODEL, A8_DEVICE):
        for request in table_a8():
            place = request.cached_tokens, request.context_tokens
            known[place] = (request.compute_s, Origin.TABLE_A8)
            observations.append(Observation(*place, request.compute_s * 1e6))
        fitted_to = "Table A8 and the TTFTs of Table A1"
    return known, fit_cost_model(observations), fitted_to
