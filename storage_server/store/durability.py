"""What an answer to a write promises (docs/durability.md)."""

from __future__ import annotations

from enum import Enum


class Durability(Enum):
    """`strict` survives power loss, `relaxed` the end of the process; relaxed is made strict every second."""

    STRICT = "strict"
    RELAXED = "relaxed"
