"""Table A7: how many elements a client sees before and after bounded aggregation, from the server's own plans."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bench.ladder.results import Figure, FigureName, State
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from descriptors.units import KIB, MIB
from storage_server.gather.plan import plan_delivery

TITLE = "client-visible elements with bounded aggregation"
LAYERS = 32
TOKEN_BYTES = 4096
"""Llama 3.1 8B: 2 * 8 * 128 * 2 bytes a token and layer."""
CONTEXTS = {"4K": 4 * KIB, "64K": 64 * KIB}
HITS_OF_EIGHT = 7
"""The table's hit rate, 87.5 %."""
PAPER_PAYLOADS = {16: MIB, 64: 2 * MIB, 256: 2 * MIB}
"""Payload size by chunk_tokens, the third row of the table."""


@dataclass(frozen=True, slots=True)
class Elements:
    """A column of Table A7, under the names of tests/data/paper_tables.json."""

    context: str
    chunk_tokens: int
    chunks: int
    original_elements: int
    agg_payload_mib: int
    elements_per_agg: int
    elements_after: int
    reduction: int


PAPER = (
    Elements("4K", 16, 224, 7168, 1, 16, 448, 16),
    Elements("4K", 64, 56, 1792, 2, 8, 224, 8),
    Elements("4K", 256, 14, 448, 2, 2, 224, 2),
    Elements("64K", 16, 3584, 114688, 1, 16, 7168, 16),
    Elements("64K", 64, 896, 28672, 2, 8, 3584, 8),
    Elements("64K", 256, 224, 7168, 2, 2, 3584, 2),
)


def planned_elements(context: str, chunk_tokens: int, aggregation_bytes: int) -> Elements:
    """What the gather's plan gives for a hit of 87.5 %."""
    chunk_count = CONTEXTS[context] * HITS_OF_EIGHT // 8 // chunk_tokens
    layout = ChunkLayout(LAYERS, chunk_tokens, TOKEN_BYTES * chunk_tokens)
    before = chunk_count * LAYERS
    after = plan_delivery(Mode.LAYER_MAJOR, layout, chunk_count, aggregation_bytes).payload_count
    return Elements(
        context,
        chunk_tokens,
        chunk_count,
        before,
        aggregation_bytes // MIB,
        aggregation_bytes // layout.per_layer_chunk_bytes,
        after,
        before // after,
    )


def element_counts() -> Figure:
    """The whole table, compared with the paper's column by column."""
    ours = [planned_elements(said.context, said.chunk_tokens, PAPER_PAYLOADS[said.chunk_tokens]) for said in PAPER]
    wrong = [f"{paper} is planned as {mine}" for paper, mine in zip(PAPER, ours, strict=True) if paper != mine]
    return Figure(
        FigureName.ELEMENTS,
        TITLE,
        State.FAILED if wrong else State.DONE,
        reason="; ".join(wrong),
        settings={"layers": LAYERS, "token_bytes": TOKEN_BYTES, "hit_rate": HITS_OF_EIGHT / 8},
        notes=["planned by storage_server.gather.plan; every count is the paper's" if not wrong else "differs"],
        rows=[asdict(column) for column in ours],
    )
