"""Cross-origin requests of browsers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ANY_ORIGIN = "*"
EXPOSED = "x-objectcache-engine, x-objectcache-request-id, Retry-After"
MAX_AGE_S = 600


def answer_headers(origins: Sequence[str], headers: Mapping[str, str]) -> dict[str, str]:
    """The headers with which a browser gives an answer to the page that asked; none where its origin may not have it.
    `headers` are the request's. Credentials are keys that the page sends by itself, so no cookies are allowed.
    """
    origin = headers.get("Origin")
    if not origins or origin is None:
        return {}
    if ANY_ORIGIN in origins:
        return {"Access-Control-Allow-Origin": ANY_ORIGIN, "Access-Control-Expose-Headers": EXPOSED}
    found = {"Vary": "Origin"}
    if origin in origins:
        found |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
    return found


def preflight_headers(origins: Sequence[str], method: str, headers: Mapping[str, str]) -> dict[str, str] | None:
    """The headers that answer a browser's question whether a page may ask; None where this is no such question, or the
    page may not.
    """
    if method != "OPTIONS" or "Access-Control-Request-Method" not in headers:
        return None
    found = answer_headers(origins, headers)
    if "Access-Control-Allow-Origin" not in found:
        return None
    wanted = headers.get("Access-Control-Request-Headers", "")
    is_plain = wanted.isascii() and wanted.isprintable()
    return {
        **found,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": wanted if wanted and is_plain else "Authorization, Content-Type",
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
