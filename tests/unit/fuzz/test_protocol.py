"""Whatever strangers send, the parsers answer: a value or a CallerError, never a crash.

The same targets run under atheris, guided by coverage, with `python -m fuzz.atheris_targets`.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fuzz.seeds import seeds
from fuzz.targets import TARGETS, TRAILER, decode_in_steps
from gateway.s3.aws_chunked import CHUNK_HEADER_BYTES_MAX, TRAILER_BYTES_MAX, ChunkedDecoder
from gateway.s3.payload_form import PayloadForm
from gateway.s3.request import parse_range
from objectcache.adapters.deadlines import ConnectionVerdict, ConnectionWatch, Deadlines
from tests.support.mutations import mutations

UNSIGNED = PayloadForm.UNSIGNED_CHUNKS_TRAILER


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_seed_and_nothing_at_all_are_answered(target: str) -> None:
    for data in (*seeds(target), b"", b"\0", b"\xff" * 100):
        TARGETS[target](data)


@pytest.mark.parametrize("target", sorted(TARGETS))
@given(data=st.data())
def test_spoilt_input_is_answered(target: str, data: st.DataObject) -> None:
    TARGETS[target](data.draw(st.sampled_from(seeds(target)).flatmap(mutations)))


@pytest.mark.parametrize("target", sorted(TARGETS))
@given(data=st.binary(max_size=400))
def test_random_input_is_answered(target: str, data: bytes) -> None:
    TARGETS[target](data)


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_any_split_of_a_chunked_body_gives_the_same_bytes(pieces: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(b"%x;x=y\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    wire += b"0\r\n" + TRAILER.encode() + b":AAAAAA==\r\n\r\n"
    data = b"".join(pieces)
    decoder = ChunkedDecoder(len(data), None, frozenset({TRAILER}))
    decoded = bytearray()
    places = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        for piece in decoder.feed(wire[start:end]):
            decoded += piece
    assert decoder.finish() == {TRAILER: "AAAAAA=="}
    assert decoded == data


@settings(suppress_health_check=[HealthCheck.large_base_example])
@given(st.integers(0, 3), st.integers(CHUNK_HEADER_BYTES_MAX - 3, CHUNK_HEADER_BYTES_MAX + 3), st.integers(1, 2000))
def test_limits_hold_at_the_same_byte_however_it_is_split(which: int, length: int, step: int) -> None:
    wire = [
        b"5;" + b"x" * (length - 4) + b"\r\nhello\r\n0\r\n\r\n",
        b"0" * length,
        b"0\r\n" + b"y" * (TRAILER_BYTES_MAX - CHUNK_HEADER_BYTES_MAX + length),
        b"5\r\nhello\r\n0\r\n" + b"\r\n" * (length // 2),
    ][which]
    assert decode_in_steps(wire, 5, UNSIGNED, step) == decode_in_steps(wire, 5, UNSIGNED, len(wire))


@given(st.from_regex(re.compile(r"bytes=[0-9]{0,19}-[0-9]{0,19}", re.ASCII), fullmatch=True))
@example("bytes=00-0")
@example("bytes=\u0661-")
def test_a_range_is_what_it_says_or_ignored(header: str) -> None:
    spec = parse_range(header)
    first, _, last = header.removeprefix("bytes=").partition("-")
    if spec is not None:
        assert (spec.first, spec.last, spec.suffix) == (
            (int(first), int(last) if last else None, None) if first else (None, None, int(last))
        )


@given(st.lists(st.binary(max_size=50), max_size=8), st.floats(0, 100))
def test_a_connections_watch_is_late_exactly_when_a_begun_head_is(pieces: list[bytes], wait_s: float) -> None:
    watch = ConnectionWatch(Deadlines(30.0, 60.0))
    for piece in pieces:
        watch.received(piece, 0.0)
    sent = b"".join(pieces)
    is_late = bool(sent) and b"\r\n\r\n" not in sent and wait_s >= 30
    assert watch.verdict(0, wait_s) is (ConnectionVerdict.HEAD_LATE if is_late else ConnectionVerdict.KEEP)
