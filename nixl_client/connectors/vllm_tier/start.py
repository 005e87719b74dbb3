"""A tier, and a connector that shares its objects, says when an engine starts whether the store is there, with whom the
engine shares, and whether the others hash as it does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from descriptors.errors import ErrorCode, ObjectCacheError
from nixl_client.client import Client
from nixl_client.connectors.startup import say
from nixl_client.connectors.vllm_tier.rules.naming import TierSpace

ABOUT_BYTES_MAX = 4096
_log = logging.getLogger(__name__)


def introduce(client: Client, space: TierSpace, hashing: str, then: Callable[[], None] = lambda: None) -> None:
    """Look at the store, and `then` go on if it is there. Raises nothing."""
    try:
        shared = f"shared with all engines of {client.bucket}/{space.prefix}"
        if say(client, shared):
            _compare(client, space, hashing)
            then()
    except Exception as error:
        _log.warning("the store is not looked at: %s", error)


def _compare(client: Client, space: TierSpace, hashing: str) -> None:
    """Engines whose hashes differ share nothing and do not notice: tell them."""
    if not hashing:
        return
    path = f"/{client.bucket}/{space.about}"
    try:
        body = client.http.request("GET", path, bytes_max=ABOUT_BYTES_MAX).body
        said = json.loads(body).get("hashing")
    except (ValueError, AttributeError, RecursionError):  # another tenant may have written it
        return
    except ObjectCacheError as error:
        if error.code is ErrorCode.NO_SUCH_KEY:
            client.http.request("PUT", path, body=json.dumps({"hashing": hashing}).encode())
        return
    if said != hashing:
        _log.warning(
            "other engines of this model hash blocks by %r, this one by %r: they share nothing. Give all the same"
            " PYTHONHASHSEED and --prefix-caching-hash-algo",
            said,
            hashing,
        )
