"""Durability: the promise that an answer to a write makes (docs/guides/durability.md)."""

from __future__ import annotations

from enum import Enum


class Durability(Enum):
    """A `strict` write survives power loss. A `relaxed` write survives the end of the process, and power loss about a
    second later.
    """

    STRICT = "strict"
    RELAXED = "relaxed"
