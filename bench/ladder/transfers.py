"""The bytes of the path figures: chunks side by side in one buffer, put from there and fetched into it.

A buffer is cut into as many consecutive parts as requests may be in flight. Where a request moves one object, or many
in chunk-major order, object i lies at i times its size; in layer-major order that holds for the parts, and inside a
part the layers follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.content import Bytes, Content, make_content, verify_payload
from bench.ladder.blocks import even_parts
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout


@dataclass(frozen=True, slots=True)
class Work:
    """Objects to move, their keys, and the buffer they move from or into."""

    keys: Sequence[str]
    content: Content
    buffer: Bytes

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S."""
        return self.content.layout

    @property
    def nbytes(self) -> int:
        """All objects' bytes."""
        return self.layout.payload_bytes(len(self.keys))

    def parts(self, in_flight: int) -> list[range]:
        """Which objects go together where `in_flight` requests move all of them."""
        return even_parts(len(self.keys), in_flight)

    def part_bytes(self, part: range) -> Bytes:
        """A part's bytes in the buffer."""
        size = self.layout.chunk_bytes
        return self.buffer[part.start * size : part.stop * size]


def make_work(prefix: str, layout: ChunkLayout, count: int, buffer: Bytes, seed: int) -> Work:
    """Seeded objects under keys that start with `prefix`."""
    keys = [f"{prefix}{number:06d}" for number in range(count)]
    return Work(keys, make_content(count, layout, seed), buffer)


def clear(work: Work) -> None:
    """Nothing of an earlier run may pass for this one's bytes."""
    work.buffer[: work.nbytes].fill(0)


def place(work: Work, in_flight: int, delivery: Delivery) -> None:
    """Lay the objects out in the buffer, ready to be put in that order."""
    layout = work.layout
    for part in work.parts(in_flight):
        objects = np.stack([work.content.chunk(index) for index in part])
        slices = objects.reshape(len(part), layout.num_layers, layout.per_layer_chunk_bytes)
        ordered = slices.transpose(1, 0, 2) if delivery is Delivery.LAYER_MAJOR else slices
        work.part_bytes(part)[:] = ordered.reshape(-1)


def verify(work: Work, in_flight: int, delivery: Delivery) -> None:
    """Compare every byte that was fetched. Raises VerificationError."""
    for part in work.parts(in_flight):
        verify_payload(work.part_bytes(part), part_of(work.content, part), delivery)


def part_of(content: Content, part: range) -> Content:
    """The content of some consecutive chunks alone."""
    base = content.base[:, part.start * content.stamps.shape[2] :]
    return Content(content.layout, len(part), base, content.stamps[:, part.start : part.stop])
