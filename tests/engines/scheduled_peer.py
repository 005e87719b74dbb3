"""Another connector beside ours, under MultiConnector: offers a request's first tokens, never loads anything."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

PEER = {"kv_connector": "PeerConnector", "kv_connector_module_path": __name__, "kv_role": "kv_both"}


class PeerConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Offers `tokens` of request `request_id`; with `is_async` they come between steps."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        offer = self._kv_transfer_config.kv_connector_extra_config
        if request.request_id != offer["request_id"] or num_computed_tokens >= offer["tokens"]:
            return 0, False
        return offer["tokens"] - num_computed_tokens, offer["is_async"]

    def update_state_after_alloc(self, *arguments: Any) -> None:
        """No books."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to do."""
        return KVConnectorMetadata()

    def start_load_kv(self, *arguments: Any, **named: Any) -> None:
        """No worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No worker."""

    def save_kv_layer(self, *arguments: Any, **named: Any) -> None:
        """No worker."""

    def wait_for_save(self) -> None:
        """No worker."""
