"""How a generation of a journal goes on from the one before, so that whoever has read that one need not read all again.
Pure.

    journal-1   …900 bytes…|abc|de       succession-2   generation 1, position 900, front 500
    journal-2   …500 bytes…|abc|de

The front of a new generation shows what the one before showed up to `position`; behind that both have the same bytes.
A reader that was at 903 goes on at 503, and reads the 503 bytes beside all else: only for what they leave out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

SUCCESSION_BYTES_MAX = 512


@dataclass(frozen=True, slots=True)
class Succession:
    """The generation before, and where its bytes go on."""

    generation: int
    position: int
    front: int

    def encoded(self) -> bytes:
        """As it stands in its file."""
        return json.dumps(asdict(self)).encode()

    def place(self, generation: int, position: int, size: int) -> int | None:
        """Where a reader goes on in the new generation, of `size` bytes, that has read another one up to `position`;
        None where it has to read all.
        """
        if generation != self.generation or position < self.position:
            return None
        place = self.front + position - self.position
        return place if place <= size else None


def decoded_succession(data: bytes) -> Succession | None:
    """None for what makes no sense."""
    try:
        fields = json.loads(data[:SUCCESSION_BYTES_MAX])
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    values = [fields.get(name) for name in ("generation", "position", "front")]
    if any(type(value) is not int or not 0 < value < 1 << 62 for value in values):
        return None
    return Succession(*(int(value) for value in values if value is not None))
