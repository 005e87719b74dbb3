"""What goes between the server and its Mooncake process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.home.remote_dram.mooncake_engine import NOT_FOUND, MooncakeEngine
from storage_server.home.rules.mooncake_commands import (
    LINE_BYTES_MAX,
    REASON_CHARACTERS_MAX,
    CallKind,
    Join,
    MooncakeAnswer,
    MooncakeCall,
    decode_answer,
    decode_call,
    decode_join,
    encode_answer,
    encode_call,
    encode_join,
)
from storage_server.planning.area_span import AreaSpan


def test_calls_and_answers_come_out_as_they_went_in() -> None:
    join = Join("127.0.0.1:1", "10.0.0.7", 2**40, "rdma", "mlx5_0")
    assert decode_join(encode_join(join)) == join
    for call in (
        MooncakeCall(1, CallKind.GET, ("a",), (AreaSpan(1, 2, 3), AreaSpan(0, 0, 2**40))),
        MooncakeCall(2, CallKind.REMOVE, ("é\n", "")),
    ):
        assert encode_call(call).count(b"\n") == 1
        assert decode_call(encode_call(call)) == call
    for answer in (MooncakeAnswer(3, (0, -704)), MooncakeAnswer(4, (), "why\nnot")):
        assert encode_answer(answer).count(b"\n") == 1
        assert decode_answer(encode_answer(answer)) == answer
    assert len(encode_answer(MooncakeAnswer(5, (), "x" * 10_000))) < 2 * REASON_CHARACTERS_MAX


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"[]", b"[1]", b"[1, [], null, 4]", b'["1", [], null]', b"[1, [true], null]", b"[true, [], null]",
        b"[1, [0.5], null]", b"[1, [], 3]", b"\xff", b"[" * 100_000, b'[1, {"0": 1}, null]',
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's, or ours
        decode_answer(line)


@given(st.binary(max_size=200))
def test_no_line_does_more_than_be_refused(line: bytes) -> None:
    try:
        decode_answer(line)
    except ValueError:
        return


def test_a_call_with_the_most_keys_has_room_in_a_line() -> None:
    """S3's keys are at most 1,024 bytes; quoted, each may take three times as many, and 255 for the bucket."""
    call = MooncakeCall(1, CallKind.REMOVE, ("x" * (3 * 1024 + 300),) * 1_000)
    assert len(encode_call(call)) < LINE_BYTES_MAX


class Store:
    """Mooncake's client: one value of four bytes under "there"."""

    def __init__(self, size_code: int = 4) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.size_code = size_code

    def batch_get_into_multi_buffers(self, keys: list[str], addresses: Any, sizes: Any) -> list[int]:
        self.asked.append(("get", (keys, addresses, sizes)))
        return [4 if sum(sizes[0]) == 4 else -800]

    def get_size(self, key: str) -> int:
        return self.size_code

    def batch_put_from_multi_buffers(self, keys: list[str], addresses: Any, sizes: Any) -> list[int]:
        self.asked.append(("put", (keys, addresses, sizes)))
        return [0]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        self.asked.append(("remove", (keys, force)))
        return [0] * len(keys)


def test_the_process_reads_and_writes_the_areas_that_it_was_given() -> None:
    store = Store()
    engine = MooncakeEngine(store, [(1000, 100), (5000, 100)])
    spans = (AreaSpan(0, 10, 1), AreaSpan(1, 20, 3))
    assert engine.codes(MooncakeCall(1, CallKind.GET, ("there",), spans)) == [4]
    assert engine.codes(MooncakeCall(2, CallKind.PUT, ("there",), spans)) == [0]
    assert engine.codes(MooncakeCall(3, CallKind.REMOVE, ("there", "b"))) == [0, 0]
    value = (["there"], [[1010, 5020]], [[1, 3]])
    removed = [("remove", (["there"], True)), ("put", value), ("remove", (["there", "b"], True))]
    assert store.asked == [("get", value), *removed]


@pytest.mark.parametrize(("size_code", "code"), [(4, NOT_FOUND), (NOT_FOUND, NOT_FOUND), (-1, -800)])
def test_a_value_of_another_size_is_not_there_and_a_host_that_is_gone_is_a_failure(size_code: int, code: int) -> None:
    engine = MooncakeEngine(Store(size_code), [(1000, 100)])
    assert engine.codes(MooncakeCall(1, CallKind.GET, ("there",), (AreaSpan(0, 0, 7),))) == [code]
