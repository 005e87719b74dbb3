"""Which segments are rewritten, and where their extents go. Pure; storage_server.store.compaction carries it out.

A segment is rewritten when it is sparse (rows name at most `live_fraction_max` of its bytes), or small (few extents in
few bytes) and others are, too: then they become one. Only whole segments are emptied, into one new one per job.

In the new segment extents lie in the order of their versions, those of one version as in its object. Versions count
commits, so the chunks of a prefix that were stored in order are neighbours again, whatever lay between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage_server.store.extents import Extent
from storage_server.store.segments import ALIGNMENT_BYTES

SMALL_DIVISOR = 4
ROWS_MAX = 4096
"""A segment named by more rows, for its many copies, stays: one transaction moves them all."""


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """What of a segment is in use. `live_bytes` are those of its extents, each counted once and rounded up to
    ALIGNMENT_BYTES; `first_version` is the oldest of the versions that name one.
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
        """Whether rewriting it moves no more than it frees, by the setting's measure."""
        return use.live_bytes <= self.live_fraction_max * use.file_bytes

    def is_small(self, use: SegmentUse) -> bool:
        """Whether it is worth a place in a segment with others."""
        return (
            use.extent_count <= self.extents_max // SMALL_DIVISOR and use.live_bytes <= self.bytes_max // SMALL_DIVISOR
        )


@dataclass(frozen=True, slots=True)
class LivePlace:
    """An extent some row names, and the oldest version that does."""

    extent: Extent
    version: int


@dataclass(frozen=True, slots=True)
class Move:
    """An extent's bytes, and their offset in the new segment."""

    source: Extent
    offset: int

    def target(self, file_id: str) -> Extent:
        """The same bytes in the new segment."""
        return Extent(file_id, self.offset, self.source.nbytes, self.source.checksums, self.source.object_offset)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, start + nbytes) of a moved extent."""

    move: Move
    start: int
    nbytes: int


def aligned(nbytes: int) -> int:
    """What an extent takes up."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan(uses: Iterable[SegmentUse], rules: Rules) -> list[tuple[str, ...]]:
    """The jobs: each the segments that become one, those of neighbouring versions together.

    A small segment that is not sparse is taken along only where the outcome has at least twice its extents. So an
    extent is moved a few times at most for being in small company, and few small segments are left.
    """
    wanted = [use for use in uses if _fits([use], rules) and (rules.is_sparse(use) or rules.is_small(use))]
    groups: list[list[SegmentUse]] = []
    for use in sorted(wanted, key=lambda use: (use.first_version, use.file_id)):
        if groups and _fits([*groups[-1], use], rules):
            groups[-1].append(use)
        else:
            groups.append([use])
    jobs = [_worthwhile(group, rules) for group in groups]
    return [tuple(use.file_id for use in job) for job in jobs if job]


def layout(places: Iterable[LivePlace]) -> list[Move]:
    """Every place, one after the other in the order the module's head gives."""
    moves = []
    offset = 0
    for place in sorted(places, key=_order):
        moves.append(Move(place.extent, offset))
        offset += aligned(place.extent.nbytes)
    return moves


def steps(moves: Iterable[Move], bytes_max: int) -> list[list[Span]]:
    """All bytes of all moves in order, up to `bytes_max` (whole checksum blocks) at a time."""
    made: list[list[Span]] = []
    room = 0
    for move in moves:
        for start in range(0, move.source.nbytes, bytes_max):
            span = Span(move, start, min(bytes_max, move.source.nbytes - start))
            if span.nbytes > room:
                made.append([])
                room = bytes_max
            made[-1].append(span)
            room -= span.nbytes
    return made


def _order(place: LivePlace) -> tuple[int, int, str, int]:
    return (place.version, place.extent.object_offset, place.extent.file_id, place.extent.offset)


def _fits(group: Sequence[SegmentUse], rules: Rules) -> bool:
    return (
        sum(use.extent_count for use in group) <= rules.extents_max
        and sum(use.live_bytes for use in group) <= rules.bytes_max
        and sum(use.row_count for use in group) <= ROWS_MAX
    )


def _worthwhile(group: list[SegmentUse], rules: Rules) -> list[SegmentUse]:
    """The group without segments that are only small, and too large a part of the outcome."""
    left = list(group)
    while dense := [use for use in left if not rules.is_sparse(use)]:
        largest = max(dense, key=lambda use: use.extent_count)
        if sum(use.extent_count for use in left) >= 2 * largest.extent_count:
            break
        left.remove(largest)
    return left
