"""Extents: runs of an object's bytes in a file. Pure values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from storage_server.planning.block_checksums import checksum_bytes

ALIGNMENT_BYTES = 4096
"""Extents begin at multiples of this many bytes: the size of a page, and of a block of most disks."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of a file, with the packed CRC-32C of each block: empty where nobody asked for
    them, because those of large extents take memory. In the object these bytes begin at `object_offset`.
    `content_class` and `form` are those of the object through which the bytes were found: the class, and the form of an
    encoded chunk (descriptors.kv_forms), each empty for none.
    """

    file_id: str
    offset: int
    nbytes: int
    checksums: bytes = field(compare=False)
    object_offset: int = 0
    content_class: str = field(default="", compare=False)
    form: str = field(default="", compare=False)

    @property
    def has_checksums(self) -> bool:
        """Whether the checksums of all blocks are here, so that its bytes can be proved."""
        return len(self.checksums) >= checksum_bytes(self.nbytes)


def aligned(nbytes: int) -> int:
    """The bytes that an extent takes in a segment, and in the DRAM tier."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class CorruptExtentError(Exception):
    """Stored bytes differ from the written ones: they are too short, unreadable, or a block fails its checksum."""


class MissingFileError(CorruptExtentError):
    """A file that the index names does not exist."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"{file_id} is missing")
        self.file_id = file_id


def in_one_file(extents: Sequence[Extent], start: int, nbytes: int) -> tuple[str, int]:
    """The file that has the object's byte `start`, and how many of the `nbytes` from there on lie in that file before
    others come. "" without extents.
    """
    if not extents:
        return "", nbytes
    at = max(0, bisect_right(extents, start, key=lambda extent: extent.object_offset) - 1)
    file_id = extents[at].file_id
    for number in range(at + 1, len(extents)):
        following = extents[number]
        if following.object_offset >= start + nbytes:
            break
        if following.file_id != file_id:
            return file_id, max(1, following.object_offset - start)
    return file_id, nbytes


def read_object(
    read_into: Callable[[Extent, int, memoryview], None], extents: Sequence[Extent], start: int, view: memoryview
) -> None:
    """Fill `view` with the object's bytes from `start` on, across its extents. `read_into` reads one extent, as
    `ExtentFiles.read_into` does. Raises CorruptExtentError where the extents do not cover the object.
    """
    if len(extents) == 1 and extents[0].object_offset == 0 and start + len(view) <= extents[0].nbytes:
        read_into(extents[0], start, view)
        return
    for extent in extents:
        if not view:
            return
        skip = start - extent.object_offset
        if not 0 <= skip < extent.nbytes:
            continue
        count = min(len(view), extent.nbytes - skip)
        read_into(extent, skip, view[:count])
        view, start = view[count:], start + count
    if view:
        raise CorruptExtentError("the object's extents do not cover it")
