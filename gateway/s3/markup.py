"""Writing XML: text leaves, elements and documents. They are strings, because a listing has thousands of elements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
_SPECIAL = re.compile('[&<>"\0-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]')
_NAMED = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_REPLACEMENT = "\ufffd"
_CHARACTERS = frozenset(filter(_SPECIAL.match, map(chr, (*range(0x80), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF))))
"""All that `_SPECIAL` finds."""


def leaf(name: str, value: str | int) -> str:
    """An element with text. Characters that XML 1.0 lacks become numeric references, as S3 writes them; lenient parsers
    give the key back exactly.
    """
    text = str(value) if isinstance(value, int) else _replaced(value, _reference)
    return f"<{name}>{text}</{name}>"


def legible_leaf(name: str, value: str | int) -> str:
    """An element with text for people: characters that XML 1.0 lacks are replaced, so that every parser accepts it."""
    return f"<{name}>{_replaced(str(value), _replacement)}</{name}>"


def flag(name: str, value: bool) -> str:
    """A boolean element."""
    return f"<{name}>{'true' if value else 'false'}</{name}>"


def branch(name: str, children: Iterable[str]) -> str:
    """An element with elements in it."""
    return f"<{name}>{''.join(children)}</{name}>"


def document(name: str, children: Iterable[str]) -> bytes:
    """A whole document in S3's namespace."""
    return f'{_HEAD}<{name} xmlns="{NAMESPACE}">{"".join(children)}</{name}>'.encode()


def bare_document(name: str, children: Iterable[str]) -> bytes:
    """A whole document without a namespace."""
    return f"{_HEAD}{branch(name, children)}".encode()


def timestamp(unix_s: float) -> str:
    """ISO 8601 in UTC, to the next millisecond.

    S3 cuts times to seconds, and this server does not. With a cut time `aws s3 sync` finds an object older than the
    file it was made from, where both are of the same second, and uploads the file again. With a time rounded up to the
    second s5cmd leaves out new objects, since it passes over objects from the future. MinIO and Ceph list milliseconds,
    too.
    """
    second, millisecond = divmod(math.ceil(unix_s * 1000), 1000)
    return f"{_second(second)}.{millisecond:03d}Z"


@lru_cache(4096)
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _replaced(text: str, by: Callable[[str], str]) -> str:
    """The text without special characters. A key may consist of them: one pass over the text for each different one
    takes microseconds, a call for each of them a hundred times as long.
    """
    if _SPECIAL.search(text) is None:
        return text
    present = _CHARACTERS.intersection(text)
    if "&" in present:  # first, as the others become references with this character
        text = text.replace("&", by("&"))
    for character in present - {"&"}:
        text = text.replace(character, by(character))
    return text


def _reference(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if character == "\0" or "\ud800" <= character <= "\udfff":
        return _REPLACEMENT
    return f"&#x{ord(character):X};"


def _replacement(character: str) -> str:
    return _NAMED.get(character, _REPLACEMENT)
