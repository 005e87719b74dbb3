"""Figure 2: one layer of a 16-token chunk, across current model families. Computed, not measured."""

from __future__ import annotations

from typing import Any

from bench.ladder.models import ELEMENT_BYTES, MODELS, GroupedQuery, Latent, Model
from bench.ladder.results import Figure, FigureName, State
from descriptors.units import KIB, MIB

TITLE = "layer payload of a 16-token chunk"
CHUNK_TOKENS = 16
PAPER = (
    ("the dashed line: 8 KV heads of 128 (Figure 2)", GroupedQuery(8, 128), 16, 64 * KIB),
    ("Llama 3.1 8B, 256 tokens: about 1 MB (section 2.1)", GroupedQuery(8, 128), 256, MIB),
    ("MLA-style layouts: roughly 16 KB (section 2.1), which is the latent alone", Latent(512, 64), 16, 16 * KIB),
)
"""What the paper says in figures: (where, attention, tokens of a chunk, bytes)."""


def layer_payloads() -> Figure:
    """Every model's S for 16 tokens, and what the paper says beside what the same constants give."""
    baseline = GroupedQuery(8, 128).token_bytes() * CHUNK_TOKENS
    rows = [_row(model, baseline) for model in sorted(MODELS, key=lambda model: model.payload_bytes(CHUNK_TOKENS))]
    below = sum(row["payload_bytes"] < baseline for row in rows)
    notes = [
        f"{ELEMENT_BYTES} bytes an element (bfloat16); constants from config.json of the repository named as source",
        f"{below} of {len(rows)} models are below the 64 KiB line",
        *(_paper_note(*said) for said in PAPER),
    ]
    settings = {"chunk_tokens": CHUNK_TOKENS, "element_bytes": ELEMENT_BYTES, "baseline_bytes": baseline}
    return Figure(FigureName.LAYER_PAYLOAD, TITLE, State.DONE, settings=settings, notes=notes, rows=rows)


def _row(model: Model, baseline: int) -> dict[str, Any]:
    attention = model.attention
    nbytes = model.payload_bytes(CHUNK_TOKENS)
    return {
        "family": model.family,
        "model": model.name,
        "kv_layers": model.kv_layers,
        "kv_heads": attention.kv_heads if isinstance(attention, GroupedQuery) else None,
        "head_dim": attention.head_dim if isinstance(attention, GroupedQuery) else None,
        "latent_rank": attention.rank if isinstance(attention, Latent) else None,
        "rope_dim": attention.rope_dim if isinstance(attention, Latent) else None,
        "payload_bytes": nbytes,
        "over_baseline": round(nbytes / baseline, 3),
        "source": model.source,
    }


def _paper_note(where: str, attention: GroupedQuery | Latent, chunk_tokens: int, paper_bytes: int) -> str:
    ours = attention.token_bytes() * chunk_tokens
    return (
        f"paper, {where}: {paper_bytes / KIB:g} KiB; from the constants {ours / KIB:g} KiB ({ours / paper_bytes:.3f})"
    )
