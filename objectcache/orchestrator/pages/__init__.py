"""The orchestrator's page for people, `GET /_orchestrator/`: engines, queues, and each decision with its terms."""

from __future__ import annotations

from importlib.resources import files

from objectcache.adapters.pages import Pages


def status_pages() -> Pages:
    """The page and its files."""
    return Pages(files(__name__), ("status.html", "status.js"))
