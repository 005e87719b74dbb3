"""XML from strangers: what is read, and what is refused before it costs anything."""

from __future__ import annotations

import pytest

from descriptors.xml_body import DEPTH_MAX, ELEMENTS_MAX, MARKUP_BYTES_MAX, element_of, feed


def test_a_tree_has_bare_names_and_the_text() -> None:
    """A long namespace would otherwise be copied into the name of every element."""
    root = element_of(b'<?xml version="1.0"?><a xmlns="urn:x" xmlns:s="urn:y"><s:b at="1">1&amp;2</s:b><c/>3</a>')
    assert [(each.tag, each.text, each.attrib) for each in root] == [("b", "1&2", {}), ("c", None, {})]
    assert (root.tag, root[1].tail) == ("a", "3")


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"", "well-formed"),
        (b"<a>", "well-formed"),
        (b"<a/>" * 2, "well-formed"),
        (b'<?xml version="1.0" encoding="UTF-16"?><a>\xff\xfe</a>', "well-formed"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'.encode("utf-16"), "NUL"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'.encode("utf-16-be"), "NUL"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "document type"),
        (b"<a>" * (DEPTH_MAX + 1) + b"</a>" * (DEPTH_MAX + 1), "too large"),
        (b"<a>" + b"<b/>" * ELEMENTS_MAX + b"</a>", "too large"),
        (b"<a><!--" + b"-" * MARKUP_BYTES_MAX + b"--></a>", "have at most"),
        (b"<a>" + b"<!---->" * (MARKUP_BYTES_MAX // 4 + 1) + b"</a>", "comments"),
    ],
)
def test_what_is_no_document_or_costs_too_much_is_refused(document: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        element_of(document)


def test_an_encoding_that_a_document_names_does_not_count() -> None:
    """ElementTree raises LookupError for one that nobody knows."""
    assert element_of(b'<?xml version="1.0" encoding="none-such"?><a>\xc3\xbc</a>').text == "ü"


@pytest.mark.parametrize("before", range(0, MARKUP_BYTES_MAX, MARKUP_BYTES_MAX // 8 + 1))
def test_the_longest_markup_is_found_wherever_it_lies(before: int) -> None:
    """It is looked for in steps, without a look at each byte."""
    start = b"<a><b>" + b"y" * before + b"</b>"
    whole = b"<c>" + b"x" * (MARKUP_BYTES_MAX - 3)
    assert element_of(start + whole + b"</c></a>")[1].text == "x" * (MARKUP_BYTES_MAX - 3)
    with pytest.raises(ValueError, match="at most"):
        element_of(start + whole + b"x</c></a>")


def test_what_a_handler_raises_ends_the_parsing() -> None:
    class Once:
        def __init__(self) -> None:
            self.count = 0

        def start(self, name: str, _: dict[str, str]) -> None:
            self.count += 1
            raise LookupError(name)

        def end(self, name: str) -> None: ...

        def characters(self, text: str) -> None: ...

    once = Once()
    with pytest.raises(LookupError):
        feed(b"<a><b/><c/></a>", once)
    assert once.count == 1
