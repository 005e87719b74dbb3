"""Forms (multipart/form-data, as audio comes in), by the names of their fields. Pure.

An engine's parser must find the same fields as this one, or a field could be hidden from here: so a form has to be as
browsers and OpenAI's clients write it, byte by byte, and others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Generator

FIELDS_MAX = 64
STEP_BYTES = 1 << 20
HEAD_BYTES_MAX, VALUE_BYTES_MAX = 1024, 1024
_BOUNDARY = re.compile(
    r"""multipart/form-data\s*;\s*boundary=("?)([0-9a-z'()+_,./:=?-]{1,70})\1\s*\Z""", re.ASCII | re.IGNORECASE
)
"""The characters are those of RFC 2046, section 5.1.1: parsers do not agree on others."""
_NAME = re.compile(
    rb'Content-Disposition: form-data; name="([^"\\\r\n]*)"(?:; filename="[^"\\\r\n]*")?\Z', re.IGNORECASE
)
_OTHER_HEAD = re.compile(rb"Content-Type: [\x20-\x7e]*\Z", re.IGNORECASE)


class WrongFormError(ValueError):
    """The body is no form as clients write it; the message says why."""


def fields_of(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """Name of each field, in order, and the first VALUE_BYTES_MAX bytes of its value. Raises WrongFormError."""
    steps = form_steps(content_type, body)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            fields: list[tuple[str, bytes]] = end.value
            return fields


def form_steps(content_type: str, body: bytes) -> Generator[None, None, list[tuple[str, bytes]]]:
    """As `fields_of`, in steps of STEP_BYTES: a client chooses the boundary, and may make the search for it slow."""
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise WrongFormError("the Content-Type names no boundary")
    mark = b"--" + found[2].encode()
    if not body.startswith(mark):
        raise WrongFormError("the form does not begin with its boundary")
    fields: list[tuple[str, bytes]] = []
    at = len(mark)
    while (end := (yield from _found(body, b"\r\n" + mark, at))) >= 0:
        if len(fields) == FIELDS_MAX:
            raise WrongFormError(f"the form has more than {FIELDS_MAX} fields")
        fields.append(_field(body[at : min(end, at + HEAD_BYTES_MAX + VALUE_BYTES_MAX)]))
        at = end + 2 + len(mark)
    if body[at:] not in (b"--", b"--\r\n"):
        raise WrongFormError("the form does not end with its boundary")
    return fields


def _found(body: bytes, mark: bytes, at: int) -> Generator[None, None, int]:
    for start in range(at, len(body), STEP_BYTES):
        end = body.find(mark, start, start + STEP_BYTES + len(mark) - 1)
        if end >= 0:
            return end
        yield
    return -1


def _field(part: bytes) -> tuple[str, bytes]:
    head, blank, value = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    if not part.startswith(b"\r\n") or not blank or len(head) > HEAD_BYTES_MAX:
        raise WrongFormError("a field has no head")
    lines = head.split(b"\r\n")
    names = [found[1] for line in lines if (found := _NAME.match(line))]
    if len(names) != 1 or not all(_NAME.match(line) or _OTHER_HEAD.match(line) for line in lines):
        raise WrongFormError("a field's head has something else than its name and type")
    try:
        return names[0].decode(), value[:VALUE_BYTES_MAX]
    except UnicodeDecodeError:
        raise WrongFormError("a field's name is not UTF-8") from None
