"""KV_L2TD arithmetic: the place of a layer of a chunk in the chunk's object, and its place in the target.

Symbols (ObjectCache paper, Eq. 1 and section 3.2):

    N chunk_count   L num_layers   G chunk_tokens   S per_layer_chunk_bytes

A chunk object is L*S bytes: layer, then K and V, then token, then hidden. Layer l is the byte range [l*S, (l+1)*S).
"""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT_ID = "KV_L2TD"


def slice_bytes(chunk_tokens: int, kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """S in bytes: keys and values of one layer in one chunk (Eq. 1)."""
    return 2 * chunk_tokens * kv_heads * head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The fixed shape that every chunk of one model deployment shares."""

    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk object: L*S."""
        return self.num_layers * self.per_layer_chunk_bytes

    def layer_range(self, layer_index: int) -> tuple[int, int]:
        """(offset, length) in bytes of one layer inside a chunk object."""
        if not 0 <= layer_index < self.num_layers:
            raise IndexError(f"layer {layer_index} of {self.num_layers}")
        return layer_index * self.per_layer_chunk_bytes, self.per_layer_chunk_bytes

    def layer_bytes(self, chunk_count: int) -> int:
        """Bytes of one layer over `chunk_count` chunks: k*S."""
        return chunk_count * self.per_layer_chunk_bytes

    def delivery_bytes(self, chunk_count: int) -> int:
        """W: bytes of a whole delivery of `chunk_count` chunks: k*L*S."""
        return chunk_count * self.chunk_bytes

    def layer_offset(self, layer_index: int, chunk_count: int) -> int:
        """The offset of layer `layer_index` in a layer-major delivery of `chunk_count` chunks."""
        return layer_index * self.layer_bytes(chunk_count)
