"""`objectcache bench overlap`: how fast this machine delivers layers, its compute where asked for, and the grids; and
how they are shown and drawn.

What a prefill asks of the transfer (ObjectCache paper, section 5.3):

P context   r hit rate   D layer_bytes = 2 n_kv d p (P r)   t layer_compute_s   B_req = D / t

With B the throughput of layers, D/B <= t leaves only the first layer's transfer visible: the prefill is compute-bound.
Otherwise every layer adds its stall (Eq. 4), and the prefill is transfer-bound.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.beds.processes import BaselineError
from bench.core import options
from bench.core.experiment import FAILURES, Experiment, need_nixl, plain, published
from bench.core.options import each, number
from bench.core.show import Block, Json, Section, crossed, significant, table
from bench.paper.device.command import need_torch
from bench.paper.motivation import motivation
from bench.paper.tables import TOKEN_LAYER_BYTES, table_a1_a2, table_a8
from descriptors.descriptor import CHUNK_TOKENS_MAX
from descriptors.layout import ChunkLayout
from descriptors.ttft import ttft_layerwise_s, zero_stall_rate_bytes_per_s
from descriptors.units import GIB, KIB
from nixl_client.client import Transport
from objectcache.calibration.charts import cell_ticks, chart
from objectcache.calibration.chunks import fetch_task, make_chunks, store_chunks
from objectcache.calibration.compute.cost_model import Fit, Observation, fit_cost_model, prefill_s, scaled
from objectcache.calibration.compute.shapes import SHAPES, ModelShape, shape
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import cell_json, run_rounds
from objectcache.calibration.servers import running_server

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from objectcache.calibration.compute.measure import ComputePlan, MeasuredCompute


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


PAPER_RATE_BYTES_PER_S = 2.5e9
"""Section 5.4, Figure 12: most configurations on the A100 need less."""
MARKS = {
    Origin.TABLE_A8.value: ("a", "as Table A8 gives it"),
    Origin.TABLES_A1_A2.value: (
        "b",
        "TTFTs of Tables A1 and A2, taken for compute, extended from G=16 and 512 to no missing chunk",
    ),
    Origin.MEASURED.value: ("m", "measured on this machine"),
    Origin.INTERPOLATED.value: ("i", "by the fitted cost model, between what it was fitted to"),
    Origin.EXTRAPOLATED.value: ("x", "by the fitted cost model, beyond what it was fitted to"),
    Origin.SCALED.value: ("s", "another model's fit, scaled by operations: the paper has no table of this model"),
}
"""One letter for tables, and what it means."""
TRANSFER_MARK = "!"
CERTAIN = (Origin.TABLE_A8.value, Origin.TABLES_A1_A2.value, Origin.MEASURED.value)
CACHED, COMPUTE, REQUIRED = "cached KV, GiB (A4)", "a layer's compute, ms (12, A5)", "B_req, GB/s (12, A7)"
OPERATIONS = "operations, TFLOP/s (A6)"
QUANTITIES: dict[str, Callable[[Json], float]] = {
    CACHED: lambda cell: cell["total_bytes"] / GIB,
    COMPUTE: lambda cell: cell["layer_compute_s"] * 1e3,
    OPERATIONS: lambda cell: cell["operations_per_s"] / 1e12,
    REQUIRED: lambda cell: cell["required_bytes_per_s"] / 1e9,
}


def show(result: Json) -> dict[str, Section]:
    """Throughput, two heatmaps for each model and device, and the shares."""
    used = {cell["origin"] for grid in result["grids"].values() for cell in grid["cells"]}
    legend = [f"{mark}: {meaning}" for origin, (mark, meaning) in MARKS.items() if origin in used]
    if result["throughput"]:
        legend.append(f"{TRANSFER_MARK}: transfer-bound at this machine's throughput for layers of that size")
    throughput = table(
        result["throughput"],
        "layer-major delivery here, every byte compared: layers of = layer_bytes:size | "
        "GB/s = throughput_bytes_per_s:GB/s | samples = sample_count",
    )
    return {
        "throughput": (throughput, *(_compute(name, found) for name, found in result["compute"].items())),
        "grids": [block for grid in result["grids"].values() for block in _shown_grid(grid, result["scaling_error"])],
        "shares": (*legend, *(_share(device, result) for device in result["share_compute_bound"])),
        "motivation": motivation(),
        "figure-a4": (_figure(result, CACHED, PAPER_DEVICES[:1]),),
        **{
            name: (_figure(result, quantity, PAPER_DEVICES),)
            for name, quantity in (("figure-a5", COMPUTE), ("figure-a6", OPERATIONS), ("figure-a7", REQUIRED))
        },
    }


def _figure(result: Json, quantity: str, devices: Sequence[str]) -> Block:
    """One of the paper's heatmaps of all models; the cached KV is the same on all devices."""
    grids = [grid for grid in result["grids"].values() if grid["device"] in devices]
    rows = [(grid, cell) for grid in sorted(grids, key=lambda grid: str(grid["device"])) for cell in grid["cells"]]

    def line(row: tuple[Json, Json]) -> str:
        grid, cell = row
        device = "" if quantity == CACHED else f", {grid['device']}"
        return f"{shape(grid['model']).title}{device}, {cell['context_tokens'] // KIB}K"

    def value(row: tuple[Json, Json]) -> str:
        if quantity == CACHED:
            return significant(QUANTITIES[quantity](row[1]))
        return _marked(quantity, row[1])

    return crossed(rows, f"{quantity}, by hit rate", line, lambda row: f"{row[1]['hit_rate']:.1%}", value)


def _compute(name: str, found: Json) -> str:
    times = [cell["duration_s"] for cell in found["cells"]]
    apart = statistics.median((each["max"] - each["min"]) / each["median"] for each in times)
    return (
        f"one layer of {shape(name).title} here ({found['device']}): {len(times)} prefills, "
        f"{found['cells'][0]['sample_count']} samples of each, which lie {apart:.0%} of their median apart"
    )


def _share(device: str, result: Json) -> str:
    count = sum(len(grid["cells"]) for grid in result["grids"].values() if grid["device"] == device)
    below, bound = result["share_below_2_5_gbytes_per_s"][device], result["share_compute_bound"][device]
    paper = " (paper: most)" if device == "A100" else ""
    here = "" if bound is None else f"; {bound:.0%} are compute-bound at what this machine moves"
    return f"{device}: {below:.0%} of {count} cells need at most 2.5 GB/s{paper}{here}"


def _shown_grid(grid: Json, scaling_errors: Json) -> Iterator[Block]:
    if grid["fit_error_median"] is None:
        error = f", which on the model that can be compared is off by up to {scaling_errors[grid['device']]:.0%}"
    else:
        error = f", off by {grid['fit_error_median']:.1%} in the median, {grid['fit_error_greatest']:.1%} at most"
    yield f"{shape(grid['model']).title} on {grid['device']} (fitted to {grid['fitted_to']}{error})"
    for quantity in (COMPUTE, REQUIRED):
        yield crossed(
            grid["cells"],
            f"{quantity}, by context and hit rate",
            lambda cell: f"{cell['context_tokens'] // KIB}K",
            lambda cell: f"{cell['hit_rate']:.1%}",
            partial(_marked, quantity),
        )


def _marked(quantity: str, cell: Json) -> str:
    """With where it comes from."""
    mark = TRANSFER_MARK if _is_marked(quantity, cell) else ""
    return f"{significant(QUANTITIES[quantity](cell))}{MARKS[cell['origin']][0]}{mark}"


def _is_marked(quantity: str, cell: Json) -> bool:
    return quantity == REQUIRED and cell.get("bound") == "transfer"


def plot(result: Json, path: Path) -> None:
    """Figures 12 and A4 to A7 as heatmaps, a row of panels for each model and device. Framed: transfer-bound here.
    Bold: from a table or measured.
    """
    grids = list(result["grids"].values())
    rows, columns = len(grids), len(QUANTITIES)
    title = "Layerwise overlap. Bold: from a table or measured. Framed: transfer-bound on this machine"
    with chart(path, title, (4 * columns, 2.2 * rows + 1), rows, columns) as panels:
        for grid, row_panels in zip(grids, panels, strict=True):
            for quantity, axes in zip(QUANTITIES, row_panels, strict=True):
                _draw(axes, quantity, grid["cells"])
            row_panels[0].set_ylabel(f"{shape(grid['model']).title}, {grid['device']}\ncontext", fontsize=9)
        for quantity, axes in zip(QUANTITIES, panels[0], strict=True):
            axes.set_title(quantity, fontsize=10)
        for axes in panels[-1]:
            axes.set_xlabel("hit rate, %", fontsize=9)


def _draw(axes: Axes, quantity: str, cells: list[Json]) -> None:
    from matplotlib.patches import Rectangle

    contexts, hit_rates = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("context_tokens", "hit_rate"))
    values = np.array([QUANTITIES[quantity](cell) for cell in cells]).reshape(len(contexts), len(hit_rates))
    for index, (cell, value) in enumerate(zip(cells, values.flat, strict=True)):
        y, x = divmod(index, len(hit_rates))
        weight = "bold" if cell["origin"] in CERTAIN and quantity != CACHED else "normal"
        said = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        axes.text(x, y, said, ha="center", va="center", fontsize=7, fontweight=weight)
        if _is_marked(quantity, cell):
            axes.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=1.5))
    axes.imshow(np.log(values), aspect="auto", cmap="RdYlGn_r" if quantity == REQUIRED else "YlGnBu", alpha=0.6)
    cell_ticks(axes, [f"{100 * hit_rate:g}" for hit_rate in hit_rates], fontsize=7)
    axes.set_yticks(range(len(contexts)), [f"{context // KIB}K" for context in contexts], fontsize=7)


CHUNK_TOKENS = 64
DELIVERED = ((512, 32), (2048, 32), (8192, 8))
"""Cached tokens, and how many layers of them are delivered."""
DELIVERED_SMOKE = ((256, 2), (512, 2))
MODELS = tuple(model.name for model in SHAPES)
CHUNK_TOKENS_LIMIT = min(CHUNK_TOKENS_MAX, *(layer_tokens for layer_tokens, _ in DELIVERED_SMOKE))


GRAIN_HELP = f"tokens of a chunk, a power of two up to {CHUNK_TOKENS_LIMIT}"


def _models(text: str) -> tuple[str, ...]:
    return tuple(sorted(each(str, MODELS)(text), key=MODELS.index))


def _chunk_tokens(text: str) -> int:
    value = number(1, CHUNK_TOKENS_LIMIT)(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError("must be a power of two")
    return value


@dataclass(frozen=True, slots=True)
class OverlapSettings:
    """What to measure; `measure` times decoder layers on the device, in that data type."""

    models: tuple[str, ...] = options.setting("--models", MODELS, MODELS, _models)
    measure: bool = options.flag("--measure", "time decoder layers here too; needs the extra 'torch'")
    device: str = options.setting("--device", "cpu", text="for --measure", choices=("cpu", "cuda"))
    dtype: str = options.setting("--dtype", "bfloat16", text="for --measure", choices=("bfloat16", "float32"))
    smoke: bool = options.sized(False, True)
    runs: int = options.runs(5)
    seed: int = options.seed()
    transport: Transport = options.choice("--transport", Transport, Transport.UCX, text="of descriptor GETs")
    chunk_tokens: int = options.setting("-G --chunk-tokens", CHUNK_TOKENS, CHUNK_TOKENS, _chunk_tokens, GRAIN_HELP)
    serve_options: tuple[str, ...] = options.serve_options()
    folder: Path | None = options.folder("for the store")


def measure_overlap(settings: OverlapSettings, compute: ComputePlan | None, origin: Mapping[str, Any]) -> Json:
    """The paper's grids always; this machine's beside them where there is a plan for its compute. What fails is the
    result's `problem`.
    """
    shapes = [shape(name) for name in settings.models]
    grids = paper_grids(shapes)
    computes: list[MeasuredCompute] = []
    rates: list[Row] = []
    problem = None
    try:
        if compute is not None:
            computes = _measure_compute(shapes, compute)
            grids += [measured_grid(each.shape, "host", each.fit) for each in computes]
        rates = measure_throughput(settings)
    except VerificationError as error:
        problem = f"WRONG BYTES: {error}"
    except FAILURES as error:
        problem = str(error)
    cells: dict[str, list[Row]] = {}
    for grid in grids:
        if rates:  # without, it is left open which prefills are bound by the transfer
            layers = grid["num_layers"]
            grid["cells"] = [held_against(cell, rate_at(rates, cell["layer_bytes"]), layers) for cell in grid["cells"]]
        cells.setdefault(grid["device"], []).extend(grid["cells"])
    return published(
        "overlap",
        origin,
        {name: value for name, value in plain(settings).items() if name != "folder"},
        problem,
        throughput=rates,
        compute={
            each.shape.name: {"device": each.device, "cells": [cell_json(cell) for cell in each.cells]}
            for each in computes
        },
        scaling_error={device: scaling_error(device) for device in PAPER_DEVICES},
        share_below_2_5_gbytes_per_s={name: share_below(here, PAPER_RATE_BYTES_PER_S) for name, here in cells.items()},
        share_compute_bound={
            name: [cell["bound"] for cell in here].count("compute") / len(here) if rates else None
            for name, here in cells.items()
        },
        grids={f"{grid['model']}/{grid['device']}": grid for grid in grids},
    )


def rate_at(rates: Sequence[Row], layer_bytes: int) -> float:
    """Bytes/s for layers of a size: that of the largest measured which is no larger, or else of the smallest."""
    ascending = sorted(rates, key=lambda rate: rate["layer_bytes"])
    no_larger = [rate for rate in ascending if rate["layer_bytes"] <= layer_bytes]
    rate = no_larger[-1] if no_larger else ascending[0]
    bytes_per_s: float = rate["nbytes"] / rate["duration_s"]["median"]
    return bytes_per_s


def measure_throughput(settings: OverlapSettings) -> list[Row]:
    """Layer-major descriptor GETs from a server of our own, in interleaved rounds, every byte compared: a row for each
    size of a layer. Raises LocalServerError, VerificationError at wrong bytes.
    """
    grain, transport = settings.chunk_tokens, settings.transport
    prefixes = [
        make_chunks(tokens // grain, ChunkLayout(layers, grain, TOKEN_LAYER_BYTES * grain), settings.seed + index)
        for index, (tokens, layers) in enumerate(DELIVERED_SMOKE if settings.smoke else DELIVERED)
    ]
    with running_server(settings.folder, settings.serve_options) as server, server.client(transport) as client:
        for prefix in prefixes:
            store_chunks(server, prefix)
        buffer = client.allocate_buffer(max(prefix.payload_bytes for prefix in prefixes))
        client.register_buffer(buffer)
        tasks = []
        for prefix in prefixes:
            sizes = {"layer_bytes": prefix.layer_bytes, "num_layers": prefix.layout.num_layers, "chunk_tokens": grain}
            tasks.append(fetch_task({**sizes, "transport": transport.value}, client, prefix, buffer))
        return [cell_json(cell) for cell in run_rounds(tasks, settings.runs, f"layers over {transport.value}")]


def _measure_compute(shapes: Sequence[ModelShape], plan: ComputePlan) -> list[MeasuredCompute]:
    from objectcache.calibration.compute.measure import measure_compute

    try:
        return [measure_compute(each, plan) for each in shapes]
    except RuntimeError as error:
        raise BaselineError(f"torch: {error}") from error


def _measure(settings: OverlapSettings, origin: Mapping[str, Any]) -> Json:
    need_nixl(settings.transport is Transport.UCX, "--transport shm")
    if not settings.measure:
        return measure_overlap(settings, None, origin)
    need_torch("--measure", settings.device)
    from objectcache.calibration.compute.layer import Device, Dtype
    from objectcache.calibration.compute.measure import compute_plan, smoke_plan

    device, dtype, seed = Device(settings.device), Dtype(settings.dtype), settings.seed
    plan = smoke_plan(device, dtype, seed) if settings.smoke else compute_plan(device, dtype, settings.runs, seed)
    return measure_overlap(settings, plan, origin)


OVERLAP = Experiment(
    name="overlap",
    help="what hiding the transfer behind prefill asks of it (figures 12, A4 to A7), and what this machine carries",
    description="See which links hide the transfer behind prefill, for your model and context. Layer bytes, layer "
    "compute and the throughput between them over contexts and hit rates, from the paper's tables and, "
    "with --measure, from layers timed here; marked against the layer-major throughput of a server of its "
    "own.",
    settings=OverlapSettings,
    measure=_measure,
    show=show,
    plot=plot,
)
