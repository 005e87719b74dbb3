"""How a chunk is read from upstream: in few requests, and so that the first layers of a prefix come early. Pure.

    few chunks, of 2 MiB:               all layers, which are told as they come
                of 32 MiB:              layer 0 | all others
    twice as many as connections,
                of 2 MiB:               all layers
    many times, of 32 layers of 64 KiB: layer 0 | all others
                             1 MiB:     layer 0 | 1 to 4 | 5 to 20 | 21 to 31

Where every chunk has a connection of its own, all of them come at once. Of more chunks than connections the last ones
begin only when the first ones are whole, so layer 0 of the prefix comes late: unless each chunk comes in groups of
layers, and all first groups before any later one. But each further request costs both sides about as much as
REQUEST_BYTES, so that the last layer comes later. Chunks are split where both layers together come sooner by it. In
these terms the time of the first and of the last layer of a chunk of c bytes, whose first group has s, is

    whole   (w - 1) / w * (r + c)  +  r + c          w: chunks for each connection, r: REQUEST_BYTES
    split   r + s                  +  2 r + c
"""

from __future__ import annotations

from descriptors.layout import ChunkLayout
from descriptors.units import MIB
from storage_server.planning.block_checksums import BLOCK_BYTES

GROUP_BYTES_MAX = 16 * MIB
GROWTH = 4
SPLIT_BYTES_MIN = 8 * MIB
"""Chunks that all come at once are split from this size on."""
REQUEST_BYTES = MIB
"""The bytes that a service sends in the time that a request takes beside its bytes. Over loopback it is 0.4 MiB with
Ceph RGW and 1.2 to 2.1 MiB with another ObjectCache (`bench upstream`: whole chunks against their first layers).
"""
LATER_BYTES_MIN = 4 * REQUEST_BYTES


def group_ends(layout: ChunkLayout, waves: int) -> list[int]:
    """Where each group ends, in bytes of the chunk; `waves` is how many chunks there are for each connection, rounded
    up. Groups grow up to GROUP_BYTES_MAX, and end with a block, because a block is proved as a whole; the last one ends
    with the chunk.
    """
    slice_bytes, chunk_bytes = layout.per_layer_chunk_bytes, layout.chunk_bytes
    first_end = min(_whole_blocks(slice_bytes), chunk_bytes)
    if waves <= 1:
        is_large = chunk_bytes >= max(SPLIT_BYTES_MIN, 2 * first_end)
        return [first_end, chunk_bytes] if is_large else [chunk_bytes]
    whole_bytes = (REQUEST_BYTES + chunk_bytes) * (2 - 1 / waves)
    split_bytes = 3 * REQUEST_BYTES + first_end + chunk_bytes
    if split_bytes >= whole_bytes:
        return [chunk_bytes]
    ends, nbytes = [first_end], max(GROWTH * slice_bytes, LATER_BYTES_MIN)
    while ends[-1] < chunk_bytes:
        ends.append(min(_whole_blocks(ends[-1] + min(nbytes, max(GROUP_BYTES_MAX, slice_bytes))), chunk_bytes))
        nbytes *= GROWTH
    return ends


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
