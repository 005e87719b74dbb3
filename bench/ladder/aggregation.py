"""Figure A8: throughput of aggregated layers over payload sizes and chunk sizes.

A server for each payload size, all running at once, so that rounds can be interleaved; those not asked idle.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from bench.ladder.bed import Session, served_folder
from bench.ladder.chunks import Prefix, fetcher, make_prefix, store_prefix
from bench.ladder.results import Figure, FigureName, State
from bench.ladder.rounds import Task, run_rounds
from descriptors.descriptor import Delivery
from descriptors.units import KIB, MIB
from nixl_client.client import Transport

TITLE = "aggregated layers over aggregation and chunk sizes"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Each sample fetches `token_count` tokens of `num_layers` layers."""

    aggregation_bytes: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    num_layers: int
    token_count: int


FULL = Sizes((512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB), (16, 32, 64, 128, 256, 512), 16, 2048)
SMOKE = Sizes((512 * KIB,), (16, 256), 4, 256)


def aggregation(session: Session) -> Figure:
    """Every payload size with every chunk size, in layer-major order."""
    settings = session.settings
    sizes = SMOKE if settings.is_smoke else FULL
    prefixes = [make_prefix(sizes.num_layers, size, sizes.token_count, settings.seed) for size in sizes.chunk_tokens]
    buffer_bytes = max(prefix.payload_bytes for prefix in prefixes)
    with ExitStack() as stack:
        tasks: list[Task] = []
        for aggregation_bytes in sizes.aggregation_bytes:
            config = f"[storage]\naggregation_bytes = {aggregation_bytes}\ndirect_payload_bytes = {aggregation_bytes}\n"
            server = stack.enter_context(served_folder(settings, config)).server
            for prefix in prefixes:
                store_prefix(server, prefix, f"figure A8: storing, {aggregation_bytes >> 10} KiB")
            client = stack.enter_context(server.client(Transport(settings.transport)))
            buffer = client.allocate_buffer(buffer_bytes)
            client.register_buffer(buffer)
            for prefix in prefixes:
                run = fetcher(client, prefix, buffer, Delivery.LAYER_MAJOR)
                tasks.append(Task(_labels(prefix, aggregation_bytes), prefix.payload_bytes, run))
        cells = run_rounds(tasks, settings.runs, "figure A8")
    return Figure(
        FigureName.AGGREGATION,
        TITLE,
        State.DONE,
        settings={
            "aggregation_bytes": sizes.aggregation_bytes,
            "chunk_tokens": sizes.chunk_tokens,
            "num_layers": sizes.num_layers,
            "token_count": sizes.token_count,
            "transport": settings.transport,
        },
        notes=[
            f"one descriptor GET of {sizes.token_count} tokens and {sizes.num_layers} layers, layer-major, over "
            f"{settings.transport}; warm: stored moments ago and fetched once before",
            "a slice larger than the payload is sent in pieces",
        ],
        cells=cells,
    )


def _labels(prefix: Prefix, aggregation_bytes: int) -> dict[str, str | int]:
    return {
        "aggregation_bytes": aggregation_bytes,
        "chunk_tokens": prefix.layout.chunk_tokens,
        "slice_bytes": prefix.layout.per_layer_chunk_bytes,
    }
