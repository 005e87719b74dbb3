"""A dictionary in slices is a dictionary, whose slices grow apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from objectcache.orchestrator.rules.sliced_dict import SlicedDict


@given(st.dictionaries(st.one_of(st.integers(), st.binary(max_size=20)), st.integers()))
def test_each_key_is_in_its_slice_only(entries: dict[int | bytes, int]) -> None:
    made: SlicedDict[int | bytes, int] = SlicedDict()
    for key, value in entries.items():
        made.of(key)[key] = value
    assert len(made) == len(entries)
    assert {key: value for each in made.slices for key, value in each.items()} == entries
    assert all(key in made for key in entries)
    for key in entries:
        del made.of(key)[key]
    assert len(made) == 0


def test_no_slice_has_much_more_than_its_part() -> None:
    """Engines name their blocks by running numbers or by digests."""
    for keys in (range(64_000), [at.to_bytes(32, "big") for at in range(64_000)]):
        made: SlicedDict[int | bytes, None] = SlicedDict()
        for key in keys:
            made.of(key)[key] = None
        assert max(map(len, made.slices)) < 1300
