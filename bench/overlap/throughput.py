"""How fast this machine delivers layers: layer-major descriptor GETs from a server of our own, every byte compared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.ladder.chunks import TOKEN_BYTES, Prefix, fetcher, make_prefix, store_prefix
from bench.ladder.results import Cell
from bench.ladder.rounds import Task, run_rounds
from bench.server import running_server
from descriptors.descriptor import Delivery
from nixl_client.client import Transport


@dataclass(frozen=True, slots=True)
class Delivered:
    """One payload: `layer_tokens` cached tokens through `num_layers` layers."""

    layer_tokens: int
    num_layers: int


FULL = (Delivered(512, 32), Delivered(2048, 32), Delivered(8192, 8))
SMOKE = (Delivered(256, 2), Delivered(512, 2))


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """What is fetched, `runs` times counted. `serve_options` are further ones of `objectcache serve`."""

    transport: Transport
    chunk_tokens: int
    payloads: tuple[Delivered, ...]
    runs: int
    seed: int
    serve_options: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class LayerRate:
    """Throughput at one size of a layer."""

    layer_bytes: int
    cell: Cell

    @property
    def bytes_per_s(self) -> float:
        """Of the median run."""
        return self.cell.nbytes / self.cell.median_s()


def rate_at(rates: Sequence[LayerRate], layer_bytes: int) -> float:
    """Bytes/s for layers of a size: that of the largest measured which is no larger, or else of the smallest."""
    ascending = sorted(rates, key=lambda rate: rate.layer_bytes)
    no_larger = [rate for rate in ascending if rate.layer_bytes <= layer_bytes]
    return (no_larger[-1] if no_larger else ascending[0]).bytes_per_s


def measure_throughput(plan: ThroughputPlan) -> tuple[LayerRate, ...]:
    """One rate for each payload, in interleaved rounds. Raises BenchServerError, VerificationError at wrong bytes."""
    prefixes = [
        make_prefix(each.num_layers, plan.chunk_tokens, each.layer_tokens, plan.seed + index)
        for index, each in enumerate(plan.payloads)
    ]
    with ExitStack() as stack:
        server = stack.enter_context(running_server(plan.folder, plan.serve_options))
        for prefix in prefixes:
            store_prefix(server, prefix, "storing")
        client = stack.enter_context(server.client(plan.transport))
        buffer = client.allocate_buffer(max(prefix.payload_bytes for prefix in prefixes))
        client.register_buffer(buffer)
        tasks = [
            Task(_labels(prefix, plan), prefix.payload_bytes, fetcher(client, prefix, buffer, Delivery.LAYER_MAJOR))
            for prefix in prefixes
        ]
        cells = run_rounds(tasks, plan.runs, f"layers over {plan.transport.value}")
    return tuple(
        LayerRate(each.layer_tokens * TOKEN_BYTES, cell) for each, cell in zip(plan.payloads, cells, strict=True)
    )


def _labels(prefix: Prefix, plan: ThroughputPlan) -> dict[str, str | int]:
    layout = prefix.layout
    return {
        "layer_bytes": len(prefix.keys) * layout.per_layer_chunk_bytes,
        "num_layers": layout.num_layers,
        "chunk_tokens": layout.chunk_tokens,
        "transport": plan.transport.value,
    }
