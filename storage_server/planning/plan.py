"""The I/O plan of one descriptor: which bytes of which chunks make up each payload. Pure arithmetic.

Both modes are the same plan over different groups. Layer-major: L groups (layers) of k slices. Chunk-major: one group
of k slices, each a whole chunk. A payload never crosses a group, and its bytes land in one piece. A payload holds whole
slices where at least one slice fits in `payload_bytes_max`, otherwise a piece of one slice. (ObjectCache paper, section
3.3 and Table A7.)

    A chunk of 2 layers with S = 3; k = 4; payload_bytes_max = 6; layer-major:

    chunks    0aaabbb  1aaabbb  2aaabbb  3aaabbb      a: layer 0, b: layer 1
    payloads  0aaa1aaa  2aaa3aaa | 0bbb1bbb  2bbb3bbb

Slices may differ in size and may lie apart in the target: a `Series` says how they lie. `plan_delivery` makes the plan
of an ordinary delivery, whose L layers are one series with one size S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from descriptors.descriptor import Portion
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Group:
    """The payloads between two "ready" notices: those of one layer, or all. The group has `nbytes` bytes, the first of
    them at `target_offset` of the target.
    """

    index: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Bytes of `chunk_count` chunks from `first_chunk` on: `piece_bytes` of each, from `source_offset` of its object.
    `piece_bytes` and `source_offset` are one number where all chunks have the same, else int64 of shape (chunk_count,).
    The pieces land one after the other from `target_offset` of the target, or where `landing_offsets`, from there on,
    says: int64 of shape (chunk_count,), ascending from 0. Then other bytes of the target lie between them. With
    `write_offsets` instead, the pieces are gathered one after the other, and then written to these places.
    """

    group: Group
    first_chunk: int
    chunk_count: int
    source_offset: int | Numbers
    piece_bytes: int | Numbers
    target_offset: int
    nbytes: int
    ends_group: bool
    landing_offsets: Numbers | None = None
    write_offsets: Numbers | None = None

    def written_runs(self) -> list[tuple[int, int]]:
        """Offset in the target, and bytes, of the runs that the payload is written to, in its order."""
        if self.write_offsets is None:
            return [(self.target_offset, self.nbytes)]
        offsets = self.write_offsets
        sizes = np.broadcast_to(np.asarray(self.piece_bytes, dtype=np.int64), offsets.shape)
        starts = np.flatnonzero(np.concatenate(([True], offsets[:-1] + sizes[:-1] != offsets[1:])))
        runs = zip(
            (self.target_offset + offsets[starts]).tolist(), np.add.reduceat(sizes, starts).tolist(), strict=True
        )
        return list(runs)

    def piece_starts(self, piece_index: Numbers) -> Numbers:
        """The byte, from `target_offset` on, at which each of these pieces starts; piece 0 is that of `first_chunk`."""
        if self.landing_offsets is not None:
            return self.landing_offsets[piece_index]
        if isinstance(self.piece_bytes, int):
            return piece_index * self.piece_bytes
        return (np.cumsum(self.piece_bytes) - self.piece_bytes)[piece_index]

    def chunk_at(self, at: int) -> int:
        """The index of the chunk whose piece has the byte that is `at` bytes after `target_offset`."""
        if self.landing_offsets is not None:
            return self.first_chunk + int(np.searchsorted(self.landing_offsets, at, side="right")) - 1
        if isinstance(self.piece_bytes, int):
            return self.first_chunk + at // self.piece_bytes
        return self.first_chunk + int(np.searchsorted(np.cumsum(self.piece_bytes), at, side="right"))


class Cut(NamedTuple):
    """The part of a group that one payload brings: `slice_count` whole slices from `first_slice` on, or `nbytes` of one
    slice from its byte `start`. It lands at `target_offset` for the first group of its series, its slices apart where
    `is_scattered`.
    """

    first_slice: int
    slice_count: int
    start: int
    nbytes: int
    target_offset: int
    is_scattered: bool = False


class Cuts(Protocol):
    """The payloads of a group, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Cut: ...


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """`group_count` groups, one after the other, whose slices have the same sizes: all layers of an ordinary model, the
    layers of one kind in a hybrid model, or a single layer where a codec gives each slice its own length.

    The slices are those of `slice_count` chunks from `first_chunk` on. Slice i of the first group is `slice_bytes` of
    its object from `source_offset` on, and lands at `target_offset`. In each further group both offsets grow by their
    stride. `slice_bytes` and `source_offset` are one number, or int64 of shape (slice_count,). So is `target_offset`,
    but there one number means that the slices land one after the other from it. Where they land apart, a payload holds
    the slices that lie side by side; with `is_scattered` it may hold any, as far as they fit. `source_stride`, too, is
    one number or an array.

    Raises ValueError for arrays of another length, and for a slice without bytes.
    """

    group_count: int
    first_chunk: int
    slice_count: int
    slice_bytes: int | Numbers
    source_offset: int | Numbers
    source_stride: int | Numbers
    target_offset: int | Numbers
    target_stride: int
    is_scattered: bool = False

    def __post_init__(self) -> None:
        for name in ("slice_bytes", "source_offset", "source_stride", "target_offset"):
            value = getattr(self, name)
            if not isinstance(value, int) and value.shape != (self.slice_count,):
                raise ValueError(f"{name} has shape {value.shape}, not ({self.slice_count},)")
        if np.min(self.slice_bytes) < 1:
            raise ValueError("a slice has no bytes")

    @property
    def group_bytes(self) -> int:
        """The bytes of one group."""
        if isinstance(self.slice_bytes, int):
            return self.slice_count * self.slice_bytes
        return int(self.slice_bytes.sum())

    @property
    def first_target_offset(self) -> int:
        """The target offset at which the first slice of the first group lands."""
        return self.target_offset if isinstance(self.target_offset, int) else int(self.target_offset[0])

    def cuts(self, payload_bytes_max: int) -> Cuts:
        """The payloads of one group."""
        if isinstance(self.slice_bytes, int) and isinstance(self.target_offset, int):
            return _EvenCuts(self.slice_count, self.slice_bytes, self.target_offset, payload_bytes_max)
        sizes = np.broadcast_to(np.asarray(self.slice_bytes, dtype=np.int64), (self.slice_count,))
        targets = self.target_offset
        if isinstance(targets, int):
            targets = targets + np.cumsum(sizes) - sizes
        if self.is_scattered:
            return _scattered_cuts(sizes, targets, payload_bytes_max)
        return _uneven_cuts(sizes, targets, payload_bytes_max)


@dataclass(frozen=True, slots=True)
class _EvenCuts:
    """Cuts of slices of one size that lie side by side in the target. They are computed on access, as there may be
    millions.
    """

    slice_count: int
    slice_bytes: int
    target_offset: int
    payload_bytes_max: int

    def __len__(self) -> int:
        if self.slice_bytes <= self.payload_bytes_max:
            return -(-self.slice_count // (self.payload_bytes_max // self.slice_bytes))
        return self.slice_count * -(-self.slice_bytes // self.payload_bytes_max)

    def __getitem__(self, index: int) -> Cut:
        if self.slice_bytes <= self.payload_bytes_max:
            per_payload = self.payload_bytes_max // self.slice_bytes
            first = index * per_payload
            count = min(per_payload, self.slice_count - first)
            return Cut(first, count, 0, count * self.slice_bytes, self.target_offset + first * self.slice_bytes)
        slice_index, piece = divmod(index, -(-self.slice_bytes // self.payload_bytes_max))
        start = piece * self.payload_bytes_max
        nbytes = min(self.payload_bytes_max, self.slice_bytes - start)
        return Cut(slice_index, 1, start, nbytes, self.target_offset + slice_index * self.slice_bytes + start)


def _uneven_cuts(sizes: Numbers, targets: Numbers, payload_bytes_max: int) -> list[Cut]:
    """Cuts of slices of any size: each payload takes as many whole slices as fit and lie side by side in the target."""
    ends = np.cumsum(sizes)
    gaps = np.flatnonzero(targets[:-1] + sizes[:-1] != targets[1:]) + 1
    cuts: list[Cut] = []
    first, slice_count = 0, len(sizes)
    while first < slice_count:
        before = int(ends[first - 1]) if first else 0
        gap = int(np.searchsorted(gaps, first, side="right"))
        side_by_side = int(gaps[gap]) if gap < len(gaps) else slice_count
        after = min(int(np.searchsorted(ends, before + payload_bytes_max, side="right")), side_by_side)
        target = int(targets[first])
        if after > first:
            cuts.append(Cut(first, after - first, 0, int(ends[after - 1]) - before, target))
            first = after
            continue
        size = int(sizes[first])
        cuts += [
            Cut(first, 1, start, min(payload_bytes_max, size - start), target + start)
            for start in range(0, size, payload_bytes_max)
        ]
        first += 1
    return cuts


def _scattered_cuts(sizes: Numbers, targets: Numbers, payload_bytes_max: int) -> list[Cut]:
    """Cuts of slices that lie anywhere, in ascending order: each payload takes as many whole slices as fit."""
    ends = np.cumsum(sizes)
    cuts: list[Cut] = []
    for cut in _uneven_cuts(sizes, ends - sizes, payload_bytes_max):
        last = cut.first_slice + cut.slice_count - 1
        target, side_by_side = int(targets[cut.first_slice]), int(ends[last] - sizes[last] - ends[cut.first_slice])
        is_scattered = int(targets[last]) - target != side_by_side + int(sizes[cut.first_slice])
        cuts.append(cut._replace(target_offset=target + cut.start, is_scattered=is_scattered and cut.slice_count > 1))
    return cuts


class PayloadSizes(Protocol):
    """The bytes of each payload of a group, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class _CutSizes:
    cuts: Cuts

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> int:
        return self.cuts[index].nbytes


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The bytes of a group: the sum, and the size of each payload."""

    nbytes: int
    payloads: PayloadSizes


@dataclass(frozen=True)
class DeliveryPlan:
    """The payloads of one delivery, in sending order: series after series."""

    mode: Mode
    chunk_count: int
    series: tuple[Series, ...]
    payload_bytes_max: int
    first_group: int = 0
    """The index of the first group: more than 0 where another server has delivered the layers before."""
    gathers_packed: bool = False
    """Whether slices that lie apart in the target are gathered one after the other, and written apart then."""

    @property
    def group_count(self) -> int:
        """Layers, or 1 in chunk-major mode."""
        return sum(each.group_count for each in self.series)

    @cached_property
    def delivery_bytes(self) -> int:
        """W: the bytes of all groups."""
        return sum(each.group_count * each.group_bytes for each in self.series)

    @property
    def payload_count(self) -> int:
        """How many payloads `payloads` yields."""
        return sum(each.group_count * len(cuts) for each, cuts in zip(self.series, self._cuts, strict=True))

    @property
    def group_sizes(self) -> list[GroupSizes]:
        """The sizes of each group's payloads."""
        sizes: list[GroupSizes] = []
        for each, cuts in zip(self.series, self._cuts, strict=True):
            sizes += [GroupSizes(each.group_bytes, _CutSizes(cuts))] * each.group_count
        return sizes

    def payloads(self) -> Iterator[Payload]:
        """All payloads, group after group; within a group in prefix order."""
        first_group = self.first_group
        for each, cuts in zip(self.series, self._cuts, strict=True):
            cut_count, group_bytes = len(cuts), each.group_bytes
            for step in range(each.group_count):
                target = step * each.target_stride
                group = Group(first_group + step, each.first_target_offset + target, group_bytes)
                for index in range(cut_count):
                    ends_group = index + 1 == cut_count
                    payload = _payload(each, cuts[index], group, step, ends_group=ends_group)
                    if self.gathers_packed and payload.landing_offsets is not None:
                        payload = replace(payload, landing_offsets=None, write_offsets=payload.landing_offsets)
                    yield payload
            first_group += each.group_count

    @cached_property
    def _cuts(self) -> list[Cuts]:
        return [each.cuts(self.payload_bytes_max) for each in self.series]


def _payload(series: Series, cut: Cut, group: Group, step: int, *, ends_group: bool) -> Payload:
    """The payload of a cut in the series' group number `step`."""
    source, stride, piece = series.source_offset, series.source_stride, series.slice_bytes
    slices = slice(cut.first_slice, cut.first_slice + cut.slice_count)
    if cut.slice_count == 1:
        source = source if isinstance(source, int) else int(source[cut.first_slice])
        stride = stride if isinstance(stride, int) else int(stride[cut.first_slice])
        piece = cut.nbytes
    else:
        source = source if isinstance(source, int) else source[slices]
        stride = stride if isinstance(stride, int) else stride[slices]
        piece = piece if isinstance(piece, int) else piece[slices]
    landing_offsets = None
    if cut.is_scattered and not isinstance(series.target_offset, int):
        landing_offsets = series.target_offset[slices] - cut.target_offset
    return Payload(
        group=group,
        first_chunk=series.first_chunk + cut.first_slice,
        chunk_count=cut.slice_count,
        source_offset=source + step * stride + cut.start,
        piece_bytes=piece,
        target_offset=cut.target_offset + step * series.target_stride,
        nbytes=cut.nbytes,
        ends_group=ends_group,
        landing_offsets=landing_offsets,
    )


def plan_delivery(mode: Mode, layout: ChunkLayout, chunk_count: int, payload_bytes_max: int) -> DeliveryPlan:
    """The plan for k = `chunk_count` chunks of one layout, packed one after the other in the target."""
    group_count, slice_bytes = layout.num_layers, layout.per_layer_chunk_bytes
    if mode is Mode.CHUNK_MAJOR:
        group_count, slice_bytes = 1, layout.chunk_bytes
    series = Series(
        group_count=group_count,
        first_chunk=0,
        slice_count=chunk_count,
        slice_bytes=slice_bytes,
        source_offset=0,
        source_stride=slice_bytes,
        target_offset=0,
        target_stride=chunk_count * slice_bytes,
    )
    return DeliveryPlan(mode, chunk_count, (series,), payload_bytes_max)


@dataclass(frozen=True, slots=True)
class TargetWithGaps:
    """How a destination takes slices that do not fill the target without gaps, because other servers bring the rest, or
    because slices are shorter than their places. With `is_packed` they lie one after the other in the target, without
    gaps; otherwise each lies at its place, and with `is_scattered` one payload may hold slices that lie apart, which
    `gathers_packed` gathers one after the other.
    """

    is_packed: bool
    is_scattered: bool
    gathers_packed: bool = False


def plan_portion(
    mode: Mode, layout: ChunkLayout, portion: Portion, payload_bytes_max: int, landing: TargetWithGaps
) -> DeliveryPlan:
    """The plan for some of the chunks of a delivery, whose other chunks come from other servers. In chunk-major mode,
    which has one group only, `portion.first_layer` does not count.
    """
    group_count, slice_bytes, first = layout.num_layers, layout.per_layer_chunk_bytes, portion.first_layer
    if mode is Mode.CHUNK_MAJOR:
        group_count, slice_bytes, first = 1, layout.chunk_bytes, 0
    slice_count, source_offset = len(portion.positions), first * slice_bytes
    target_offset: int | Numbers = 0
    target_stride = slice_count * slice_bytes
    if not landing.is_packed:
        target_stride = portion.chunk_count * slice_bytes
        target_offset = np.array(portion.positions, dtype=np.int64) * slice_bytes + first * target_stride
    series = Series(
        group_count=group_count - first,
        first_chunk=0,
        slice_count=slice_count,
        slice_bytes=slice_bytes,
        source_offset=source_offset,
        source_stride=slice_bytes,
        target_offset=target_offset,
        target_stride=target_stride,
        is_scattered=landing.is_scattered,
    )
    return DeliveryPlan(
        mode=mode,
        chunk_count=slice_count,
        series=(series,),
        payload_bytes_max=payload_bytes_max,
        first_group=first,
        gathers_packed=landing.gathers_packed,
    )


def placed_order(places: Sequence[int]) -> Numbers | None:
    """The indexes of chunks in the order of their places; None where they are in that order."""
    order = np.argsort(np.array(places, dtype=np.int64), kind="stable")
    return None if (order == np.arange(len(order))).all() else order


def plan_placed(
    layout: ChunkLayout, places: Sequence[int], payload_bytes_max: int, landing: TargetWithGaps
) -> DeliveryPlan:
    """The plan for whole chunks of which each has its place in the target, in the order of their places."""
    series = Series(
        group_count=1,
        first_chunk=0,
        slice_count=len(places),
        slice_bytes=layout.chunk_bytes,
        source_offset=0,
        source_stride=layout.chunk_bytes,
        target_offset=np.sort(np.array(places, dtype=np.int64)),
        target_stride=0,
        is_scattered=landing.is_scattered,
    )
    return DeliveryPlan(
        Mode.CHUNK_MAJOR, len(places), (series,), payload_bytes_max, gathers_packed=landing.gathers_packed
    )


def plan_encoded(
    mode: Mode, layout: ChunkLayout, layer_bytes: Numbers, payload_bytes_max: int, landing: TargetWithGaps
) -> DeliveryPlan:
    """The plan for chunks of which some are encoded: a layer of chunk i takes `layer_bytes[i]` <= S, and its object has
    layer after layer. The place of a slice in the target is that of the exact one.
    """
    group_count, place_bytes, sizes = layout.num_layers, layout.per_layer_chunk_bytes, layer_bytes
    if mode is Mode.CHUNK_MAJOR:
        group_count, place_bytes, sizes = 1, layout.chunk_bytes, layer_bytes * layout.num_layers
    slice_count = len(sizes)
    target_offset: int | Numbers = 0
    target_stride = int(sizes.sum())
    if not landing.is_packed:
        target_offset, target_stride = np.arange(slice_count) * place_bytes, slice_count * place_bytes
    series = Series(
        group_count=group_count,
        first_chunk=0,
        slice_count=slice_count,
        slice_bytes=sizes,
        source_offset=0,
        source_stride=sizes,
        target_offset=target_offset,
        target_stride=target_stride,
        is_scattered=landing.is_scattered,
    )
    return DeliveryPlan(mode, slice_count, (series,), payload_bytes_max, gathers_packed=landing.gathers_packed)
