"""The tier's own objects, layer by layer: `native` engines name chunks by vLLM's hashes of blocks, and have the pages
of all layers in them as they lie in the engine's memory, which is what the tier stores of a row.

    object of the tier   |page of layer 0|page of layer 1|…|        one block of tokens
    chunk of L layers    |slice 0        |slice 1        |…|

Engines that name the tier, and engines that load layer by layer, read and write the same objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from nixl_client.connectors.vllm import engine
from nixl_client.connectors.vllm.naming import Prefix
from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.tier_options import epoch_of
from nixl_client.connectors.vllm_tier.engine import card_of_pages
from nixl_client.connectors.vllm_tier.rules.naming import BlockChain, TierSpace
from nixl_client.connectors.vllm_tier.rules.published import TIER_LABELS
from nixl_client.connectors.vllm_tier.spaces import forms_by_group, labels_of, space_of


@dataclass(frozen=True, slots=True)
class NativeDeployment:
    """The names of one engine's chunks, in place of a `Deployment`. `copies` workers hold the same bytes. `hashing` is
    how the engine hashes blocks, and `labels` what routers are told of names that begin so.
    """

    space: TierSpace
    group: int
    hashes_per_chunk: int
    copies: int
    hashing: str
    labels: Callable[[str], tuple[str, ...] | None]
    is_renewed: bool = False

    @property
    def rank_count(self) -> int:
        """All of a token's KV is in one object."""
        return 1

    @property
    def worker_count(self) -> int:
        """Workers that load, and report."""
        return self.copies

    def chains(self, chunk_tokens: int, prefix: Prefix) -> tuple[BlockChain, ...]:
        """The keys of a request's chunks."""
        return (BlockChain(self.space.prefix, self.group, self.hashes_per_chunk, prefix.block_hashes),)

    def renewed(self, epoch: str) -> NativeDeployment:
        """The same engine from now on, when `epoch` is a text that nobody had before."""
        return replace(self, space=self.space.renewed(epoch), is_renewed=True)

    def published(self) -> dict[str, str] | None:
        """The tier's labels, which routers read. None where they could not name the chunks; renewed names are this
        engine's alone.
        """
        values = None if self.is_renewed else self.labels(self.space.prefix)
        return None if values is None else dict(zip(TIER_LABELS, values, strict=True))


def require_native(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedError where the tier's objects are not the pages of this worker's layers in the model's order:
    the parts of several ranks lie in one object, or layers in another order.
    """
    try:
        rows = build_offloading_config(vllm_config, kv_cache_config)
    except (AssertionError, ValueError) as error:
        raise engine.UnsupportedError(str(error)) from error
    (group,) = kv_cache_config.kv_cache_groups
    names, page_bytes = list(group.layer_names), group.kv_cache_spec.page_size_bytes
    obstacles = {
        "parts of several ranks in one object": rows.parallel.world_size > 1 and not rows.replicated_layout,
        "layers in another order than the model's": names != sorted(names, key=engine.layer_order),
        "rows with more than a page for each layer": rows.worker_kv_bytes_per_block != page_bytes * len(names),
    }
    for what, is_there in obstacles.items():
        if is_there:
            raise engine.UnsupportedError(what)


def native_deployment(vllm_config: Any, kv_cache_config: Any, options: VllmOptions) -> NativeDeployment:
    """The names that the tier of this engine has. `require_native` has passed."""
    rows = build_offloading_config(vllm_config, kv_cache_config)
    (group,) = rows.groups
    alignment = SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
    row_bytes = -(-rows.worker_kv_bytes_per_block // alignment) * alignment
    page_bytes = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    workers = rows.parallel.world_size
    cards = [card_of_pages(vllm_config, page_bytes, len(group.layer_names))] * workers
    forms = forms_by_group(rows, cards, row_bytes)
    space = space_of(rows, cards, forms, row_bytes, epoch_of(options.model))

    def labels(prefix: str) -> tuple[str, ...] | None:
        return labels_of(rows, cards, forms=forms, endpoint=options.endpoint, bucket=options.bucket, prefix=prefix)

    return NativeDeployment(
        space=space,
        group=group.group_id,
        hashes_per_chunk=group.tokens_per_block // rows.cache.tokens_per_hash,
        copies=workers,
        hashing=cards[0].hashing,
        labels=labels,
    )
