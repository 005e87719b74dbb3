"""The media type of a Content-Type header. Pure.

aiohttp's own reading of it takes a time that grows with the square of the semicolons, which senders choose.
"""

from __future__ import annotations

from collections.abc import Mapping

CHARACTERS_MAX = 256


def media_type_of(headers: Mapping[str, str]) -> str:
    """In lower case, without parameters; empty where there is none."""
    return headers.get("Content-Type", "")[:CHARACTERS_MAX].partition(";")[0].strip().lower()
