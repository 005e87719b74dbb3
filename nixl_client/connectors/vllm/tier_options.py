"""The connector's options as those of the tier, for models whose KV it cannot load layer by layer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields

from nixl_client.connectors.vllm.options import VllmOptions
from nixl_client.connectors.vllm.plugin import SPEC, TIER, TIER_MODULE
from nixl_client.connectors.vllm_tier.options import EPOCH_CHARACTERS_MAX, PROMISED, TierOptions

_OTHERWISE = {"epoch", "staging_bytes", "store"}
"""Options of the tier that the connector's of the same name do not set: `staging_bytes` is another buffer there."""


def names_tier(extra: Mapping[str, object]) -> bool:
    """Whether these are the tier's own options, as vLLM's OffloadingConnector takes them, with our spec or another."""
    return extra.get("spec_name") == SPEC or any(map(_is_ours, _listed(extra)))


def without_stores(extra: Mapping[str, object]) -> dict[str, object]:
    """The tier's options for an engine that only loads."""
    tiers = [{**each, "store": False} if _is_ours(each) else each for each in _listed(extra)]
    return {**extra, "store": False, **({"secondary_tiers": tiers} if tiers else {})}


def tier_options(extra: Mapping[str, object], worker_count: int, *, is_storing: bool) -> dict[str, object]:
    """vLLM's `kv_connector_extra_config` for its OffloadingConnector over the tier, from that of our connector. Options
    that only layers have are left out, and what is not set has the tier's default. `staging_bytes` is the memory that a
    worker loads into: here that is its part of vLLM's host memory. Raises ValueError.
    """
    options = VllmOptions.of(extra)
    internals = extra.get("internals", {})
    given = {**(internals if isinstance(internals, Mapping) else {}), **extra}
    known = {field.name for field in fields(TierOptions)} - _OTHERWISE
    taken = {name: value for name, value in given.items() if name in known}
    config: dict[str, object] = {name: value for name, value in taken.items() if name in PROMISED}
    config["internals"] = {name: value for name, value in taken.items() if name not in PROMISED}
    config["store"] = options.store and is_storing
    if options.model:
        config["epoch"] = epoch_of(options.model)
    if options.staging_bytes:
        config["cpu_bytes_to_use"] = options.staging_bytes * worker_count
    return {"spec_name": SPEC, "spec_module_path": TIER_MODULE, **config}


def _listed(extra: Mapping[str, object]) -> list[dict[str, object]]:
    tiers = extra.get("secondary_tiers")
    return [each for each in tiers if isinstance(each, dict)] if isinstance(tiers, list) else []


def _is_ours(tier: Mapping[str, object]) -> bool:
    return tier.get("type") == TIER


def epoch_of(model: str) -> str:
    """The tier's `epoch` for the connector's `model`: no longer than an epoch may be."""
    return model if len(model) <= EPOCH_CHARACTERS_MAX else hashlib.sha256(model.encode()).hexdigest()
