"""The wishes about a request's KV in its `kv_transfer_params`, as vLLM's own offloading reads them:

    {"max_load_tokens": 4096, "max_offload_tokens": 0, "kv_load_tiers": [{"medium": "STORAGE", "locality": "REMOTE"}]}

A wish that makes no sense is none: it is never a reason to refuse a request.
"""

from __future__ import annotations

from dataclasses import dataclass

STORE = {"medium": "STORAGE", "locality": "REMOTE"}
"""A store, in the words of vLLM's tiers."""
_KNOWN = {"medium": {"CPU", "STORAGE"}, "locality": {"LOCAL", "REMOTE"}}


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """At most `load_tokens` are loaded beyond those that the engine holds, and only KV of the request's first
    `store_tokens` is stored. None: no limit.
    """

    load_tokens: int | None = None
    store_tokens: int | None = None


NO_LIMITS = TransferLimits()


def transfer_limits(kv_transfer_params: object) -> TransferLimits:
    """The limits that a request comes with."""
    if not isinstance(kv_transfer_params, dict):
        return NO_LIMITS
    load_tokens = _count(kv_transfer_params.get("max_load_tokens"))
    if not _allows_store(kv_transfer_params.get("kv_load_tiers")):
        load_tokens = 0
    return TransferLimits(load_tokens, _count(kv_transfer_params.get("max_offload_tokens")))


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _allows_store(tiers: object) -> bool:
    """Whether a request that names the tiers it loads from has named the store. An empty list names none; entries that
    are no tiers do not count, and where no other is left all tiers are meant.
    """
    if not isinstance(tiers, list):
        return True
    named = [each for each in map(_tier, tiers) if each is not None]
    if not named:
        return bool(tiers)
    return any(all(STORE[name] == value for name, value in each.items()) for each in named)


def _tier(entry: object) -> dict[str, str] | None:
    """The medium and the locality that an entry names; None where vLLM does not know what it names."""
    if not isinstance(entry, dict):
        return None
    said = {name: entry[name] for name in _KNOWN if entry.get(name) is not None}
    words = {name: value.upper() for name, value in said.items() if isinstance(value, str)}
    is_known = len(words) == len(said) and all(word in _KNOWN[name] for name, word in words.items())
    return words if is_known else None
