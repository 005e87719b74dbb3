"""A connector for vLLM that promises every prompt's KV and then cannot load it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

BLOCK_TOKENS = 32


class Promised(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Blocks of the coming step."""

    def __init__(self, blocks: set[int]) -> None:
        self.blocks = blocks


class FaultyConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Every load fails, in the step it was promised for."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._found: dict[str, int] = {}
        self._promised: set[int] = set()
        self._lost: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All whole blocks but the last token's."""
        self._found[request.request_id] = num_computed_tokens
        return max(0, (request.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember what was promised."""
        first = self._found[request.request_id] // BLOCK_TOKENS
        self._promised.update(blocks.get_block_ids()[0][first : first + num_external_tokens // BLOCK_TOKENS])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Hand it on."""
        promised, self._promised = self._promised, set()
        return Promised(promised)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fail."""
        metadata = self._get_connector_metadata()
        self._lost |= metadata.blocks

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing comes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is kept."""

    def wait_for_save(self) -> None:
        """Nothing is kept."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """All of them."""
        lost, self._lost = self._lost, set()
        return lost
