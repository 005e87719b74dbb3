"""The names and the shape of an engine's objects, from vLLM's configuration and from what its workers have left."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.v1.core import kv_cache_utils

from nixl_client.connectors.vllm.naming import short_name
from nixl_client.connectors.vllm_tier.engine import even_form, named_weights, platform_name
from nixl_client.connectors.vllm_tier.rules.card import EngineCard, forms_of
from nixl_client.connectors.vllm_tier.rules.naming import TierSpace
from nixl_client.connectors.vllm_tier.rules.published import HASHING, CacheGroup, tier_labels
from nixl_client.connectors.vllm_tier.rules.rows import RowForm

_log = logging.getLogger(__name__)


def forms_by_group(config: Any, cards: Sequence[EngineCard], row_bytes: int) -> dict[int, RowForm | None]:
    """How the rows of each group are used, by the group's number in keys; None for each where nothing is stored, since
    a prefix needs all of them. It says why, for people.
    """
    nothing: dict[int, RowForm | None] = dict.fromkeys(group.group_id for group in config.groups)
    if len(cards) == config.parallel.world_size and len({card.identity for card in cards}) == 1:
        distinct = cards[:1] if config.canonical_layout or config.replicated_layout else cards
        try:
            forms = forms_of(distinct, len(config.groups), row_bytes, config.cache.blocks_per_chunk)
        except ValueError as error:
            _log.warning("ObjectCache IS NOT USED: %s", error)
            return nothing
        if None in forms:
            count = sum(form is None for form in forms)
            _log.warning(
                "ObjectCache IS NOT USED: chunks of %d of %d groups may lack blocks; leave blocks_per_chunk at 1",
                count,
                len(forms),
            )
            return nothing
        return dict(zip(nothing, forms, strict=True))
    form = even_form(config, row_bytes)
    if form is None:
        _log.warning(
            "ObjectCache IS NOT USED: which bytes of a row are used is not known; use spec_name ObjectCacheTieringSpec"
        )
        return nothing
    return dict.fromkeys(nothing, form)


def space_of(
    config: Any, cards: Sequence[EngineCard], forms: Mapping[int, RowForm | None], row_bytes: int, epoch: str
) -> TierSpace:
    """The names of an engine's objects. `config` is vLLM's OffloadingConfig. A field that is missing here would let
    engines read each other's bytes as something else.
    """
    parallel = config.parallel
    is_shared = config.replicated_layout or (config.canonical_layout and parallel.is_parallelism_agnostic)
    fields: dict[str, object] = {
        "identity": cards[0].identity if cards else named_weights(config.model.name),
        "platform": cards[0].platform if cards else platform_name(),
        "epoch": epoch,
        "dtype": str(config.model.dtype),
        "layout": config.kv_cache_layout,
        "canonical": canonical_format_id(config.kv_cache_layout) if config.canonical_layout else None,
        "replicated": config.replicated_layout,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "row_bytes": None if is_shared else row_bytes,
        "used": [None if form is None else form.spans.tolist() for form in forms.values()],
        "ranks": None
        if is_shared
        else [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
    }
    name = cards[0].name if cards else short_name(config.model.name)
    return TierSpace(name, fields)


def labels_of(
    config: Any,
    cards: Sequence[EngineCard],
    forms: Mapping[int, RowForm | None],
    endpoint: str,
    bucket: str,
    prefix: str,
) -> tuple[str, ...] | None:
    """The labels that routers read. None where these could not name the objects: not all is known, or vLLM hashes
    otherwise.
    """
    if not cards or cards[0].hashing.split()[0] != HASHING or any(form is None for form in forms.values()):
        return None
    groups = [
        CacheGroup(
            group.group_id,
            group.tokens_per_block * config.cache.blocks_per_chunk,
            form,
            all(card.are_whole[index] for card in cards),
        )
        for index, group in enumerate(config.groups)
        if (form := forms[group.group_id]) is not None
    ]
    none_hash, tokens_per_hash = kv_cache_utils.NONE_HASH, config.cache.tokens_per_hash
    return tier_labels(prefix, none_hash, hash_tokens=tokens_per_hash, groups=groups, endpoint=endpoint, bucket=bucket)
