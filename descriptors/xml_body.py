"""Reading XML from strangers at a bounded cost: document types and entities are refused, and trees are bounded.
Namespaces and attributes are dropped, because S3 uses none that matter.

A document is measured before it is parsed: a tag with a million attributes, or a comment of 8 MiB, is one step of expat
that nothing can interrupt, and an empty element takes 4 bytes on the wire and hundreds in memory. Between two calls of
a handler, where other threads get their turn, expat then handles a small part of the document only.
"""

from __future__ import annotations

from typing import Protocol
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

DEPTH_MAX = 16
ELEMENTS_MAX = 80_000
"""The most elements: enough for 10,000 parts with every field that S3 knows."""
MARKUP_BYTES_MAX = 65_536
"""The most bytes of a tag with the text after it, and of all comments and processing instructions together. No field of
S3 is nearly as long.
"""
_UNSEEN = ((b"<!--", b"-->"), (b"<?", b"?>"))
"""Comments and processing instructions: markup that calls no handler."""
_SECTION = b"<![CDATA["
_DOCTYPE = b"<!DOCTYPE"


class Handlers(Protocol):
    """Gets a document piece by piece. An error that a method raises ends the parsing."""

    def start(self, name: str, attributes: dict[str, str], /) -> object: ...

    def end(self, name: str, /) -> object: ...

    def characters(self, text: str, /) -> object: ...


def feed(data: bytes, handlers: Handlers) -> None:
    """Parse a document. Raises ValueError for one that is not well-formed, or whose steps are too long."""
    _refuse_long_steps(data)
    parser = expat.ParserCreate(encoding="UTF-8")
    parser.buffer_text = True
    parser.buffer_size = MARKUP_BYTES_MAX
    parser.StartElementHandler = handlers.start
    parser.EndElementHandler = handlers.end
    parser.CharacterDataHandler = handlers.characters
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise ValueError(f"the body is not well-formed XML: {error}") from None


def element_of(data: bytes, elements_max: int = ELEMENTS_MAX) -> Element:
    """The document's root, with bare names. Raises ValueError for what is no document, or is too large."""
    tree = _Tree(elements_max)
    feed(data, tree)
    return tree.builder.close()


def local(name: str) -> str:
    """A name without its prefix."""
    return name.rpartition(":")[2]


def _refuse_long_steps(data: bytes) -> None:
    if b"\0" in data:  # expat reads UTF-16 whatever encoding it is told, and there no markup would be found
        raise ValueError("the body is not well-formed XML: it has a NUL")
    if _DOCTYPE in data:
        raise ValueError("a document type is not allowed")
    if _has_long_markup(data):
        raise ValueError(f"a tag and the text after it have at most {MARKUP_BYTES_MAX} bytes")
    if data.count(_SECTION) > ELEMENTS_MAX:
        raise ValueError("the document is too large")
    unseen_bytes = 0
    for opening, closing in _UNSEEN:
        at = data.find(opening)
        while at >= 0:
            inside = at + len(opening)
            end = data.find(closing, inside)
            unseen_bytes += (len(data) if end < 0 else end) - at
            if unseen_bytes > MARKUP_BYTES_MAX:
                raise ValueError(f"comments have at most {MARKUP_BYTES_MAX} bytes")
            at = data.find(opening, inside)  # not behind `end`: the first may be no comment, in a CDATA section


def _has_long_markup(data: bytes) -> bool:
    """Whether MARKUP_BYTES_MAX bytes come without a bracket: then half as many do from a multiple of the half on."""
    half = MARKUP_BYTES_MAX // 2
    for at in range(0, len(data), half):
        if data.find(b"<", at, at + half) < 0:
            end = data.find(b"<", at + half)
            if (len(data) if end < 0 else end) - data.rfind(b"<", 0, at) > MARKUP_BYTES_MAX:
                return True
    return False


class _Tree:
    """Builds the tree of a document within the bounds."""

    def __init__(self, elements_max: int) -> None:
        self.builder = TreeBuilder()
        self._elements_max = elements_max
        self.characters = self.builder.data
        self._count = self._depth = 0

    def start(self, name: str, _: dict[str, str]) -> None:
        self._count += 1
        self._depth += 1
        if self._count > self._elements_max or self._depth > DEPTH_MAX:
            raise ValueError("the document is too large")
        self.builder.start(local(name), {})

    def end(self, name: str) -> None:
        self._depth -= 1
        self.builder.end(local(name))
