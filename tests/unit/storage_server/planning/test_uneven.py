"""Plans whose slices differ in size, leave gaps in the target, or come in several series of layers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import Portion
from descriptors.errors import ChunkUnavailable
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from storage_server.delivery.gather.read import gather
from storage_server.kernel.data.extents import extent_place
from storage_server.planning.plan import DeliveryPlan, Payload, Series, TargetWithGaps, plan_delivery, plan_portion
from storage_server.planning.rows import Row
from tests.unit.storage_server.delivery.gather.test_gather import Chunks

CHUNK_BYTES = 50_000
CHUNK_COUNT = 6


@st.composite
def series(draw: st.DrawFn) -> tuple[Series, ...]:
    """Some layers of some of the chunks; where they land, no two bytes meet."""
    made: list[Series] = []
    target = draw(st.integers(0, 50))
    for _ in range(draw(st.integers(1, 3))):
        group_count = draw(st.integers(1, 3))
        first = draw(st.integers(0, CHUNK_COUNT - 1))
        count = draw(st.integers(1, CHUNK_COUNT - first))
        source_stride = CHUNK_BYTES // 4
        of_each = st.lists(st.integers(1, source_stride), min_size=count, max_size=count)
        sizes = np.array(draw(of_each), dtype=np.int64)
        if draw(st.booleans()):
            sizes[:] = sizes[0]
        sources = np.array(draw(of_each), dtype=np.int64) - 1
        gaps = np.array(draw(st.lists(st.sampled_from([0, 0, 7]), min_size=count, max_size=count)), dtype=np.int64)
        targets = target + np.cumsum(sizes + gaps) - sizes
        stride = int(targets[-1] + sizes[-1]) - target + draw(st.integers(0, 20))
        is_even = bool((sizes == sizes[0]).all()) and not gaps.any()
        made.append(
            Series(
                group_count,
                first,
                count,
                int(sizes[0]) if is_even and draw(st.booleans()) else sizes,
                int(sources[0]) if draw(st.booleans()) else sources,
                source_stride,
                target if not gaps.any() and draw(st.booleans()) else targets,
                stride,
                is_scattered=draw(st.booleans()),
            )
        )
        target += group_count * stride
    return tuple(made)


def slices_of(each: Series, step: int) -> list[tuple[int, int, int, int]]:
    """(chunk, source offset, bytes, target offset) of every slice of a group, the slow and obvious way."""
    found = []
    packed = each.first_target_offset
    for index in range(each.slice_count):
        nbytes = each.slice_bytes if isinstance(each.slice_bytes, int) else int(each.slice_bytes[index])
        source = each.source_offset if isinstance(each.source_offset, int) else int(each.source_offset[index])
        target = packed if isinstance(each.target_offset, int) else int(each.target_offset[index])
        packed += nbytes
        found.append(
            (each.first_chunk + index, source + step * each.source_stride, nbytes, target + step * each.target_stride)
        )
    return found


def filled(plan: DeliveryPlan, data: list[bytes]) -> tuple[int, bytes]:
    """Where the target ends, and what the plan must make of it."""
    every = [
        each_slice for each in plan.series for step in range(each.group_count) for each_slice in slices_of(each, step)
    ]
    end = max(target + nbytes for _, _, nbytes, target in every)
    out = bytearray(b"\xaa" * end)
    for chunk, source, nbytes, target in every:
        out[target : target + nbytes] = data[chunk][source : source + nbytes]
    return end, bytes(out)


@given(
    some=series(),
    cuts=st.lists(st.integers(1, CHUNK_BYTES), max_size=3),
    payload_bytes_max=st.sampled_from([1_000, 20_000, 1 << 20]),
)
def test_any_slices_land_where_the_series_say_and_nothing_else_is_touched(
    tmp_path_factory: pytest.TempPathFactory, some: tuple[Series, ...], cuts: list[int], payload_bytes_max: int
) -> None:
    """Codecs make slices of other lengths, other servers write the other chunks, hybrid models have other layers."""
    chunks = Chunks(tmp_path_factory.mktemp("uneven"), ChunkLayout(1, 16, CHUNK_BYTES), CHUNK_COUNT, cuts, {1, 4})
    table = chunks.table()
    plan = DeliveryPlan(Mode.LAYER_MAJOR, CHUNK_COUNT, some, payload_bytes_max)
    end, expected = filled(plan, chunks.data)
    target = np.full(end, 0xAA, dtype=np.uint8)
    for payload in plan.payloads():
        assert 0 < payload.nbytes <= payload_bytes_max
        rows = table.rows(payload)
        assert int(rows[:, Row.NBYTES].sum()) == payload.nbytes
        gather(chunks.source, table, payload, rows, int(target.ctypes.data) + payload.target_offset, past_cache=False)
    chunks.files.close()
    assert target.tobytes() == expected


@given(some=series(), payload_bytes_max=st.sampled_from([1_000, 20_000, 1 << 20]))
def test_the_scheduler_is_told_the_sizes_that_the_payloads_have(
    some: tuple[Series, ...], payload_bytes_max: int
) -> None:
    plan = DeliveryPlan(Mode.LAYER_MAJOR, CHUNK_COUNT, some, payload_bytes_max)
    payloads = list(plan.payloads())
    groups = plan.group_sizes
    assert len(groups) == plan.group_count
    assert len(payloads) == plan.payload_count
    assert sum(payload.nbytes for payload in payloads) == plan.delivery_bytes
    for index, group in enumerate(groups):
        own = [payload for payload in payloads if payload.group.index == index]
        assert [payload.nbytes for payload in own] == [group.payloads[at] for at in range(len(group.payloads))]
        assert sum(payload.nbytes for payload in own) == group.nbytes == own[0].group.nbytes
        assert own[0].target_offset == own[0].group.target_offset
        assert [payload.ends_group for payload in own] == [False] * (len(own) - 1) + [True]
    assert all(before.group.index <= after.group.index for before, after in pairwise(payloads))


@pytest.mark.parametrize("payload_bytes_max", [100, 1_000, 3_000, 1 << 20])
def test_arrays_that_say_what_numbers_say_make_the_same_payloads(payload_bytes_max: int) -> None:
    layout, count = ChunkLayout(3, 16, 1_000), 7
    plan = plan_delivery(Mode.LAYER_MAJOR, layout, count, payload_bytes_max)
    (even,) = plan.series
    sizes = np.full(count, 1_000, dtype=np.int64)
    same = Series(3, 0, count, sizes, sizes * 0, 1_000, np.cumsum(sizes) - sizes, 7_000)
    uneven = DeliveryPlan(Mode.LAYER_MAJOR, count, (same,), payload_bytes_max)

    def told(payload: Payload) -> tuple[object, ...]:
        source = np.broadcast_to(payload.source_offset, payload.chunk_count).tolist()
        pieces = np.broadcast_to(payload.piece_bytes, payload.chunk_count).tolist()
        return (payload.group, payload.first_chunk, source, pieces, payload.target_offset, payload.ends_group)

    assert [told(payload) for payload in uneven.payloads()] == [told(payload) for payload in plan.payloads()]
    assert even.group_bytes == same.group_bytes


def test_a_gap_in_the_target_ends_a_payload() -> None:
    """What is sent in one piece lands in one piece."""
    targets = np.array([0, 10, 30, 40], dtype=np.int64)
    plan = DeliveryPlan(Mode.LAYER_MAJOR, 4, (Series(1, 0, 4, 10, 0, 10, targets, 100),), 1_000)
    assert [(payload.target_offset, payload.nbytes) for payload in plan.payloads()] == [(0, 20), (30, 20)]


def test_damage_in_an_uneven_payload_is_that_of_its_chunk(tmp_path: Path) -> None:
    chunks = Chunks(tmp_path, ChunkLayout(1, 16, CHUNK_BYTES), 3, [], set())
    extent = chunks.chunks[2][0]
    with extent_place(tmp_path, extent.file_id).path.open("r+b") as file:
        file.seek(extent.offset + 100)
        file.write(b"\x00\xff\x00\xff")
    sizes = np.array([30, 20_000, 900], dtype=np.int64)
    plan = DeliveryPlan(Mode.LAYER_MAJOR, 3, (Series(1, 0, 3, sizes, 0, 0, 0, 0),), 1 << 20)
    table = chunks.table()
    (payload,) = plan.payloads()
    target = np.zeros(payload.nbytes, dtype=np.uint8)
    with pytest.raises(ChunkUnavailable) as failed:
        gather(chunks.source, table, payload, table.rows(payload), int(target.ctypes.data), past_cache=False)
    chunks.files.close()
    assert failed.value.index == 2


def test_a_series_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slice_bytes has shape \(3,\), not \(4,\)"):
        Series(1, 0, 4, np.ones(3, dtype=np.int64), 0, 10, 0, 10)
    with pytest.raises(ValueError, match="no bytes"):
        Series(1, 0, 2, np.array([1, 0], dtype=np.int64), 0, 10, 0, 10)


@pytest.mark.slow
@given(
    mode=st.sampled_from(Mode),
    homes=st.lists(st.integers(0, 2), min_size=1, max_size=CHUNK_COUNT),
    layers=st.integers(1, 4),
    first_layer=st.integers(0, 3),
    payload_bytes_max=st.sampled_from([1_000, 20_000, 1 << 20]),
    is_scattered=st.booleans(),
)
def test_the_parts_of_a_delivery_fill_its_target_together(
    tmp_path_factory: pytest.TempPathFactory,
    mode: Mode,
    homes: list[int],
    layers: int,
    first_layer: int,
    payload_bytes_max: int,
    is_scattered: bool,
) -> None:
    """Each server has its own chunks only, in the order of the prefix. Packed, a portion is its slices alone."""
    count, layout = len(homes), ChunkLayout(layers, 16, CHUNK_BYTES // layers)
    first_layer = min(first_layer, layers - 1)
    first_group = first_layer if mode is Mode.LAYER_MAJOR else 0
    whole = np.full(layout.delivery_bytes(count), 0xAA, dtype=np.uint8)
    written, expected = whole.copy(), whole.copy()
    for home in sorted(set(homes)):
        positions = [at for at, each in enumerate(homes) if each == home]
        portion = Portion(0, 1, count, tuple(positions), first_layer)
        chunks = Chunks(tmp_path_factory.mktemp("portion"), layout, len(positions), [70], {1})
        own = np.array([np.frombuffer(data, dtype=np.uint8) for data in chunks.data])
        if mode is Mode.LAYER_MAJOR:
            slices = own.reshape(len(positions), layers, -1).transpose(1, 0, 2)[first_layer:]
            expected.reshape(layers, count, -1)[first_layer:, positions] = slices
        else:
            slices = own[None]
            expected.reshape(count, -1)[positions] = own
        apart = plan_portion(
            mode, layout, portion, payload_bytes_max, TargetWithGaps(is_packed=False, is_scattered=is_scattered)
        )
        packed = plan_portion(
            mode, layout, portion, payload_bytes_max, TargetWithGaps(is_packed=True, is_scattered=False)
        )
        body = np.full(slices.size, 0xAA, dtype=np.uint8)
        table = chunks.table()
        by_runs = plan_portion(
            mode, layout, portion, payload_bytes_max,
            TargetWithGaps(is_packed=False, is_scattered=True, gathers_packed=True),
        )  # fmt: skip
        for payload in by_runs.payloads():
            room = np.empty(payload.nbytes, dtype=np.uint8)
            gather(chunks.source, table, payload, table.rows(payload), int(room.ctypes.data), past_cache=False)
            at = 0
            for offset, nbytes in payload.written_runs():
                written[offset : offset + nbytes] = room[at : at + nbytes]
                at += nbytes
            assert at == payload.nbytes
        for plan, target in ((apart, whole), (packed, body)):
            payloads = list(plan.payloads())
            assert [payloads[0].group.index, payloads[-1].group.index] == [first_group, first_group + len(slices) - 1]
            for payload in payloads:
                address = int(target.ctypes.data) + payload.target_offset
                gather(chunks.source, table, payload, table.rows(payload), address, past_cache=False)
        chunks.files.close()
        assert body.tobytes() == slices.tobytes()
    assert whole.tobytes() == written.tobytes() == expected.tobytes()


def test_scattered_slices_of_a_part_are_few_payloads() -> None:
    """Every second chunk of 100: slices that lie apart go together where the destination takes them so."""
    layout, portion = ChunkLayout(4, 16, 1_000), Portion(0, 2, 100, tuple(range(0, 100, 2)))
    scattered = plan_portion(
        Mode.LAYER_MAJOR, layout, portion, 20_000, TargetWithGaps(is_packed=False, is_scattered=True)
    )
    one_by_one = plan_portion(
        Mode.LAYER_MAJOR, layout, portion, 20_000, TargetWithGaps(is_packed=False, is_scattered=False)
    )
    assert (scattered.payload_count, one_by_one.payload_count) == (4 * 3, 4 * 50)
    first = next(scattered.payloads())
    assert first.chunk_at(0) == 0
    assert first.chunk_at(2_999) == 1
    assert first.chunk_at(38_000) == 19
