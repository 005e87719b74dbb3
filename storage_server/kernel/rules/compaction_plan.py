"""The plan of compaction: the segments that are rewritten, and the order of their extents. Pure; the module compaction
carries the plan out.

A segment is rewritten when it is sparse (rows name at most `live_fraction_max` of its bytes). Small segments (few
extents in few bytes) are rewritten together, so that several become one. A job empties whole segments into one new
segment.

In the new segment extents lie in the order of their versions, and those of one version in the order of their object.
Versions count commits. So the chunks of a prefix that were stored in order are neighbours again, even where other
objects lay between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage_server.planning.extent import Extent, aligned

SMALL_DIVISOR = 4
ROWS_MAX = 4096
"""A segment that more rows name, for its many copies, stays as it is, because one transaction moves all rows."""


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """How much of a segment is in use. `live_bytes` are those of its extents, each counted once and rounded up to
    ALIGNMENT_BYTES. `first_version` is the oldest version that names one of them.
    """

    file_id: str
    file_bytes: int
    live_bytes: int
    extent_count: int
    row_count: int
    first_version: int


@dataclass(frozen=True, slots=True)
class Rules:
    """`live_fraction_max` is below 1; a segment holds at most `extents_max` extents in `bytes_max` bytes."""

    live_fraction_max: float
    extents_max: int
    bytes_max: int

    def is_sparse(self, use: SegmentUse) -> bool:
        """Whether at most `live_fraction_max` of the segment is in use."""
        return use.live_bytes <= self.live_fraction_max * use.file_bytes

    def is_small(self, use: SegmentUse) -> bool:
        """Whether the segment is worth joining with others."""
        return (
            use.extent_count <= self.extents_max // SMALL_DIVISOR and use.live_bytes <= self.bytes_max // SMALL_DIVISOR
        )


@dataclass(frozen=True, slots=True)
class LiveExtent:
    """An extent that rows name, and the oldest of their versions."""

    extent: Extent
    version: int


@dataclass(frozen=True, slots=True)
class ExtentMove:
    """An extent's bytes, and their offset in the new segment."""

    source: Extent
    offset: int

    def target(self, file_id: str) -> Extent:
        """The same bytes in the new segment."""
        return Extent(file_id, self.offset, self.source.nbytes, self.source.checksums, self.source.object_offset)


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Bytes [start, start + nbytes) of a moved extent."""

    move: ExtentMove
    start: int
    nbytes: int


def plan(uses: Iterable[SegmentUse], rules: Rules) -> list[tuple[str, ...]]:
    """The jobs. Each job is the segments that become one; segments of neighbouring versions go together.

    A small segment that is not sparse joins only where the outcome has at least twice its extents. So an extent is
    moved only a few times for being in a small segment, and few small segments are left.
    """
    wanted = [use for use in uses if is_candidate(use, rules)]
    groups: list[list[SegmentUse]] = []
    for use in sorted(wanted, key=lambda use: (use.first_version, use.file_id)):
        if groups and _fits([*groups[-1], use], rules):
            groups[-1].append(use)
        else:
            groups.append([use])
    jobs = [_worthwhile(group, rules) for group in groups]
    return [tuple(use.file_id for use in job) for job in jobs if job]


def is_candidate(use: SegmentUse, rules: Rules) -> bool:
    """Whether `plan` may put the segment into a job."""
    return _fits([use], rules) and (rules.is_sparse(use) or rules.is_small(use))


def layout(live: Iterable[LiveExtent]) -> list[ExtentMove]:
    """The new location of every extent, one after the other in the order that the module's head gives."""
    moves = []
    offset = 0
    for each in sorted(live, key=_order):
        moves.append(ExtentMove(each.extent, offset))
        offset += aligned(each.extent.nbytes)
    return moves


def steps(moves: Iterable[ExtentMove], bytes_max: int) -> list[list[CopyStep]]:
    """The bytes of all moves in order, in steps of up to `bytes_max`, cut at checksum blocks."""
    made: list[list[CopyStep]] = []
    space_bytes = 0
    for move in moves:
        for start in range(0, move.source.nbytes, bytes_max):
            span = CopyStep(move, start, min(bytes_max, move.source.nbytes - start))
            if span.nbytes > space_bytes:
                made.append([])
                space_bytes = bytes_max
            made[-1].append(span)
            space_bytes -= span.nbytes
    return made


def _order(live: LiveExtent) -> tuple[int, int, str, int]:
    return (live.version, live.extent.object_offset, live.extent.file_id, live.extent.offset)


def _fits(group: Sequence[SegmentUse], rules: Rules) -> bool:
    return (
        sum(use.extent_count for use in group) <= rules.extents_max
        and sum(use.live_bytes for use in group) <= rules.bytes_max
        and sum(use.row_count for use in group) <= ROWS_MAX
    )


def _worthwhile(group: list[SegmentUse], rules: Rules) -> list[SegmentUse]:
    """The group without small segments that would be too large a part of the outcome."""
    left = list(group)
    while dense := [use for use in left if not rules.is_sparse(use)]:
        largest = max(dense, key=lambda use: use.extent_count)
        if sum(use.extent_count for use in left) >= 2 * largest.extent_count:
            break
        left.remove(largest)
    return left
