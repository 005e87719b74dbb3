"""Which rows every reader can show: what others wrote into a shared place may be any JSON. Pure."""

from __future__ import annotations

import re

from descriptors.objects import PART_NUMBER_MAX, TIME_S_MAX, Attributes, is_header_text
from descriptors.units import KIB
from storage_server.kernel.rules.rows import StoredObject

TEXT_BYTES_MAX = 64 * KIB
"""The attributes of an object or upload have no more bytes."""
SIZE_MAX = 1 << 62
HEADERS_MAX, TAGS_MAX = 256, 64
CHECKSUM_BYTES_MAX, NAME_BYTES_MAX = 256, 1024
KEY_BYTES_MAX = 1024
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,256}\Z")
_STORAGE_CLASS = re.compile(r"[0-9A-Z_-]{1,64}\Z")
_TAG = re.compile(r"[!#-~]{0,128}\Z")
"""An ETag or a checksum. It is sent as a header."""


def is_size(value: object) -> bool:
    """Whether the index can hold this number of bytes."""
    return type(value) is int and 0 <= value <= SIZE_MAX


def is_time(value: float) -> bool:
    """Whether an answer can tell this time, in Unix seconds."""
    return 0 <= value <= TIME_S_MAX


def is_tag(value: str) -> bool:
    """Whether an answer's header can have this ETag or checksum."""
    return _TAG.match(value) is not None


def is_plain(found: StoredObject) -> bool:
    """Whether all that an object's row says beside its size can be told."""
    info = found.info
    part_count = info.part_count
    return (
        is_tag(info.etag)
        and is_time(info.modified_at)
        and are_plain(info.attributes)
        and (part_count is None or (type(part_count) is int and 1 <= part_count <= PART_NUMBER_MAX))
        and _is_text(info.checksum.value if info.checksum else "", CHECKSUM_BYTES_MAX)
        and _is_text(found.upload_id or "", NAME_BYTES_MAX)
    )


def is_key(key: str) -> bool:
    """Whether an object can have this key."""
    return 0 < len(key.encode()) <= KEY_BYTES_MAX and "\0" not in key


def are_plain(attributes: Attributes) -> bool:
    """Whether the attributes are texts that an answer can have."""
    return unplain_field(attributes) is None


def unplain_field(attributes: Attributes) -> str | None:
    """The first field of the attributes that no answer can have: a header's name, or that of the header that sets it.
    None says that all are plain.
    """
    headers, tags, storage_class = attributes.headers, attributes.tags, attributes.storage_class
    if not isinstance(headers, dict) or len(headers) > HEADERS_MAX:
        return "headers"
    for name, value in headers.items():
        if _HEADER.match(name) is None or not _is_text(value, TEXT_BYTES_MAX):
            return name
    if not isinstance(tags, dict) or len(tags) > TAGS_MAX:
        return "x-amz-tagging"
    if not all(_is_text(text, TEXT_BYTES_MAX) for text in (*tags, *tags.values())):
        return "x-amz-tagging"
    if not isinstance(storage_class, str) or _STORAGE_CLASS.match(storage_class) is None:
        return "x-amz-storage-class"
    return None


def _is_text(value: object, length_max: int) -> bool:
    return isinstance(value, str) and len(value) <= length_max and is_header_text(value)
