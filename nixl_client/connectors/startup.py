"""A connector says in one line, when an engine starts, whether the store is there."""

from __future__ import annotations

import logging

from nixl_client.client import Client

_log = logging.getLogger(__name__)


def say(client: Client, about: str = "") -> bool:
    """Check the store, and make the bucket as a cache where it is missing. A store that is not there keeps no engine
    from starting: it computes.
    """
    found = client.check()
    if found.is_good:
        _log.info("ObjectCache %s%s", found.text, f"; {about}" if about else "")
    else:
        _log.warning("ObjectCache IS NOT USED until this is mended: %s", found.text)
    return found.is_good
