"""Documents that we write are read by every parser as they were meant."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError
from storage_server.upstream.rules.documents import call_of, is_writable

WRITABLE = st.text(st.characters(exclude_categories=("Cs",)).filter(is_writable), min_size=1, max_size=10)


def keys_in(body: bytes) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(body).iter() if element.tag.endswith("Key")]


@given(st.lists(WRITABLE | st.text("a\r\n\t&<>\"']]>", min_size=1), min_size=1, max_size=5))
def test_keys_come_back_from_a_document_as_they_are(keys: list[str]) -> None:
    """A bare CR would be read as LF, and another object be deleted."""
    objects = [{"Key": key} for key in keys]
    call = call_of("DeleteObjects", {"Bucket": "bbb", "Delete": {"Objects": objects, "Quiet": True}})
    assert keys_in(call.body) == keys


@pytest.mark.parametrize("wrong", ["\0", "\x01", "\x0b", "\x1f", "\ufffe", "\uffff"])
def test_what_no_document_can_have_is_refused(wrong: str) -> None:
    assert not is_writable(f"a{wrong}b")
    with pytest.raises(CallerError, match="XML"):
        call_of("DeleteObjects", {"Bucket": "bbb", "Delete": {"Objects": [{"Key": f"a{wrong}b"}]}})
    tags = {"TagSet": [{"Key": "name", "Value": wrong}]}
    with pytest.raises(CallerError, match="XML"):
        call_of("PutObjectTagging", {"Bucket": "bbb", "Key": "k", "Tagging": tags})
