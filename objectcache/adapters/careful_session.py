"""Sessions with servers that may be hostile: a member of a cluster, an upstream service, an engine, or etcd.

Anybody who has such a server's address decides what it answers. So a session bounds the answers to one request and
parses them in turns (`adapters.pieces`), unpacks nothing, and keeps no cookies. Requests say `allow_redirects=False`: a
redirect would send a signed call elsewhere, or have this host ask any URL of its network. A test checks both.
"""

from __future__ import annotations

from typing import Any

import aiohttp

from objectcache.adapters.pieces import careful


def careful_session(connector: aiohttp.BaseConnector, **options: Any) -> aiohttp.ClientSession:
    """A session over this connector; `options` are aiohttp's. Called on its event loop."""
    return aiohttp.ClientSession(
        connector=careful(connector), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, **options
    )
