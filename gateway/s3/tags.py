"""Object tags: S3's rules for a set of them, and the x-amz-tagging header."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from descriptors.errors import CallerError, ErrorCode
from descriptors.pins import pinned_until

TAGS_MAX = 10
TAG_KEY_CHARACTERS_MAX = 128
TAG_VALUE_CHARACTERS_MAX = 256
_PUNCTUATION = frozenset("+-=._:/@ ")


def checked_tags(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The tags, in order. Raises CallerError(InvalidTag)."""
    tags: dict[str, str] = {}
    for key, value in pairs:
        if key in tags:
            raise _invalid("a tag key is given twice")
        if not key or len(key) > TAG_KEY_CHARACTERS_MAX:
            raise _invalid(f"a tag key has 1 to {TAG_KEY_CHARACTERS_MAX} characters")
        if len(value) > TAG_VALUE_CHARACTERS_MAX:
            raise _invalid(f"a tag value has at most {TAG_VALUE_CHARACTERS_MAX} characters")
        if key.lower().startswith("aws:"):
            raise _invalid("tag keys that start with aws: are reserved")
        if not all(map(_is_allowed, key)) or not all(map(_is_allowed, value)):
            raise _invalid("tags have letters, digits, spaces and + - = . _ : / @")
        tags[key] = value
        if len(tags) > TAGS_MAX:
            raise _invalid(f"an object has at most {TAGS_MAX} tags")
    pinned_until(tags)
    return tags


def parse_tagging_header(header: str | None) -> dict[str, str]:
    """The tags of `x-amz-tagging: key=value&…`, percent-encoded. Raises CallerError: InvalidArgument, InvalidTag."""
    if not header:
        return {}
    pairs = []
    for part in header.split("&"):
        key, _, value = part.partition("=")
        pairs.append((_decode(key), _decode(value)))
    return checked_tags(pairs)


def _decode(text: str) -> str:
    try:
        return unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeError:
        raise CallerError(
            ErrorCode.INVALID_ARGUMENT, "x-amz-tagging is not UTF-8, percent-encoded", field="x-amz-tagging"
        ) from None


def _is_allowed(character: str) -> bool:
    return (
        character in _PUNCTUATION or unicodedata.category(character)[0] in "LN" or unicodedata.combining(character) > 0
    )


def _invalid(problem: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_TAG, problem, field="Tag")
