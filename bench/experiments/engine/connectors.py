"""Connectors of vLLM that the bench changes: ours, but for the compute time it states, and the ExampleConnector, for
prompts of which a beginning is stored. They run where vLLM is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from descriptors.descriptor import LAYER_COMPUTE_US_MAX
from nixl_client.connectors.vllm.connector import ObjectCacheConnector
from nixl_client.connectors.vllm_tier.host_worker import HostOffloadingWorker


@dataclass
class Statement:
    """For the next request of this process, which has one engine: `factor` of the compute time that was measured is
    stated, 0 states nothing. What was measured is noted.
    """

    factor: float = 1.0
    layer_compute_us: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)


STATEMENT = Statement()


class StatingConnector(ObjectCacheConnector):
    """States what STATEMENT says."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """The step's loads and stores. A lie is at least 1 us, the least that a descriptor can state."""
        found = super().build_connector_meta(scheduler_output)
        if self._scheduler is not None and self._scheduler.costs is not None:
            STATEMENT.costs = asdict(self._scheduler.costs)
        if found.step.loads:
            factor, measured_us = STATEMENT.factor, found.step.layer_compute_us
            stated_us = max(1, min(round(measured_us * factor), LAYER_COMPUTE_US_MAX)) if factor and measured_us else 0
            STATEMENT.layer_compute_us = measured_us
            found.step = replace(found.step, layer_compute_us=stated_us)
        return found


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's own spec and memory, with our worker, since it has none for CPUs."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for module in ("nixl", "nixl._api"):  # its tier of objects looks for NIXL by the name of another wheel
            with contextlib.suppress(ImportError):
                sys.modules.setdefault(module, importlib.import_module(module.replace("nixl", "nixl_cu12", 1)))

    def get_worker(self, kv_caches: Any) -> HostOffloadingWorker:
        """The worker, once."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker: Any = HostOffloadingWorker(kv_caches, self.blocks_per_chunk, region)
        worker: HostOffloadingWorker = self._worker
        return worker


BEYOND_TOKENS = 2
"""The original takes so many tokens more than it stores or loads."""


class PrefixExampleConnector(ExampleConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Loads the longest stored prefix; the original looks for the whole prompt. This one is told in `prefix_tokens`
    which lengths may be stored. A prompt that ends where a prefix does is stored, also when the beginning of it was
    loaded. Files, their contents and the copies into blocks are the original's.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        lengths = self._kv_transfer_config.get_from_extra_config("prefix_tokens", [])
        self._lengths = sorted((int(length) for length in lengths), reverse=True)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens of the longest stored prefix."""
        return max(0, self._stored_tokens(request.prompt_token_ids or []) - num_computed_tokens), False

    def build_connector_meta(self, scheduler_output: Any) -> ExampleConnectorMetadata:
        """Prompts are loaded as far as they are stored, and stored where they are to be."""
        step = ExampleConnectorMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            tokens, blocks = new.prompt_token_ids or [], new.block_ids[0]
            stored_tokens = self._stored_tokens(tokens)
            if new.req_id in self._requests_need_load:
                self._add(step, tokens[: stored_tokens + BEYOND_TOKENS], blocks, is_store=False)
            if stored_tokens < len(tokens) - BEYOND_TOKENS in self._lengths:
                self._add(step, tokens, blocks, is_store=True)
        self._requests_need_load.clear()
        return step

    def _add(self, step: ExampleConnectorMetadata, tokens: list[int], blocks: list[int], *, is_store: bool) -> None:
        whole = blocks[: (len(tokens) - 1) // self._block_size]
        step.add_request(
            token_ids=tokens, block_ids=whole, block_size=self._block_size, is_store=is_store, mm_hashes=[]
        )

    def _stored_tokens(self, tokens: Sequence[int]) -> int:
        fitting = (length for length in self._lengths if length + BEYOND_TOKENS <= len(tokens))
        return next((length for length in fitting if self._is_stored(tokens[: length + BEYOND_TOKENS])), 0)

    def _is_stored(self, tokens: Sequence[int]) -> bool:
        return bool(self._found_match_for_prompt(list(tokens), []))
