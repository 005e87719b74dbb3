"""Pages that people look at. They are public and hold nothing of what is stored: a page asks for a status with the key
or the token that a person types in. The first file is the page itself, and all pages share a style sheet, an icon and
`view.js`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from aiohttp import web

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_SHARED = ("view.js", "page.css", "icon.svg")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""A page loads nothing of others, and others cannot put it into a frame."""


class Pages:
    """One page, by the names of its files. In its HTML `@NAME@` stands for a value of `values`."""

    def __init__(self, folder: Traversable, names: Sequence[str], values: Mapping[str, str] | None = None) -> None:
        page, *others = names
        text = folder.joinpath(page).read_text()
        for name, value in (values or {}).items():
            text = text.replace(f"@{name}@", html.escape(value))
        self._files = {"": (text.encode(), _TYPES[PurePath(page).suffix])}
        found = [(name, folder) for name in others] + [(name, files(__name__)) for name in _SHARED]
        self._files |= {
            name: (place.joinpath(name).read_bytes(), _TYPES[PurePath(name).suffix]) for name, place in found
        }

    def find(self, method: str, name: str) -> web.Response | None:
        """The page (its name is empty) or one of its files; None where the request asks for something else."""
        if method not in ("GET", "HEAD") or name not in self._files:
            return None
        body, kind = self._files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)
