"""The forms that a delivery tells: those of memory, and those of the home, in so many runs at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from descriptors.layer_forms import EXACT, RUNS_MAX
from descriptors.layout import ChunkLayout
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.cache.rules.lent import Lent, with_forms
from storage_server.kernel.rules.reading import usable_prefix
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Encoded, Reading

SHAPE = LayerShape(16, 128, Element.BFLOAT16)
LAYOUT = ChunkLayout(4, 16, SHAPE.nbytes)
KIVI4, KIVI8 = (Encoded(codec, SHAPE, 4, 0.1, 0.05) for codec in (Codec.KIVI4, Codec.KIVI8))
READING = Reading(SHAPE, 4, (Codec.KIVI4, Codec.KIVI8))


def chunk(index: int, form: Encoded | None = None) -> list[Extent]:
    nbytes, text = (LAYOUT.chunk_bytes, "") if form is None else (form.nbytes, form.kept.text)
    return [Extent("f", index << 20, nbytes, b"", form=text)]


def test_all_exact() -> None:
    forms, _, _ = with_forms([chunk(0), chunk(1)], Lent([None, 4096]), LAYOUT)
    assert forms.is_exact
    assert forms.chunk_count == 2


def test_a_chunk_that_its_home_has_encoded_comes_so() -> None:
    chunks = [chunk(0), chunk(1, KIVI4), chunk(2, KIVI4)]
    forms, delivered, lent = with_forms(chunks, Lent([None, None, 4096]), LAYOUT)
    assert [(run.codec, run.chunk_count) for run in forms.runs] == [(EXACT, 1), ("kivi4-1", 2)]
    assert forms.worst_error == 0.1
    assert abs(forms.mean_error - 0.1 / 3) < 1e-9
    assert delivered == chunks
    assert lent.addresses == [None, None, 4096]


def test_what_memory_has_encoded_stands_beside() -> None:
    lent = Lent([4096, 8192, None], None, [KIVI8, None, None])
    forms, delivered, _ = with_forms([chunk(0), chunk(1, KIVI4), chunk(2)], lent, LAYOUT)
    assert [run.codec for run in forms.runs] == ["kivi8-1", "kivi4-1", EXACT]
    assert [each[0].nbytes for each in delivered] == [KIVI8.nbytes, KIVI4.nbytes, LAYOUT.chunk_bytes]


choices = st.lists(
    st.tuples(st.sampled_from([None, KIVI4, KIVI8]), st.sampled_from([None, KIVI4, KIVI8])), min_size=1, max_size=200
)


@given(choices)
def test_never_more_runs_than_can_be_told(found: list[tuple[Encoded | None, Encoded | None]]) -> None:
    """For each chunk: its form at home, and, where it is exact there, its form in memory."""
    homes = [chunk(index, home) for index, (home, _) in enumerate(found)]
    usable = usable_prefix(homes, LAYOUT.chunk_bytes, prefix_only=True, reader=READING)
    in_memory = [None if home else memory for home, memory in found][: len(usable)]
    addresses: list[int | None] = [None if memory is None else 4096 for memory in in_memory]
    forms, delivered, lent = with_forms(usable, Lent(addresses, None, in_memory), LAYOUT)
    assert 1 <= len(forms.runs) <= RUNS_MAX + 1
    assert forms.chunk_count == len(usable)
    sizes = [nbytes for run in forms.runs for nbytes in [run.layer_bytes] * run.chunk_count]
    assert [each[0].nbytes for each in delivered] == [4 * nbytes for nbytes in sizes]
    for home, size, address in zip(usable, sizes, lent.addresses, strict=True):
        if home[0].form:
            assert 4 * size == home[0].nbytes
        elif 4 * size != LAYOUT.chunk_bytes:
            assert address is not None
    if len(usable) < len(homes):
        assert found[len(usable)][0] is not None
