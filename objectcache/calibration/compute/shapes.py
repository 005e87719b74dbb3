"""Shapes of the models of the paper's Figures 12 and A4 to A7, and the operations of a prefill. Pure.

The source of a row is the file config.json of the repository it names at huggingface.co: num_hidden_layers,
hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, max_position_embeddings. All have
grouped-query attention and a SwiGLU MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from descriptors.layout import slice_bytes

ELEMENT_BYTES = 2
"""bfloat16, in which a KV cache is kept whatever the layer computes in."""
SMALL_FACTOR = 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`title` is the paper's name of the model; `context_max` its longest context in tokens."""

    name: str
    title: str
    source: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context_max: int

    @property
    def token_layer_bytes(self) -> int:
        """KV of one token in one layer."""
        return slice_bytes(1, self.kv_heads, self.head_dim, ELEMENT_BYTES)

    @property
    def token_operations(self) -> int:
        """The operations of the matrix products of one token through all layers; multiply and add count as two."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return 2 * self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def pair_operations(self) -> int:
        """The operations of attention between one token and one before it, in all layers: a product with its key and
        one with its value.
        """
        return 4 * self.num_layers * self.heads * self.head_dim

    def prefill_operations(self, cached_tokens: int, context_tokens: int) -> float:
        """The operations to compute the tokens that were not cached."""
        pairs = causal_pairs(cached_tokens, context_tokens)
        return (context_tokens - cached_tokens) * self.token_operations + pairs * self.pair_operations


_DEEPSEEK = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
_GRANITE = "ibm-granite/granite-3.3-8b-base"
SHAPES = (
    ModelShape(
        name="llama-3.1-8b",
        title="Llama 3.1 8B",
        source="meta-llama/Llama-3.1-8B",
        num_layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        context_max=131072,
    ),
    ModelShape(
        name="granite-3.3-8b",
        title="Granite 3.3 8B",
        source=_GRANITE,
        num_layers=40,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=12800,
        context_max=131072,
    ),
    ModelShape(
        name="deepseek-r1-7b",
        title="DeepSeek R1 7B",
        source=_DEEPSEEK,
        num_layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
        context_max=131072,
    ),
    ModelShape(
        name="mistral-7b",
        title="Mistral 7B",
        source="mistralai/Mistral-7B-v0.3",
        num_layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        context_max=32768,
    ),
)


def shape(name: str) -> ModelShape:
    """The model of that name. Raises KeyError."""
    return {each.name: each for each in SHAPES}[name]


def small(model: ModelShape) -> ModelShape:
    """The same number of layers and heads, everything else too small to say anything about speed: for smoke runs."""
    sizes = {name: getattr(model, name) // SMALL_FACTOR for name in ("hidden", "head_dim", "intermediate")}
    return replace(model, **sizes)


def causal_pairs(cached_tokens: int, context_tokens: int) -> float:
    """Pairs of a token that missed and one before it, to which it attends: (P^2 - h^2) / 2."""
    return (context_tokens**2 - cached_tokens**2) / 2
