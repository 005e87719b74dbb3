"""How many bytes of KV current open-weight models keep, from the constants of their published configurations. Pure.

The source of a row is the file config.json of the repository it names at huggingface.co. What counts for a layer
(ObjectCache paper, Eq. 1) is 2 * n_kv * d elements a token; with multi-head latent attention (MLA) it is one latent
vector and the rotary part of the key, shared by all heads (DeepSeek-V2, section 2.1.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from descriptors.layout import slice_bytes

ELEMENT_BYTES = 2
"""bfloat16, what all of these were published in or are served with; an 8-bit cache halves every figure."""


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """num_key_value_heads and head_dim."""

    kv_heads: int
    head_dim: int

    def token_bytes(self) -> int:
        """Keys and values of one layer and token."""
        return slice_bytes(1, self.kv_heads, self.head_dim, ELEMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Latent:
    """kv_lora_rank and qk_rope_head_dim."""

    rank: int
    rope_dim: int

    def token_bytes(self) -> int:
        """Latent and rotary key of one layer and token."""
        return (self.rank + self.rope_dim) * ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Model:
    """`source` is a repository at huggingface.co. `kv_layers` counts the layers that keep KV for the whole context;
    layers with a sliding window keep the same bytes a token but fewer tokens, and are counted too.
    """

    family: str
    name: str
    source: str
    kv_layers: int
    attention: GroupedQuery | Latent

    def payload_bytes(self, chunk_tokens: int) -> int:
        """S: one layer of a chunk."""
        return chunk_tokens * self.attention.token_bytes()


_LATENT = Latent(512, 64)
MODELS = (
    Model("Llama", "Llama 3.1 8B", "meta-llama/Llama-3.1-8B", 32, GroupedQuery(8, 128)),
    Model("Llama", "Llama 3.1 70B", "meta-llama/Llama-3.1-70B", 80, GroupedQuery(8, 128)),
    Model("Llama", "Llama 3.1 405B", "meta-llama/Llama-3.1-405B", 126, GroupedQuery(8, 128)),
    Model("Llama", "Llama 3.2 1B", "meta-llama/Llama-3.2-1B", 16, GroupedQuery(8, 64)),
    Model("Llama", "Llama 4 Scout", "meta-llama/Llama-4-Scout-17B-16E", 48, GroupedQuery(8, 128)),
    Model("Mistral", "Mistral 7B v0.3", "mistralai/Mistral-7B-v0.3", 32, GroupedQuery(8, 128)),
    Model("Mistral", "Mistral Nemo 12B", "mistralai/Mistral-Nemo-Base-2407", 40, GroupedQuery(8, 128)),
    Model("Mistral", "Mixtral 8x22B", "mistralai/Mixtral-8x22B-v0.1", 56, GroupedQuery(8, 128)),
    Model("Mistral", "Mistral Large 2", "mistralai/Mistral-Large-Instruct-2407", 88, GroupedQuery(8, 128)),
    Model("Qwen", "Qwen2.5 0.5B", "Qwen/Qwen2.5-0.5B", 24, GroupedQuery(2, 64)),
    Model("Qwen", "Qwen2.5 7B", "Qwen/Qwen2.5-7B", 28, GroupedQuery(4, 128)),
    Model("Qwen", "Qwen2.5 72B", "Qwen/Qwen2.5-72B", 80, GroupedQuery(8, 128)),
    Model("Qwen", "Qwen3 8B", "Qwen/Qwen3-8B", 36, GroupedQuery(8, 128)),
    Model("Qwen", "Qwen3 30B-A3B", "Qwen/Qwen3-30B-A3B", 48, GroupedQuery(4, 128)),
    Model("Qwen", "Qwen3 235B-A22B", "Qwen/Qwen3-235B-A22B", 94, GroupedQuery(4, 128)),
    Model("Qwen", "Qwen3-Next 80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", 12, GroupedQuery(2, 256)),
    Model("Gemma", "Gemma 2 9B", "google/gemma-2-9b", 42, GroupedQuery(8, 256)),
    Model("Gemma", "Gemma 2 27B", "google/gemma-2-27b", 46, GroupedQuery(16, 128)),
    Model("Gemma", "Gemma 3 1B", "google/gemma-3-1b-pt", 26, GroupedQuery(1, 256)),
    Model("Gemma", "Gemma 3 4B", "google/gemma-3-4b-pt", 34, GroupedQuery(4, 256)),
    Model("Gemma", "Gemma 3 27B", "google/gemma-3-27b-pt", 62, GroupedQuery(16, 128)),
    Model("DeepSeek", "DeepSeek-V2", "deepseek-ai/DeepSeek-V2", 60, _LATENT),
    Model("DeepSeek", "DeepSeek-V3 and R1", "deepseek-ai/DeepSeek-V3", 61, _LATENT),
    Model("DeepSeek", "R1 Distill Qwen 7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 28, GroupedQuery(4, 128)),
    Model("Kimi", "Kimi K2", "moonshotai/Kimi-K2-Instruct", 61, _LATENT),
    Model("GLM", "GLM-4 9B", "THUDM/glm-4-9b", 40, GroupedQuery(2, 128)),
    Model("GLM", "GLM-4.5 Air", "zai-org/GLM-4.5-Air", 46, GroupedQuery(8, 128)),
    Model("GLM", "GLM-4.5", "zai-org/GLM-4.5", 92, GroupedQuery(8, 128)),
    Model("Phi", "Phi-3 mini", "microsoft/Phi-3-mini-4k-instruct", 32, GroupedQuery(32, 96)),
    Model("Phi", "Phi-4", "microsoft/phi-4", 40, GroupedQuery(10, 128)),
    Model("gpt-oss", "gpt-oss 20B", "openai/gpt-oss-20b", 24, GroupedQuery(8, 64)),
    Model("gpt-oss", "gpt-oss 120B", "openai/gpt-oss-120b", 36, GroupedQuery(8, 64)),
    Model("Granite", "Granite 3.1 8B", "ibm-granite/granite-3.1-8b-base", 40, GroupedQuery(8, 128)),
    Model("OLMo", "OLMo 2 7B", "allenai/OLMo-2-1124-7B", 32, GroupedQuery(32, 128)),
)
