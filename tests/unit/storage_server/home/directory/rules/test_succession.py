"""How a generation of a journal goes on from the one before."""

from __future__ import annotations

import pytest

from storage_server.home.directory.rules.succession import Succession, decoded_succession

KNOWN = Succession(generation=3, position=900, front=500)


@pytest.mark.parametrize(
    ("generation", "position", "size", "place"),
    [
        (3, 900, 505, 500),
        (3, 903, 505, 503),
        (3, 905, 505, 505),
        (3, 906, 505, None),  # it has read what is not there
        (3, 899, 505, None),  # it lacks something of the front
        (2, 903, 505, None),
        (4, 903, 505, None),
    ],
)
def test_a_reader_goes_on_where_it_was(generation: int, position: int, size: int, place: int | None) -> None:
    assert KNOWN.place(generation, position, size) == place


def test_a_succession_is_read_as_it_was_written() -> None:
    assert decoded_succession(KNOWN.encoded()) == KNOWN


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[1, 2, 3]",
        b'{"generation": 1, "position": 2}',
        b'{"generation": 1, "position": 2, "front": -3}',
        b'{"generation": 1, "position": 2, "front": 0}',
        b'{"generation": 1, "position": true, "front": 3}',
        b'{"generation": 1, "position": 2.5, "front": 3}',
        b'{"generation": 1, "position": 2, "front": 1e400}',
        b'{"generation": 1, "position": 2, "front": 99999999999999999999999}',
    ],
)
def test_what_makes_no_sense_is_none(data: bytes) -> None:
    assert decoded_succession(data) is None
