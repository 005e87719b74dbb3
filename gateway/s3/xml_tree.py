"""Reading XML from strangers: document types and entities are refused, and trees are bounded.
Namespaces are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from xml.parsers import expat

from descriptors.errors import CallerError, ErrorCode

DEPTH_MAX = 16
ELEMENTS_MAX = 80_000
"""The most elements: enough for 10,000 parts with every field that S3 knows."""
MARKUP_BYTES_MAX = 65_536
"""The most bytes of a tag with the text after it, and of all comments and processing instructions together. No field of
S3 is nearly as long. The reason: expat handles a tag with a million attributes, or a comment of 8 MiB, in one step that
nothing can interrupt.
"""
_LONG_MARKUP = re.compile(rb"<[^<]{%d}" % MARKUP_BYTES_MAX)
_UNSEEN = ((b"<!--", b"-->"), (b"<?", b"?>"))
"""Comments and processing instructions: markup that calls no handler."""
_SECTION = b"<![CDATA["
_DOCTYPE = b"<!DOCTYPE"


@dataclass(slots=True)
class Node:
    """An element: its local name, its text, and its child elements. Attributes are dropped, because S3 uses none."""

    name: str
    text: str = ""
    children: list[Node] = field(default_factory=list)

    def expect(self, names: Collection[str]) -> None:
        """Raises CallerError(MalformedXML) for a child element that is not among `names`."""
        for child in self.children:
            if child.name not in names:
                raise malformed(f"{self.name} may not contain {child.name[:64]}")

    def all(self, name: str) -> list[Node]:
        return [child for child in self.children if child.name == name]

    def only(self, name: str) -> Node | None:
        """The one child element of that name, or None. Raises CallerError(MalformedXML) for two."""
        found = self.all(name)
        if len(found) > 1:
            raise malformed(f"{self.name} has more than one {name}")
        return found[0] if found else None

    def need(self, name: str) -> Node:
        """The one child element of that name. Raises CallerError(MalformedXML) for none or two."""
        found = self.only(name)
        if found is None:
            raise malformed(f"{self.name} must have {name}")
        return found

    def fields(self, names: Collection[str]) -> dict[str, str]:
        """The texts of the child elements. Each must be a leaf, named in `names`, and there at most once."""
        found: dict[str, str] = {}
        for child in self.children:
            if child.name not in names or child.children:
                raise malformed(f"{self.name} may not contain {child.name[:64]}, or not with elements in it")
            if child.name in found:
                raise malformed(f"{self.name} has more than one {child.name}")
            found[child.name] = child.text
        return found

    def leaf(self, name: str) -> str | None:
        """The text of the one child element of that name; None where there is none."""
        found = self.only(name)
        if found is None:
            return None
        found.expect(())
        return found.text


def parse_tree(data: bytes, root: str) -> Node:
    """The document's root, which must be named `root`. Raises CallerError(MalformedXML)."""
    _refuse_long_steps(data)
    builder = _Builder(root)
    parser = expat.ParserCreate(encoding="UTF-8")
    parser.buffer_text = True
    parser.buffer_size = MARKUP_BYTES_MAX
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.characters
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise malformed(f"the body is not well-formed XML: {error}") from None
    return builder.document.children[0]


def malformed(problem: str) -> CallerError:
    """The error for XML that S3's schema does not allow."""
    return CallerError(ErrorCode.MALFORMED_XML, problem, field="body")


def _refuse_long_steps(data: bytes) -> None:
    """Measure the document before it is parsed. Between two calls of our handlers, where other threads get their turn,
    expat then handles a small part of it only. Raises CallerError(MalformedXML).
    """
    if _DOCTYPE in data:
        raise malformed("a document type is not allowed")
    if _LONG_MARKUP.search(data):
        raise malformed(f"a tag and the text after it have at most {MARKUP_BYTES_MAX} bytes")
    if data.count(_SECTION) > ELEMENTS_MAX:
        raise malformed("the document is too large")
    unseen_bytes = 0
    for opening, closing in _UNSEEN:
        at = data.find(opening)
        while at >= 0:
            inside = at + len(opening)
            end = data.find(closing, inside)
            unseen_bytes += (len(data) if end < 0 else end) - at
            if unseen_bytes > MARKUP_BYTES_MAX:
                raise malformed(f"comments have at most {MARKUP_BYTES_MAX} bytes")
            at = data.find(opening, inside)  # not behind `end`: the first may be no comment, in a CDATA section


class _Builder:
    def __init__(self, root: str) -> None:
        self._root = root
        self.document = Node("")
        self._open = [self.document]
        self._texts: list[list[str]] = [[]]
        self._count = 0

    def start(self, name: str, _: dict[str, str]) -> None:
        if self._count == 0 and _local(name) != self._root:
            raise malformed(f"the document must be {self._root}, not {name[:64]}")
        self._count += 1
        if self._count > ELEMENTS_MAX or len(self._open) > DEPTH_MAX:
            raise malformed("the document is too large")
        node = Node(_local(name))
        self._open[-1].children.append(node)
        self._open.append(node)
        self._texts.append([])

    def end(self, _: str) -> None:
        self._open.pop().text = "".join(self._texts.pop())

    def characters(self, text: str) -> None:
        """Keep pieces in a list and join them at the end, as appending to a string copies it for each
        wider character.
        """
        self._texts[-1].append(text)


def _local(name: str) -> str:
    return name.rpartition(":")[2]
