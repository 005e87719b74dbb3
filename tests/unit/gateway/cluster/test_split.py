"""Dividing a prefix among members, and merging what they deliver."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.cluster import Member, View
from descriptors.descriptor import EXTENDED_VERSION, Delivery, Descriptor, OnMissing
from descriptors.layer_forms import EXACT, MERGED_RUNS_MAX, FormRun, LayerForms, LossBasis, WrongFormsError
from descriptors.notices import Mode
from descriptors.placement import Placement
from descriptors.storage_api import DeliveryStart
from descriptors.tiers import Tier, runs_of
from gateway.cluster.forms import merged_forms
from gateway.cluster.merge import Merger, PortionBody, Share, Slices, Window, windows
from gateway.cluster.split import descriptor_of, holdings, holdings_at, matched_of, tiers_of
from gateway.storage_client import StorageUnreachableError
from tests.unit.played_time import PlayedTime

MEMBERS = tuple(Member(name, f"http://{name}:1") for name in "abc")
PLACEMENT = Placement(View("kv", 1, MEMBERS))
KEYS = tuple(f"{index:064x}" for index in range(30))
DESCRIPTOR = Descriptor(KEYS, 4, 16, 1_000, Delivery.AUTO, OnMissing.PREFIX, request_id="r" * 16)


def test_shares_are_all_chunks_once_in_the_order_of_need() -> None:
    portions = holdings(PLACEMENT, "bucket", KEYS)
    assert sorted(np.concatenate([portion.positions for portion in portions]).tolist()) == list(range(30))
    firsts = [int(portion.positions[0]) for portion in portions]
    assert firsts == sorted(firsts)
    for portion in portions:
        assert (np.diff(portion.positions) > 0).all()
        for position in portion.positions.tolist():
            assert PLACEMENT.order("bucket", KEYS[position])[0] == portion.member


def test_the_chunks_of_a_lost_member_go_to_the_next_in_their_order() -> None:
    portions = holdings(PLACEMENT, "bucket", KEYS)
    lost = portions[0]
    others = holdings_at(PLACEMENT, "bucket", KEYS, lost.positions, {lost.member.name})
    assert sorted(np.concatenate([portion.positions for portion in others]).tolist()) == lost.positions.tolist()
    for portion in others:
        for position in portion.positions.tolist():
            assert PLACEMENT.order("bucket", KEYS[position])[1] == portion.member


def test_what_is_matched_ends_before_the_first_gap_of_any_member() -> None:
    portions = holdings(PLACEMENT, "bucket", KEYS)
    whole = [portion.chunk_count for portion in portions]
    assert matched_of(portions, whole, 30) == 30
    for index, portion in enumerate(portions):
        for count in range(portion.chunk_count):
            found = [count if at == index else all_of for at, all_of in enumerate(whole)]
            assert matched_of(portions, found, 30) == int(portion.positions[count])


def test_the_tiers_of_the_members_are_put_together_in_the_order_of_the_chunks() -> None:
    portions = holdings(PLACEMENT, "bucket", KEYS)
    whole = [list(Tier)[index % 3] for index in range(30)]
    told = [runs_of(whole[at] for at in portion.positions.tolist()) for portion in portions]
    assert tiers_of(portions, told, 30) == runs_of(whole)
    assert tiers_of(portions, told, 7) == runs_of(whole[:7])
    assert tiers_of(portions, [()] * len(portions), 3) == ((Tier.SERVICE, 3),)


def test_the_descriptor_of_a_part_names_its_chunks_and_their_places() -> None:
    holding = holdings(PLACEMENT, "bucket", KEYS)[1]
    portion = descriptor_of(DESCRIPTOR, holding, 1, 3, Mode.LAYER_MAJOR, first_layer=2)
    assert portion.chunk_keys == tuple(KEYS[position] for position in holding.positions)
    assert portion.portion is not None
    assert portion.portion.positions == tuple(holding.positions.tolist())
    assert (portion.version, portion.on_missing, portion.delivery) == (
        EXTENDED_VERSION,
        OnMissing.FAIL,
        Delivery.LAYER_MAJOR,
    )
    assert (portion.portion.index, portion.portion.count, portion.portion.chunk_count, portion.portion.first_layer) == (
        1,
        3,
        30,
        2,
    )
    assert portion.request_id == DESCRIPTOR.request_id
    assert DESCRIPTOR.cut_to(7) == replace(DESCRIPTOR, chunk_keys=KEYS[:7], on_missing=OnMissing.FAIL)


async def alive() -> None:
    return


class Feeder:
    """A portion's server: writes a body in pieces of odd sizes, and fails after `fail_after` bytes."""

    def __init__(self, data: bytes, piece_bytes: int, fail_after: int | None = None) -> None:
        self.body = PortionBody(alive)
        self._data = data
        self._piece_bytes = piece_bytes
        self._fail_after = fail_after
        self.task = asyncio.create_task(self._feed())

    async def _feed(self) -> None:
        await self.body.begin(DeliveryStart("r" * 16, Mode.LAYER_MAJOR, 1, len(self._data)))
        end = len(self._data) if self._fail_after is None else self._fail_after
        for start in range(0, end, self._piece_bytes):
            await self.body.write(memoryview(self._data)[start : min(start + self._piece_bytes, end)])
        if self._fail_after is not None:
            self.body.fail(ConnectionError("lost"))


@given(
    layers=st.integers(1, 4),
    sizes=st.lists(st.sampled_from([1, 7, 100, 999]), min_size=1, max_size=3),
    keepers=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    window_bytes=st.sampled_from([7, 100, 1_000]),
    piece_bytes=st.sampled_from([1, 13, 500, 5_000]),
    cut=st.integers(0, 4_000),
    seed=st.integers(0, 9),
    is_at_once=st.booleans(),
)
def test_merged_bodies_are_the_whole_even_where_a_part_fails_and_comes_again(
    layers: int,
    sizes: list[int],
    keepers: list[int],
    window_bytes: int,
    piece_bytes: int,
    cut: int,
    seed: int,
    is_at_once: bool,
) -> None:
    """Slices are of one size, as exact ones are, or of several."""
    count, random = len(keepers), np.random.default_rng(seed)
    slices = Slices.of(np.resize(np.array(sizes), count))
    chunks = [[random.bytes(nbytes) for nbytes in slices.sizes.tolist()] for _ in range(layers)]
    positions = [np.flatnonzero(np.array(keepers) == keeper) for keeper in sorted(set(keepers))]

    def body_of(index: int, first_layer: int) -> bytes:
        return b"".join(layer[position] for layer in chunks[first_layer:] for position in positions[index].tolist())

    async def merge() -> tuple[bytes, int]:
        feeders = [Feeder(body_of(index, 0), piece_bytes) for index in range(len(positions))]
        feeders[0].task.cancel()
        first_group = [0] * len(positions)
        feeders[0] = Feeder(body_of(0, 0), piece_bytes, min(cut, len(body_of(0, 0)) - 1))
        merger, out, failed_count = Merger(slices, window_bytes), bytearray(), 0
        for window in windows(layers, slices, window_bytes):
            for index in range(len(positions) if is_at_once else 0):
                merger.want(window, feeders[index].body, positions[index], first_group[index])
            for index in range(len(positions)):
                while True:
                    try:
                        await merger.take(window, feeders[index].body, positions[index], first_group[index])
                        break
                    except ConnectionError:
                        failed_count += 1
                        first_group[index] = window.group
                        feeders[index] = Feeder(body_of(index, window.group), piece_bytes)
            out += merger.view(window)
        for feeder in feeders:
            feeder.task.cancel()
        return bytes(out), failed_count

    merged, failed_count = asyncio.run(merge())
    assert merged == b"".join(map(b"".join, chunks))
    assert failed_count == 1


@given(
    groups=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    window_bytes=st.integers(1, 60),
)
def test_windows_are_all_bytes_once_in_order(groups: int, sizes: list[int], window_bytes: int) -> None:
    at, slices = 0, Slices.of(np.array(sizes))
    for window in windows(groups, slices, window_bytes):
        assert window.group * sum(sizes) + int(slices.starts[window.first]) + window.start == at
        assert 0 < window.nbytes <= window_bytes
        at += window.nbytes
    assert at == groups * sum(sizes)


def test_windows_of_a_large_delivery_are_made_as_they_are_wanted() -> None:
    made = windows(1, Slices.equal(3, 1 << 45), 1 << 22)
    assert [next(made).start for _ in range(3)] == [0, 1 << 22, 2 << 22]


def test_bytes_before_a_window_count_from_the_layer_with_which_the_body_begins() -> None:
    share = Share(np.array([1, 4, 5]), Slices.equal(6, 100))
    assert share.bytes_before(Window(0, 0, 6, 0, 600), 0) == 0
    assert share.bytes_before(Window(2, 4, 6, 0, 200), 0) == 700
    assert share.bytes_before(Window(2, 4, 6, 0, 200), 2) == 100
    assert share.bytes_before(Window(1, 4, 5, 30, 20), 1) == 130


WHOLE = Descriptor(tuple(f"{number:064x}" for number in range(6)), 2, 16, 4096)


def told(*runs: FormRun, worst: float = 0.0, mean: float = 0.0) -> LayerForms:
    return LayerForms(runs, worst, mean)


def test_forms_of_the_members_are_put_together_in_the_order_of_the_chunks() -> None:
    exact, kivi = FormRun(EXACT, 2, 4096), FormRun("kivi4-1", 4, 1300)
    found = merged_forms(
        [np.array([1, 5]), np.array([0, 2, 3, 4])], [told(exact), told(kivi, worst=0.1, mean=0.06)], WHOLE
    )
    assert [(run.codec, run.chunk_count) for run in found.runs] == [
        ("kivi4-1", 1),
        (EXACT, 1),
        ("kivi4-1", 3),
        (EXACT, 1),
    ]
    assert found.layer_bytes.tolist() == [1300, 4096, 1300, 1300, 1300, 4096]
    assert (found.worst_error, found.mean_error) == (0.1, pytest.approx(0.04))


def test_the_loss_of_the_members_is_the_greatest_and_must_be_told() -> None:
    """A member of the release before tells none of its encoded chunks: then everything comes exactly."""
    exact, kivi = told(FormRun(EXACT, 2, 4096)), told(FormRun("kivi4-1", 4, 1300))
    positions = [np.array([1, 5]), np.array([0, 2, 3, 4])]
    sure = replace(kivi, worst_loss=0.5, loss_basis=LossBasis.CALIBRATED)
    found = merged_forms(positions, [exact, sure], WHOLE, bounds_loss=True)
    assert (found.worst_loss, found.loss_basis) == (0.5, LossBasis.CALIBRATED)
    with pytest.raises(WrongFormsError, match="tells no loss"):
        merged_forms(
            positions, [replace(exact, worst_loss=0.0, loss_basis=LossBasis.WORST), kivi], WHOLE, bounds_loss=True
        )
    assert merged_forms(positions, [exact, sure], WHOLE).loss_basis is None
    with pytest.raises(WrongFormsError, match="a member tells"):
        merged_forms(positions, [exact, replace(sure, worst_loss=math.nan)], WHOLE, bounds_loss=True)


def test_forms_that_no_header_takes_or_that_are_not_told_are_refused() -> None:
    count = MERGED_RUNS_MAX + 2
    whole = replace(WHOLE, chunk_keys=tuple(f"{number:064x}" for number in range(count)))
    exact, kivi = FormRun(EXACT, count // 2, 4096), FormRun("kivi4-1", count // 2, 1300)
    with pytest.raises(WrongFormsError, match="runs"):
        merged_forms([np.arange(0, count, 2), np.arange(1, count, 2)], [told(exact), told(kivi)], whole)
    with pytest.raises(WrongFormsError, match="tells no forms"):
        merged_forms([np.arange(6)], [None], WHOLE)
    with pytest.raises(WrongFormsError, match="tells no forms"):
        merged_forms([np.arange(6)], [told(FormRun(EXACT, 5, 4096))], WHOLE)


@pytest.mark.parametrize(
    "runs",
    [
        [FormRun("kivi4-1", 10**9, 1300), FormRun("kivi4-1", 6 - 10**9, 1300)],
        [FormRun("kivi4-1", 6, -1300)],
        [FormRun("kivi4-1", 6, 0)],
        [FormRun("kivi4-1", 6, 4097)],
        [FormRun("kivi4-1", 6, 10**30)],
        [FormRun(EXACT, 6, 4095)],
        [FormRun("a\r\nb", 6, 1300)],
        [FormRun("x" * 10_000, 6, 1300)],
    ],
    ids=["counts", "negative", "none", "too long", "huge", "short exact", "lines", "long name"],
)
def test_forms_that_cannot_be_are_refused(runs: list[FormRun]) -> None:
    """A member says how many bytes a window of the merged body has, and what stands in a header."""
    with pytest.raises(WrongFormsError, match="a member tells"):
        merged_forms([np.arange(6)], [told(*runs)], WHOLE)
    with pytest.raises(WrongFormsError, match="a member tells"):
        merged_forms([np.arange(6)], [told(FormRun("kivi4-1", 6, 1300), worst=float("nan"))], WHOLE)


async def test_a_quiet_part_is_asked_after_and_the_reader_told_that_it_is_gone() -> None:
    asked = 0

    async def gone() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise ConnectionError("gone")

    body = PortionBody(gone, stall_s=0.01)
    with pytest.raises(ConnectionError):
        await body.started()
    assert asked == 2


async def test_a_part_that_hardly_comes_counts_as_gone_though_its_server_is_there() -> None:
    """A byte each second would hold the client's request, and what it has of the gateway, for ever."""
    PlayedTime()
    body = PortionBody(alive)
    await body.begin(DeliveryStart("r" * 16, Mode.LAYER_MAJOR, 1, 1_000_000))

    async def drip() -> None:
        while True:
            await body.write(memoryview(b"x"))
            await PlayedTime.passes(1.0)

    merger, positions = Merger(Slices.equal(1, 1_000_000)), np.arange(1)
    dripping = asyncio.create_task(drip())
    with pytest.raises(StorageUnreachableError, match="cannot be reached"):
        await merger.take(Window(0, 0, 1, 0, 1_000_000), body, positions, 0)
    dripping.cancel()
    await asyncio.wait([dripping])
    assert 1 < body.read_bytes < 1_000
