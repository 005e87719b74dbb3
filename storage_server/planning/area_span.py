"""Memory of the server as it is named to a child process, which maps some areas of it: by area and offset. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AreaSpan:
    """`nbytes` bytes from `offset` of an area."""

    area: int
    offset: int
    nbytes: int


def area_spans(areas: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> tuple[AreaSpan, ...]:
    """Spans (address, nbytes) of the server's memory, named by area. `areas` are (address, nbytes), by number. Raises
    ValueError for memory that lies in no area.
    """
    found = []
    for address, nbytes in spans:
        for number, (start, size) in enumerate(areas):
            if start <= address and address + nbytes <= start + size:
                found.append(AreaSpan(number, address - start, nbytes))
                break
        else:
            raise ValueError("the memory is not shared with the child process")
    return tuple(found)
