"""The I/O plan of one descriptor: which bytes of which chunks make up each payload. Pure arithmetic.

Both modes are the same plan over different groups. Layer-major: L groups (layers) of k slices of S bytes.
Chunk-major: one group of k slices of L*S bytes. A payload never crosses a group, holds whole slices where at least one
fits in `aggregation_bytes`, and otherwise a piece of one slice. (ObjectCache paper, section 3.3 and Table A7.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from descriptors.layout import ChunkLayout
from descriptors.notices import Mode


@dataclass(frozen=True, slots=True)
class Payload:
    """`chunk_count` pieces of `piece_bytes`, one from each chunk from `first_chunk` on, each read from
    `source_offset` of its chunk object; they land one after the other from `target_offset` of the payload.
    """

    group_index: int
    first_chunk: int
    chunk_count: int
    source_offset: int
    piece_bytes: int
    target_offset: int
    ends_group: bool

    @property
    def nbytes(self) -> int:
        """Bytes of this payload."""
        return self.chunk_count * self.piece_bytes


@dataclass(frozen=True, slots=True)
class PayloadSizes:
    """The bytes of a group's payloads, in order: `run_count` runs of `run_length`, of `nbytes` each but the last one of
    a run.
    """

    nbytes: int
    last_bytes: int
    run_length: int
    run_count: int

    def __len__(self) -> int:
        return self.run_length * self.run_count

    def __getitem__(self, index: int) -> int:
        return self.nbytes if (index + 1) % self.run_length else self.last_bytes


@dataclass(frozen=True, slots=True)
class DeliveryPlan:
    """Payloads of one delivery, in sending order."""

    mode: Mode
    group_count: int
    chunk_count: int
    slice_bytes: int
    aggregation_bytes: int

    @property
    def group_bytes(self) -> int:
        """Bytes of one group: a layer, or the whole payload in chunk-major."""
        return self.chunk_count * self.slice_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of all groups: k*L*S."""
        return self.group_count * self.group_bytes

    @property
    def payload_count(self) -> int:
        """How many payloads `payloads` yields."""
        if self.slice_bytes <= self.aggregation_bytes:
            per_payload = self.aggregation_bytes // self.slice_bytes
            return self.group_count * -(-self.chunk_count // per_payload)
        return self.group_count * self.chunk_count * -(-self.slice_bytes // self.aggregation_bytes)

    @property
    def group_sizes(self) -> PayloadSizes:
        """The sizes of the payloads of one group, the same for each."""
        if self.slice_bytes <= self.aggregation_bytes:
            full = self.aggregation_bytes // self.slice_bytes * self.slice_bytes
            count = -(-self.group_bytes // full)
            return PayloadSizes(full, self.group_bytes - (count - 1) * full, count, 1)
        count = -(-self.slice_bytes // self.aggregation_bytes)
        last_bytes = self.slice_bytes - (count - 1) * self.aggregation_bytes
        return PayloadSizes(self.aggregation_bytes, last_bytes, count, self.chunk_count)

    def payloads(self) -> Iterator[Payload]:
        """Group after group; within a group in prefix order."""
        for group in range(self.group_count):
            if self.slice_bytes <= self.aggregation_bytes:
                yield from self._whole_slices(group)
            else:
                yield from self._pieces(group)

    def _whole_slices(self, group: int) -> Iterator[Payload]:
        per_payload = self.aggregation_bytes // self.slice_bytes
        for first in range(0, self.chunk_count, per_payload):
            count = min(per_payload, self.chunk_count - first)
            yield Payload(
                group_index=group,
                first_chunk=first,
                chunk_count=count,
                source_offset=group * self.slice_bytes,
                piece_bytes=self.slice_bytes,
                target_offset=group * self.group_bytes + first * self.slice_bytes,
                ends_group=first + count == self.chunk_count,
            )

    def _pieces(self, group: int) -> Iterator[Payload]:
        for chunk in range(self.chunk_count):
            for start in range(0, self.slice_bytes, self.aggregation_bytes):
                nbytes = min(self.aggregation_bytes, self.slice_bytes - start)
                yield Payload(
                    group_index=group,
                    first_chunk=chunk,
                    chunk_count=1,
                    source_offset=group * self.slice_bytes + start,
                    piece_bytes=nbytes,
                    target_offset=group * self.group_bytes + chunk * self.slice_bytes + start,
                    ends_group=chunk + 1 == self.chunk_count and start + nbytes == self.slice_bytes,
                )


def plan_delivery(mode: Mode, layout: ChunkLayout, chunk_count: int, aggregation_bytes: int) -> DeliveryPlan:
    """The plan for k = `chunk_count` chunks."""
    if mode is Mode.LAYER_MAJOR:
        return DeliveryPlan(mode, layout.num_layers, chunk_count, layout.per_layer_chunk_bytes, aggregation_bytes)
    return DeliveryPlan(mode, 1, chunk_count, layout.chunk_bytes, aggregation_bytes)
