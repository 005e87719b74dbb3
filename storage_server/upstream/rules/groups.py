"""How a chunk is read from upstream: in few requests, and so that the first layers of a prefix come early. Pure.

    32 layers of 64 KiB, few chunks:   all layers, which are told as they come
                 1 MiB, few chunks:    layer 0 | all others
                 many chunks:          layer 0 | 1 to 4 | 5 to 20 | 21 to 31

Where every chunk has a connection of its own, all of them come at once. Layer 0 has a request of its own where chunks
are large: of small ones the second request takes too much of the time. Of more chunks than connections the last
ones would begin only when the first ones are whole. So they come in groups of layers that grow.
"""

from __future__ import annotations

from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from storage_server.planning.block_checksums import BLOCK_BYTES

GROUP_BYTES_MAX = 16 * MIB
GROUP_BYTES_MIN = BLOCK_BYTES
GROWTH = 4
SPLIT_BYTES_MIN = 8 * MIB


def group_ends(layout: ChunkLayout, *, is_crowded: bool) -> list[int]:
    """Where each group ends, in bytes of the chunk; `is_crowded` says that there are more chunks than connections.
    Groups grow up to GROUP_BYTES_MAX, and end with a block, because a block is proved as a whole; the last one ends
    with the chunk.
    """
    slice_bytes, chunk_bytes = layout.per_layer_chunk_bytes, layout.chunk_bytes
    first_end = -(-slice_bytes // BLOCK_BYTES) * BLOCK_BYTES
    if not is_crowded:
        is_large = chunk_bytes >= max(SPLIT_BYTES_MIN, 2 * first_end)
        return [first_end, chunk_bytes] if is_large else [chunk_bytes]
    ends, layers = list[int](), 1
    while not ends or ends[-1] < chunk_bytes:
        start = ends[-1] if ends else 0
        nbytes = max(GROUP_BYTES_MIN, min(layers * slice_bytes, max(GROUP_BYTES_MAX, slice_bytes)))
        end = -(-(start + nbytes) // BLOCK_BYTES) * BLOCK_BYTES
        ends.append(min(end, chunk_bytes))
        layers *= GROWTH
    return ends
