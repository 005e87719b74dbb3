"""Flags of chunks in the headers of a PUT."""

from __future__ import annotations

import pytest

from descriptors.chunk_flags import flags, is_flagged, is_kept
from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import CHUNK_HEADER, CLASS_HEADER, PREFIX_HEADER
from descriptors.objects import Attributes


def test_flags_are_kept_and_other_headers_are_not() -> None:
    found = flags({CHUNK_HEADER: "true", "content-type": "x"})
    assert found == {CHUNK_HEADER: "true"}
    assert is_flagged(Attributes(found), CHUNK_HEADER)
    assert not is_flagged(Attributes(found), PREFIX_HEADER)


@pytest.mark.parametrize("value", ["", "false", "True", "true, true"])
def test_another_value_is_refused(value: str) -> None:
    with pytest.raises(CallerError) as refused:
        flags({PREFIX_HEADER: value})
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_ARGUMENT, PREFIX_HEADER)


def test_the_class_is_a_short_name() -> None:
    assert flags({CLASS_HEADER: "code-2", CHUNK_HEADER: "true"}) == {CLASS_HEADER: "code-2", CHUNK_HEADER: "true"}
    for wrong in ("", "Code", "-x", "a" * 33, "a b", "ä", 'x"'):
        with pytest.raises(CallerError) as refused:
            flags({CLASS_HEADER: wrong})
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_ARGUMENT, CLASS_HEADER)


def test_whether_a_value_may_be_kept() -> None:
    assert is_kept(CLASS_HEADER, "code")
    assert is_kept(CHUNK_HEADER, "true")
    assert not is_kept(CLASS_HEADER, "x" * 2000)
    assert not is_kept(CHUNK_HEADER, "code")
