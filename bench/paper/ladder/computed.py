"""What is computed rather than measured: Figure 2, layer payloads of models, and Table A7, the elements a client sees.

Table A7 comes from the server's own plans, before and after bounded aggregation. Pure.
"""

from __future__ import annotations

from bench.core.show import Json
from bench.paper.ladder.bed import figure
from bench.paper.tables import (
    ELEMENT_BYTES,
    MODELS,
    NUM_LAYERS,
    TOKEN_LAYER_BYTES,
    GroupedQuery,
    Latent,
    context_tokens,
    table_a7,
)
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from descriptors.units import KIB, MIB
from storage_server.planning.plan import plan_delivery

CHUNK_TOKENS = 16
BASELINE_BYTES = GroupedQuery(8, 128).token_bytes() * CHUNK_TOKENS
SAID_BY_THE_PAPER = (
    ("the dashed line: 8 KV heads of 128 (Figure 2)", GroupedQuery(8, 128), 16, 64 * KIB),
    ("Llama 3.1 8B, 256 tokens: about 1 MB (section 2.1)", GroupedQuery(8, 128), 256, MIB),
    ("MLA-style layouts: roughly 16 KB (section 2.1), which is the latent alone", Latent(512, 64), 16, 16 * KIB),
)
"""(where, attention, tokens of a chunk, bytes)."""
CONSTANTS = {"kv_heads": "kv_heads", "head_dim": "head_dim", "latent_rank": "rank", "rope_dim": "rope_dim"}
"""Columns, and fields of the attentions, each of which has two of them."""
HITS_OF_EIGHT = 7
"""Table A7's hit rate, 87.5 %."""


def layer_payloads() -> Json:
    """Every model's S for 16 tokens, and what the paper says beside what the same constants give."""
    rows = []
    for model in sorted(MODELS, key=lambda model: model.payload_bytes(CHUNK_TOKENS)):
        constants = {name: getattr(model.attention, field, None) for name, field in CONSTANTS.items()}
        nbytes = model.payload_bytes(CHUNK_TOKENS)
        sizes = {"payload_bytes": nbytes, "over_baseline": round(nbytes / BASELINE_BYTES, 3)}
        known = {"family": model.family, "model": model.name, "kv_layers": model.kv_layers}
        rows.append({**known, **constants, **sizes, "source": model.source})
    below = sum(model.payload_bytes(CHUNK_TOKENS) < BASELINE_BYTES for model in MODELS)
    notes = [
        f"{ELEMENT_BYTES} bytes an element (bfloat16); constants from config.json of the repository named as source",
        f"{below} of {len(rows)} models are below the 64 KiB line",
    ]
    for where, attention, chunk_tokens, nbytes in SAID_BY_THE_PAPER:
        ours = attention.token_bytes() * chunk_tokens
        given = f"from the constants {ours / KIB:g} KiB ({ours / nbytes:.3f})"
        notes.append(f"paper, {where}: {nbytes / KIB:g} KiB; {given}")
    settings = {"chunk_tokens": CHUNK_TOKENS, "element_bytes": ELEMENT_BYTES, "baseline_bytes": BASELINE_BYTES}
    return figure(settings, notes, rows=rows)


def planned_elements(context: str, chunk_tokens: int, aggregation_bytes: int) -> dict[str, str | int]:
    """What the gather's plan gives for a hit of 87.5 %, as a column of Table A7."""
    chunk_count = context_tokens(context) * HITS_OF_EIGHT // 8 // chunk_tokens
    layout = ChunkLayout(NUM_LAYERS, chunk_tokens, TOKEN_LAYER_BYTES * chunk_tokens)
    before = chunk_count * NUM_LAYERS
    after = plan_delivery(Mode.LAYER_MAJOR, layout, chunk_count, aggregation_bytes).payload_count
    return {
        "context": context,
        "chunk_tokens": chunk_tokens,
        "chunks": chunk_count,
        "original_elements": before,
        "agg_payload_mib": aggregation_bytes // MIB,
        "elements_per_agg": aggregation_bytes // layout.per_layer_chunk_bytes,
        "elements_after": after,
        "reduction": before // after,
    }


def element_counts() -> Json:
    """The whole table, compared with the paper's column by column."""
    paper = table_a7()
    ours = [planned_elements(said["context"], said["chunk_tokens"], said["agg_payload_mib"] * MIB) for said in paper]
    wrong = [f"{said} is planned as {mine}" for said, mine in zip(paper, ours, strict=True) if said != mine]
    notes = ["planned by storage_server.planning.plan; every count is the paper's" if not wrong else "differs"]
    settings = {"layers": NUM_LAYERS, "token_bytes": TOKEN_LAYER_BYTES, "hit_rate": HITS_OF_EIGHT / 8}
    return figure(settings, notes, rows=ours, problem="; ".join(wrong))
