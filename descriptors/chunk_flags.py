"""Flags: headers of a PUT that say something of a chunk, and are kept with it."""

from __future__ import annotations

from collections.abc import Mapping

from descriptors.errors import CallerError, ErrorCode
from descriptors.headers import CHUNK_HEADER, PREFIX_HEADER
from descriptors.objects import Attributes

FLAGS = (CHUNK_HEADER, PREFIX_HEADER)
SET = "true"


def flags(headers: Mapping[str, str]) -> dict[str, str]:
    """The flags among a request's headers, which have lower-case names. Raises CallerError(InvalidArgument)."""
    found = {name: headers[name] for name in FLAGS if name in headers}
    for name, value in found.items():
        if value != SET:
            raise CallerError(ErrorCode.INVALID_ARGUMENT, f"the value of {name} is {SET}", field=name)
    return found


def is_flagged(attributes: Attributes, name: str) -> bool:
    """Whether an object carries this flag."""
    return attributes.headers.get(name) == SET
