"""`objectcache bench overlap`: how fast this machine delivers layers, its compute where asked for, and the grids."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.beds.processes import BaselineError
from bench.core.experiment import FAILURES, Experiment, need_nixl, published
from bench.core.options import Options, each, number
from bench.core.show import Json
from bench.experiments.device.command import need_torch
from bench.experiments.overlap.grids import (
    PAPER_DEVICES,
    Row,
    held_against,
    measured_grid,
    paper_grids,
    scaling_error,
    share_below,
)
from bench.experiments.overlap.show import PAPER_RATE_BYTES_PER_S, plot, show
from bench.paper.tables import TOKEN_LAYER_BYTES
from calibration.chunks import fetch_task, make_chunks, store_chunks
from calibration.compute.shapes import SHAPES, ModelShape, shape
from calibration.content import VerificationError
from calibration.samples import cell_json, run_rounds
from calibration.servers import running_server
from descriptors.descriptor import CHUNK_TOKENS_MAX
from descriptors.layout import ChunkLayout
from nixl_client.client import Transport

if TYPE_CHECKING:
    from calibration.compute.measure import ComputePlan, MeasuredCompute

CHUNK_TOKENS = 64
DELIVERED = ((512, 32), (2048, 32), (8192, 8))
"""Cached tokens, and how many layers of them are delivered."""
DELIVERED_SMOKE = ((256, 2), (512, 2))
CHUNK_TOKENS_LIMIT = min(CHUNK_TOKENS_MAX, *(layer_tokens for layer_tokens, _ in DELIVERED_SMOKE))


SETTINGS = (
    "models",
    "measure",
    "device",
    "dtype",
    "smoke",
    "runs",
    "seed",
    "transport",
    "chunk_tokens",
    "serve_options",
)
"""Options that the result names."""


def measure_overlap(options: argparse.Namespace, compute: ComputePlan | None, origin: Mapping[str, Any]) -> Json:
    """The paper's grids always; this machine's beside them where there is a plan for its compute. What fails is the
    result's `problem`.
    """
    shapes = [shape(name) for name in options.models]
    grids = paper_grids(shapes)
    computes: list[MeasuredCompute] = []
    rates: list[Row] = []
    problem = None
    try:
        if compute is not None:
            computes = _measure_compute(shapes, compute)
            grids += [measured_grid(each.shape, "host", each.fit) for each in computes]
        rates = measure_throughput(options)
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
        {name: getattr(options, name) for name in SETTINGS},
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


def measure_throughput(options: argparse.Namespace) -> list[Row]:
    """Layer-major descriptor GETs from a server of our own, in interleaved rounds, every byte compared: a row for each
    size of a layer. Raises LocalServerError, VerificationError at wrong bytes.
    """
    grain, transport = options.chunk_tokens, options.transport
    prefixes = [
        make_chunks(tokens // grain, ChunkLayout(layers, grain, TOKEN_LAYER_BYTES * grain), options.seed + index)
        for index, (tokens, layers) in enumerate(DELIVERED_SMOKE if options.smoke else DELIVERED)
    ]
    with running_server(options.folder, options.serve_options) as server, server.client(transport) as client:
        for prefix in prefixes:
            store_chunks(server, prefix)
        buffer = client.allocate_buffer(max(prefix.payload_bytes for prefix in prefixes))
        client.register_buffer(buffer)
        tasks = []
        for prefix in prefixes:
            sizes = {"layer_bytes": prefix.layer_bytes, "num_layers": prefix.layout.num_layers, "chunk_tokens": grain}
            tasks.append(fetch_task({**sizes, "transport": transport.value}, client, prefix, buffer))
        return [cell_json(cell) for cell in run_rounds(tasks, options.runs, f"layers over {transport.value}")]


def _measure_compute(shapes: Sequence[ModelShape], plan: ComputePlan) -> list[MeasuredCompute]:
    from calibration.compute.measure import measure_compute

    try:
        return [measure_compute(each, plan) for each in shapes]
    except RuntimeError as error:
        raise BaselineError(f"torch: {error}") from error


def _declare(options: Options) -> None:
    every = tuple(model.name for model in SHAPES)
    options.add("--models", type=_models, default=every, metavar="LIST", help=f"default: {','.join(every)}")
    options.flag("--measure", "time decoder layers here too; needs the extra 'torch'")
    options.add("--device", choices=("cpu", "cuda"), default="cpu", help="for --measure; default: cpu")
    dtypes = ("bfloat16", "float32")
    options.add("--dtype", choices=dtypes, default="bfloat16", help="for --measure; default: bfloat16")
    options.runs(5)
    options.seed()
    options.choice("--transport", tuple(Transport), Transport.UCX, "of descriptor GETs")
    text = f"tokens of a chunk, a power of two up to {CHUNK_TOKENS_LIMIT}; default: {CHUNK_TOKENS}"
    options.add("-G", "--chunk-tokens", type=_chunk_tokens, default=CHUNK_TOKENS, metavar="G", help=text)
    options.serve_options()
    options.folder("for the store")


def _measure(options: argparse.Namespace, origin: Mapping[str, Any]) -> Json:
    need_nixl(options.transport is Transport.UCX, "--transport shm")
    if not options.measure:
        return measure_overlap(options, None, origin)
    need_torch("--measure", options.device)
    from calibration.compute.layer import Device, Dtype
    from calibration.compute.measure import compute_plan, smoke_plan

    device, dtype, seed = Device(options.device), Dtype(options.dtype), options.seed
    plan = smoke_plan(device, dtype, seed) if options.smoke else compute_plan(device, dtype, options.runs, seed)
    return measure_overlap(options, plan, origin)


def _models(text: str) -> tuple[str, ...]:
    known = tuple(model.name for model in SHAPES)
    return tuple(sorted(each(str, known)(text), key=known.index))


def _chunk_tokens(text: str) -> int:
    value = number(1, CHUNK_TOKENS_LIMIT)(text)
    if value & (value - 1):
        raise argparse.ArgumentTypeError("must be a power of two")
    return value


OVERLAP = Experiment(
    name="overlap",
    help="what hiding the transfer behind prefill asks of it (figures 12, A4 to A7), and what this machine carries",
    description="Layer bytes, layer compute and the throughput between them over contexts and hit rates, from the "
    "paper's tables and, with --measure, from layers timed here; marked against the layer-major throughput of a server "
    "of its own.",
    declare=_declare,
    measure=_measure,
    show=show,
    plot=plot,
)
