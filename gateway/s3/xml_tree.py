"""The trees of clients' documents, as S3's schema allows them. They are bounded as in `descriptors.xml_body`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from descriptors.errors import CallerError, ErrorCode
from descriptors.xml_body import DEPTH_MAX, ELEMENTS_MAX, feed, local


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
    builder = _Builder(root)
    try:
        feed(data, builder)
    except ValueError as error:
        raise malformed(str(error)) from None
    return builder.document.children[0]


def malformed(problem: str) -> CallerError:
    """The error for XML that S3's schema does not allow."""
    return CallerError(ErrorCode.MALFORMED_XML, problem, field="body")


class _Builder:
    def __init__(self, root: str) -> None:
        self._root = root
        self.document = Node("")
        self._open = [self.document]
        self._texts: list[list[str]] = [[]]
        self._count = 0

    def start(self, name: str, _: dict[str, str]) -> None:
        if self._count == 0 and local(name) != self._root:
            raise malformed(f"the document must be {self._root}, not {name[:64]}")
        self._count += 1
        if self._count > ELEMENTS_MAX or len(self._open) > DEPTH_MAX:
            raise malformed("the document is too large")
        node = Node(local(name))
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
