"""vLLM's KV events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.orchestrator.rules.kv_events import (
    BATCH_BLOCKS_MAX,
    EXTRA_CHARACTERS_MAX,
    NAME_BYTES_MAX,
    AllBlocksCleared,
    BatchOrder,
    BatchTurn,
    BlockRemoved,
    BlockStored,
    KnownBatch,
    WrongEventError,
    batch_of,
    block_count_of,
    name_bytes,
    read_batch,
    sliced,
    token_root,
)
from objectcache.orchestrator.rules.prefix_index import PrefixIndex

STORED = {
    "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": 10, "token_ids": [1, 2, 3, 4],
    "block_size": 2, "medium": "GPU",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"block_hashes": [b"x" * (NAME_BYTES_MAX + 1), 12]},
        {"parent_block_hash": b"x" * (NAME_BYTES_MAX + 1)},
        {"extra_keys": [["x" * EXTRA_CHARACTERS_MAX], []]},
        {"extra_keys": [[[["x"] * EXTRA_CHARACTERS_MAX]], []]},
        {"medium": ["GPU"]},
        {"lora_name": ["adapter"]},
    ],
)
def test_what_is_kept_of_an_event_is_bounded(changes: dict[str, Any]) -> None:
    batch_of([1.0, [STORED]])
    with pytest.raises(WrongEventError):
        batch_of([1.0, [{**STORED, **changes}]])


@pytest.mark.parametrize("extra_keys", [None, [["lora"], [["hash", 3], b"x" * 32]]])
def test_a_message_is_read_as_its_document_is(extra_keys: Any) -> None:
    stored = {**STORED, "extra_keys": extra_keys}
    removed = {"type": "BlockRemoved", "block_hashes": [1, b"two"], "medium": "GPU"}
    maps = [stored, removed, {"type": "AllBlocksCleared"}, {"type": "OfTomorrow", "what": [1]}]
    names = (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    )
    arrays = [
        ["BlockStored", *(stored.get(name) for name in names)],
        ["BlockRemoved", removed["block_hashes"], "GPU"],
        ["AllBlocksCleared"],
        ["OfTomorrow", [1]],
    ]
    for events in (maps, arrays):
        whole = batch_of([1.5, maps, 2])
        assert read_batch(msgspec.msgpack.encode([1.5, events, 2])) == whole
        assert read_batch(msgspec.msgpack.encode({"ts": 1.5, "events": events, "data_parallel_rank": 2})) == whole


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0, [[]] * 70_000]),
        msgspec.msgpack.encode([1.0, [{**STORED, "token_ids": [[]] * 50_000}]]),
        msgspec.msgpack.encode([1.0, [{**STORED, "block_hashes": [[]] * 50_000}]]),
        msgspec.msgpack.encode([1.0, [{**STORED, "extra_keys": [[[]] * 500] * 100}]]),
        msgspec.msgpack.encode([1.0, [{**STORED, "extra_keys": [["x" * 300_000], []]}]]),
        msgspec.msgpack.encode([1.0, [{**STORED, "medium": ["x"] * 5000}]]),
        msgspec.msgpack.encode([1.0, ["BlockStored"]]),
    ],
    ids=["empty", "garbage", "events", "tokens", "names", "extra lists", "extra text", "medium", "a text"],
)
def test_lists_within_lists_are_refused_before_they_are_made(payload: bytes) -> None:
    """2 MiB of empty lists held the interpreter for a second."""
    with pytest.raises((msgspec.DecodeError, WrongEventError)):
        read_batch(payload)


def test_the_blocks_of_a_batch_are_counted_before_the_index_takes_them() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": list(range(BATCH_BLOCKS_MAX // 2)), "medium": "GPU"}
    batch_of([1.0, [removed, removed]])
    with pytest.raises(WrongEventError, match="block_hashes"):
        batch_of([1.0, [removed, removed, STORED]])


@given(st.integers(1, 30), st.integers(1, 12), st.booleans(), st.none() | st.integers(100, 200))
def test_an_event_in_slices_says_the_same(count: int, blocks_max: int, has_extras: bool, parent: int | None) -> None:
    extras = tuple((f"image {at}",) for at in range(count)) if has_extras else ()
    event = BlockStored(tuple(range(count)), parent, tuple(range(count * 4)), 4, extras=extras)
    whole, parts = PrefixIndex(), PrefixIndex()
    for index in (whole, parts):
        index.add_engine("a")
        index.apply("a", BlockStored((100,), None, (1, 2, 3, 4), 4))
    whole.apply("a", event)
    for part in sliced(event, blocks_max):
        assert block_count_of(part) <= blocks_max
        parts.apply("a", part)
    names = [name_bytes(at) for at in range(count)]
    assert [parts.prefix_of("a", name) for name in names] == [whole.prefix_of("a", name) for name in names]
    assert parts.orphan_count("a") == whole.orphan_count("a")
    for part in sliced(BlockRemoved(event.names), blocks_max):
        parts.apply("a", part)
    assert parts.held_count("a") == 1
    assert list(sliced(AllBlocksCleared(), blocks_max)) == [AllBlocksCleared()]


def test_maps_and_arrays_say_the_same() -> None:
    """Newer versions of vLLM send maps whose defaults are left out, older ones arrays."""
    array = ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU"]
    assert batch_of([1.0, [STORED], 0]) == batch_of([1.0, [array]])
    assert batch_of({"ts": 1.0, "events": [STORED], "data_parallel_rank": None}).events == (
        BlockStored((11, 12), 10, (1, 2, 3, 4), 2),
    )
    removed = batch_of([2, [{"type": "BlockRemoved", "block_hashes": [b"x"]}, ["BlockRemoved", [7], "CPU"]], 3])
    assert removed.events == (BlockRemoved((b"x",)), BlockRemoved((7,), "CPU"))
    assert removed.rank == 3
    assert batch_of([1.0, [{"type": "AllBlocksCleared"}, ["AllBlocksCleared"]], 0]).events == (AllBlocksCleared(),) * 2


def test_kinds_that_are_not_known_are_left_out() -> None:
    """A later vLLM may have more of them."""
    assert batch_of([1.0, [{"type": "BlockMoved"}, STORED], 0]).events == (BlockStored((11, 12), 10, (1, 2, 3, 4), 2),)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [1.0],
        ["now", [], 0],
        [1.0, [5], 0],
        [1.0, [{**STORED, "token_ids": [1, 2, 3]}], 0],
        [1.0, [{**STORED, "block_size": 0}], 0],
        [1.0, [{**STORED, "block_size": 3}], 0],
        [1.0, [{**STORED, "block_hashes": ["a", "b"]}], 0],
        [1.0, [{**STORED, "parent_block_hash": "a"}], 0],
        [1.0, [{**STORED, "extra_keys": [["a"]]}], 0],
        [1.0, [{**STORED, "group_idx": "a"}], 0],
        [1.0, [STORED] * 70_000, 0],
    ],
)
def test_what_is_not_as_the_format_says_is_refused(document: Any) -> None:
    with pytest.raises(WrongEventError):
        batch_of(document)


def test_random_bytes_are_refused_and_nothing_else_is_raised() -> None:
    for size in range(1, 200):
        payload = bytes((size * 37 + at * 101) % 256 for at in range(size))
        try:
            batch_of(msgspec.msgpack.decode(payload))
        except (msgspec.DecodeError, WrongEventError, ValueError):
            continue


def test_the_salt_stands_behind_the_adapter_in_the_first_block_only() -> None:
    stored = BlockStored((1, 2), None, (1, 2), 1, "lora", extras=(("lora", "salt"), ("lora",)))
    assert token_root(stored, 0) == ("salt", b"")
    assert token_root(stored, 1) == ("", b"")
    image = BlockStored((1,), None, (1,), 1, extras=((("hash-of-image", 3), "salt"),))
    assert token_root(image, 0) == ("salt", repr((("hash-of-image", 3),)).encode())
    later = BlockStored((1,), 9, (1,), 1, extras=(("a text",),))
    assert token_root(later, 0) == ("", repr(("a text",)).encode())


def test_names_of_blocks_are_told_apart_as_bytes() -> None:
    names = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -5, b"", b"b", b"\x00" * 8, b"\x00" * 32]
    assert len(set(map(name_bytes, names))) == len(names)
    assert name_bytes(1) == b"i\x01" + bytes(7)
    assert name_bytes(b"a") == b"ba"


def test_batches_come_in_order_and_gaps_repetitions_and_new_starts_are_told_apart() -> None:
    order = BatchOrder()
    assert order.turn(4, 10.0) is BatchTurn.REPLAY  # what was before is not known
    assert order.turn(0, 10.0) is BatchTurn.TAKE
    order.took(0, 10.0)
    assert order.turn(1, 11.0) is BatchTurn.TAKE
    assert order.turn(3, 11.0) is BatchTurn.REPLAY
    assert order.expected == 1
    order.took(1, 11.0)
    assert order.known == KnownBatch(1, 11.0)
    assert order.turn(0, 10.0) is BatchTurn.DROP
    assert order.turn(0, 12.0) is BatchTurn.RESTART
    order.restart()
    assert order.expected is None
    assert order.turn(0, 12.0) is BatchTurn.TAKE
