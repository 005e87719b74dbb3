"""What compaction decides, with every rule as a property."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.kernel.rules.compaction_plan import (
    ROWS_MAX,
    LiveExtent,
    Rules,
    SegmentUse,
    aligned,
    layout,
    plan,
    steps,
)
from storage_server.planning.extent import ALIGNMENT_BYTES, Extent

MIB = 1 << 20
PASSES_MAX = 12


def use(name: str, *, extents: int, live: int, file: int | None = None, version: int = 0) -> SegmentUse:
    return SegmentUse(name, live if file is None else file, live, extents, extents, version)


RULES = Rules(0.5, 256, 512 * MIB)


@st.composite
def some_uses(draw: st.DrawFn) -> list[SegmentUse]:
    made = []
    for index in range(draw(st.integers(0, 60))):
        extents = draw(st.integers(1, 256))
        live = extents * ALIGNMENT_BYTES * draw(st.integers(1, 512))
        dead = ALIGNMENT_BYTES * draw(st.one_of(st.just(0), st.integers(0, 4 * live // ALIGNMENT_BYTES)))
        rows = extents + draw(st.sampled_from((0, 0, 0, 7, ROWS_MAX)))
        made.append(SegmentUse(f"{index:032x}", live + dead, live, extents, rows, draw(st.integers(0, 1000))))
    return made


fractions = st.floats(0, 0.99)


@pytest.mark.slow
@given(uses=some_uses(), fraction=fractions)
def test_jobs_take_what_is_worth_it_once_and_never_overfill_a_segment(uses: list[SegmentUse], fraction: float) -> None:
    """CASCADE's bound of 256 extents a file holds for what compaction writes, too."""
    rules = replace(RULES, live_fraction_max=fraction)
    known = {one.file_id: one for one in uses}
    jobs = plan(uses, rules)
    named = [name for job in jobs for name in job]
    assert len(named) == len(set(named))
    for job in jobs:
        members = [known[name] for name in job]
        assert all(rules.is_sparse(one) or rules.is_small(one) for one in members)
        assert sum(one.extent_count for one in members) <= rules.extents_max
        assert sum(one.live_bytes for one in members) <= rules.bytes_max
        assert sum(one.row_count for one in members) <= ROWS_MAX
        versions = [one.first_version for one in members]
        assert versions == sorted(versions)


@pytest.mark.slow
@given(uses=some_uses(), fraction=fractions)
def test_what_is_only_small_is_moved_for_twice_its_size_at_least(uses: list[SegmentUse], fraction: float) -> None:
    """So no extent is moved again and again because of small neighbours: each time its segment doubles."""
    rules = replace(RULES, live_fraction_max=fraction)
    known = {one.file_id: one for one in uses}
    for job in plan(uses, rules):
        members = [known[name] for name in job]
        total = sum(one.extent_count for one in members)
        assert all(total >= 2 * one.extent_count for one in members if not rules.is_sparse(one))


@pytest.mark.slow
@given(uses=some_uses(), fraction=fractions, order=st.randoms(use_true_random=False))
def test_the_order_of_the_question_does_not_matter(uses: list[SegmentUse], fraction: float, order: object) -> None:
    rules = replace(RULES, live_fraction_max=fraction)
    shuffled = list(uses)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan(shuffled, rules) == plan(uses, rules)


@pytest.mark.slow
@given(uses=some_uses(), fraction=fractions)
def test_compaction_comes_to_an_end_and_leaves_few_small_segments(uses: list[SegmentUse], fraction: float) -> None:
    """Carried out until nothing is left to do: no sparse segment stays, and of small ones about one per doubling."""
    rules = replace(RULES, live_fraction_max=fraction)
    now = {one.file_id: one for one in uses if one.row_count < ROWS_MAX and one.live_bytes <= rules.bytes_max}
    kept_bytes = sum(one.live_bytes for one in now.values())
    for number in range(PASSES_MAX):
        jobs = plan(now.values(), rules)
        if not jobs:
            break
        for index, job in enumerate(jobs):
            now[f"new-{number}-{index}"] = outcome(f"new-{number}-{index}", [now.pop(name) for name in job])
    assert not plan(now.values(), rules)
    assert sum(one.live_bytes for one in now.values()) == kept_bytes
    assert not [one for one in now.values() if rules.is_sparse(one)]
    small = [one for one in now.values() if rules.is_small(one)]
    total_bytes = sum(one.live_bytes for one in small)
    assert len(small) <= 8 * (1 + total_bytes // (rules.bytes_max // 2))


def outcome(name: str, members: list[SegmentUse]) -> SegmentUse:
    live = sum(one.live_bytes for one in members)
    counts = (sum(one.extent_count for one in members), sum(one.row_count for one in members))
    return SegmentUse(name, live, live, *counts, min(one.first_version for one in members))


@pytest.mark.parametrize(
    ("uses", "jobs"),
    [
        ([], []),
        ([use("full", extents=256, live=512 * MIB)], []),
        ([use("half", extents=128, live=256 * MIB, file=512 * MIB)], [("half",)]),
        ([use("over half", extents=129, live=258 * MIB, file=512 * MIB)], []),
        ([use("one small", extents=3, live=MIB)], []),
        ([use("b", extents=3, live=MIB, version=9), use("a", extents=3, live=MIB, version=12)], [("b", "a")]),
        ([use("large", extents=60, live=MIB), use("tiny", extents=1, live=MIB)], []),
        (
            [use("large", extents=60, live=MIB), use("1", extents=1, live=MIB), use("2", extents=1, live=MIB)],
            [("1", "2")],
        ),
        (
            [use("sparse", extents=60, live=MIB, file=9 * MIB, version=5), use("small", extents=50, live=MIB)],
            [("small", "sparse")],
        ),
        ([replace(use("copied", extents=9, live=MIB, file=9 * MIB), row_count=ROWS_MAX + 1)], []),
    ],
    ids=lambda value: "-".join(one.file_id for one in value) if value and isinstance(value[0], SegmentUse) else "",
)
def test_jobs_by_example(uses: list[SegmentUse], jobs: list[tuple[str, ...]]) -> None:
    assert plan(uses, RULES) == jobs


places = st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(1, 50), st.integers(0, 5)), max_size=30).map(
    lambda drawn: [
        LiveExtent(Extent("f", 9 * MIB * index, nbytes, bytes([index]), part * 5 * MIB), version)
        for index, (nbytes, version, part) in enumerate(drawn)
    ]
)


@given(places=places, order=st.randoms(use_true_random=False))
def test_extents_lie_in_the_order_of_versions_without_gaps(places: list[LiveExtent], order: object) -> None:
    """Neighbours in time, and so in a prefix, are neighbours on the disk; each starts where O_DIRECT can read it."""
    shuffled = list(places)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    moves = layout(shuffled)
    assert moves == layout(places)
    version = {place.extent: place.version for place in places}
    assert {move.source for move in moves} == set(version)
    at = 0
    last = (-1, -1)
    for move in moves:
        assert move.offset == at
        at += aligned(move.source.nbytes)
        assert (version[move.source], move.source.object_offset) >= last
        last = (version[move.source], move.source.object_offset)
        target = move.target("new")
        assert (target.nbytes, target.checksums) == (move.source.nbytes, move.source.checksums)


@given(places=places, blocks=st.integers(1, 64))
def test_steps_cover_every_byte_once_in_bounded_pieces(places: list[LiveExtent], blocks: int) -> None:
    """Each piece starts at a checksum block, so that it can be proved alone."""
    moves = layout(places)
    bytes_max = blocks * 16_384
    covered: list[tuple[int, int]] = []
    for spans in steps(moves, bytes_max):
        assert 0 < sum(span.nbytes for span in spans) <= bytes_max
        for span in spans:
            assert span.start % 16_384 == 0
            covered.append((span.move.offset + span.start, span.nbytes))
    expected = [
        (move.offset + start, min(bytes_max, move.source.nbytes - start))
        for move in moves
        for start in range(0, move.source.nbytes, bytes_max)
    ]
    assert covered == expected
