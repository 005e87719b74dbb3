"""What a peer's process is told and what it answers: values that travel as JSON. Pure.

    N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes

A peer fetches N chunk objects of L*S bytes. Layer-major: every layer's slices of all chunks, layer after layer, into
one contiguous buffer. Chunk-major: the chunks as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.content import Bytes, Content, make_content, verify_slices
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout


@dataclass(frozen=True, slots=True)
class S3Target:
    """An S3 server and the bucket the chunks are in."""

    url: str
    access_key: str
    secret_key: str
    bucket: str
    region: str


@dataclass(frozen=True, slots=True)
class Work:
    """The chunks, in prefix order, and where they are; `s3` is None for a peer that stores them itself.

    `slices_max` bounds the sample that peers take which ask for one slice at a time.
    """

    keys: tuple[str, ...]
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    seed: int
    slices_max: int
    s3: S3Target | None = None

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S as one value."""
        return ChunkLayout(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)

    @property
    def payload_bytes(self) -> int:
        """N*L*S."""
        return self.layout.payload_bytes(len(self.keys))

    def content(self) -> Content:
        """What the chunks hold."""
        return make_content(len(self.keys), self.layout, self.seed)

    def layers_within(self, slices_max: int) -> int:
        """Whole layers of which a sample of that many slices consists: at least one, at most all."""
        return min(self.num_layers, max(1, slices_max // len(self.keys)))

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Work:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        s3 = fields.pop("s3")
        return Work(**{**fields, "keys": tuple(fields["keys"])}, s3=None if s3 is None else S3Target(**s3))


@dataclass(frozen=True, slots=True)
class Capability:
    """One configuration of a peer: `nbytes` is what a run of it moves, `note` what is not obvious about it."""

    name: str
    delivery: Delivery
    nbytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: seconds until everything was there, and until the first layer was, where that can be told.

    `problem` is the first failure or wrong byte; times beside a problem are worth nothing.
    """

    duration_s: float
    first_layer_s: float | None = None
    problem: str | None = None

    def to_line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> Outcome:
        """The inverse of `to_line`."""
        return Outcome(**json.loads(line))


def capabilities_to_line(capabilities: Sequence[Capability]) -> str:
    """One line of JSON."""
    return json.dumps([{**asdict(each), "delivery": each.delivery.value} for each in capabilities])


def capabilities_from_line(line: str) -> list[Capability]:
    """The inverse of `capabilities_to_line`."""
    return [Capability(**{**fields, "delivery": Delivery(fields["delivery"])}) for fields in json.loads(line)]


def verify_first_layers(payload: Bytes, content: Content, layer_count: int) -> None:
    """Compare the first layers of a layer-major payload. Raises VerificationError."""
    layout = content.layout
    layers = payload.reshape(-1, content.chunk_count, layout.per_layer_chunk_bytes)[:layer_count]
    for layer_index, layer in enumerate(layers):
        verify_slices(layer, content, layer_index)
