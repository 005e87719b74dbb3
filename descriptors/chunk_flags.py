"""Flags, the class and the layout: headers of a PUT that say something of a chunk, and are kept with it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import CHUNK_HEADER, CLASS_HEADER, CODEC_HEADER, LAYOUT_HEADER, PREFIX_HEADER
from descriptors.kv_forms import LAYOUT_RULE, KvLayout
from descriptors.objects import Attributes

FLAGS = (CHUNK_HEADER, PREFIX_HEADER)
SET = "true"
KEPT = (*FLAGS, CLASS_HEADER, LAYOUT_HEADER)
CONTENT_CLASS = re.compile("[a-z0-9][a-z0-9_-]{0,31}")
CONTENT_CLASS_RULE = "1 to 32 of a-z 0-9 _ -, and begins with a letter or a digit"


def flags(headers: Mapping[str, str]) -> dict[str, str]:
    """The flags, the class and the layout among a request's headers, which have lower-case names. Raises
    CallerError(InvalidArgument), also for a form, which only the server writes.
    """
    if CODEC_HEADER in headers:
        raise CallerError(ErrorCode.INVALID_ARGUMENT, f"only the server writes {CODEC_HEADER}", field=CODEC_HEADER)
    found = {name: headers[name] for name in KEPT if name in headers}
    for name, value in found.items():
        if not is_kept(name, value):
            rule = {CLASS_HEADER: f"has {CONTENT_CLASS_RULE}", LAYOUT_HEADER: f"is {LAYOUT_RULE}"}.get(
                name, f"is {SET}"
            )
            raise CallerError(ErrorCode.INVALID_ARGUMENT, f"the value of {name} {rule}", field=name)
    return found


def is_kept(name: str, value: str) -> bool:
    """Whether a header of KEPT may have this value."""
    if name == LAYOUT_HEADER:
        try:
            KvLayout.parse(value)
        except ValueError:
            return False
        return True
    return CONTENT_CLASS.fullmatch(value) is not None if name == CLASS_HEADER else value == SET


def is_flagged(attributes: Attributes, name: str) -> bool:
    """Whether an object carries this flag."""
    return attributes.headers.get(name) == SET


def copied(headers: Mapping[str, str], of_source: Mapping[str, str]) -> dict[str, str]:
    """The headers of a copy, for which these are wanted: the bytes of an encoded chunk stay encoded."""
    form = of_source.get(CODEC_HEADER)
    if form is None:
        return dict(headers)
    return {name: value for name, value in headers.items() if name != LAYOUT_HEADER} | {CODEC_HEADER: form}
