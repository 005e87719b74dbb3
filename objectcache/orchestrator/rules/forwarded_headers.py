"""The headers of a client's request that go on to an engine. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from objectcache.orchestrator.rules.openai_requests import is_encodable

_NAMING = frozenset({"traceparent", "tracestate", "user-agent", "x-request-id"})
_SENT_ON = frozenset(
    {
        "accept", "accept-language", "anthropic-beta", "anthropic-version", "content-type", "openai-beta",
        "openai-organization", "openai-project", "traceparent", "tracestate", "user-agent",
    }
)  # fmt: skip
"""Engines get these headers of a request. They obey headers of their own: one gives a request a priority, another a
place in the engine.
"""


def forwarded_headers(headers: Mapping[str, str], request_id: str, authorization: str | None) -> dict[str, str]:
    """The headers that an engine gets: those of a client that mean the same everywhere, and our own."""
    kept = {name: value for name, value in headers.items() if name.lower() in _SENT_ON and is_encodable(value)}
    kept["X-Request-Id"] = request_id
    if authorization is not None and is_encodable(authorization):
        kept["Authorization"] = authorization
    return kept


def scope_of(forwarded: Mapping[str, str]) -> str:
    """The headers that an engine may answer by: all that it gets, but those that only name a request or a client."""
    deciding = sorted((name.lower(), value) for name, value in forwarded.items() if name.lower() not in _NAMING)
    return json.dumps(deciding)
