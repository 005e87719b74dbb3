"""The page that people look at: `GET /_objectcache/` and the files that it is made of. They are public, and hold
nothing of what is stored: the page asks `/_objectcache/status` with the key or the token that a person types in.
"""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from descriptors.headers import SERVICE_PREFIX

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_NAMES = {"": "status.html"} | {name: name for name in ("status.js", "sigv4.js", "status.css", "icon.svg")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""The page loads nothing of others, and others cannot put it into a frame."""


class Pages:
    """The page of one gateway, which signs for its `region`."""

    def __init__(self, region: str) -> None:
        self._files = {name: files(__name__).joinpath(file).read_bytes() for name, file in _NAMES.items()}
        self._files[""] = self._files[""].replace(b"@REGION@", html.escape(region).encode())

    def find(self, method: str, bucket: str, key: str) -> web.Response | None:
        """The page or one of its files; None where the request asks for something else."""
        if method not in ("GET", "HEAD") or bucket != SERVICE_PREFIX or key not in self._files:
            return None
        kind = _TYPES[Path(_NAMES[key]).suffix]
        return web.Response(body=self._files[key], content_type=kind, charset="utf-8", headers=HEADERS)
