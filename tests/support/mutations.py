"""Spoilt forms of a seed, for tests that feed parsers what strangers might send."""

from __future__ import annotations

from hypothesis import strategies as st


def mutations(seed: bytes) -> st.SearchStrategy[bytes]:
    """The seed with up to four pieces cut, doubled or replaced."""
    place = st.integers(0, len(seed))
    edit = st.tuples(place, st.integers(0, 8), st.binary(max_size=8))

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = seed
        for at, removed, added in edits:
            data = data[:at] + added + data[at + removed :]
        return data

    return st.lists(edit, max_size=4).map(apply)
