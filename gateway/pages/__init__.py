"""The gateway's page for people, `GET /_objectcache/`: what is cached, deliveries and errors."""

from __future__ import annotations

from importlib.resources import files

from objectcache.adapters.pages import Pages


def status_pages(region: str) -> Pages:
    """The page and its files; it signs for this region."""
    return Pages(files(__name__), ("status.html", "status.js", "sigv4.js"), {"REGION": region})
