"""The engine's paged blocks of one layer, read and written as KV_L2TD, or as they lie.

vLLM shows a layer as (block, kv head, token, 2 * head_dim). On GPUs the last dimension is a token's key, then its
value. On CPUs the first half of a head's bytes in a block are keys, the second values, each packed for the machine's
instructions (on AVX-512 keys of 32 tokens are transposed). Which packing it is is found by asking the engine's own
kernel, and one that is not known is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(keys, values, cache): have the engine write tokens (token, head, dim) into block 0 of a cache."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`tokens` tokens lie together, and of each `elements` elements of the head dimension in a row: (token / tokens,
    dim / elements, tokens, elements). (1, 1) is token after token.
    """

    tokens: int
    elements: int


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks `first`, `first + 1`, … of which the first is at `index` of a list of block numbers: `count` of them."""

    index: int
    first: int
    count: int

    def pieces(self, size: int, skip: int) -> Iterator[Run]:
        """The run, cut as the list is cut into pieces of `size` entries, with `skip` entries before its first."""
        done = 0
        while done < self.count:
            count = min(size - (skip + self.index + done) % size, self.count - done)
            yield Run(self.index + done, self.first + done, count)
            done += count


class Blocks:
    """Block numbers, in a request's order. GPUs copy by number in one go; CPUs do best with runs of neighbours."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self.runs = find_runs(self.ids)
        self._on_device: torch.Tensor | None = None

    def first(self, count: int) -> Blocks:
        """The first `count` of them."""
        return self if count == len(self.ids) else Blocks(self.ids[:count])

    def on(self, device: torch.device) -> torch.Tensor:
        """The numbers in the device's memory."""
        if self._on_device is None:
            self._on_device = torch.tensor(self.ids, dtype=torch.long, device=device)
        return self._on_device


def find_runs(ids: Sequence[int]) -> tuple[Run, ...]:
    """The longest runs of numbers that follow each other."""
    starts = [index for index in range(len(ids)) if not index or ids[index] != ids[index - 1] + 1]
    ends = [*starts[1:], len(ids)] if starts else []
    return tuple(Run(start, ids[start], end - start) for start, end in zip(starts, ends, strict=True))


TOKEN_MAJOR = Packing(1, 1)
_PACKINGS = [TOKEN_MAJOR] + [Packing(tokens, elements) for tokens in (2, 4, 8, 16, 32, 64) for elements in (1, 2, 4)]


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Keys and values of one layer as strided views of the engine's memory, both of shape (block, token / n, n, head,
    dim / e, e) for their packing's n and e.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_tokens(self) -> int:
        """B."""
        return int(self.keys.shape[1] * self.keys.shape[2])

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key, or value."""
        return int(self.keys.shape[3:].numel() * self.keys.itemsize)

    def read(self, blocks: Blocks, skip: int, count: int, part: int) -> torch.Tensor:
        """Keys (`part` 0) or values (1) of `count` tokens, the first being the `skip`th of the first block: (count,
        head, dim) in memory of their own.
        """
        paged = self._part(part)
        heads, head_dim = paged.shape[3], paged.shape[4] * paged.shape[5]
        if paged.device.type == "cpu":
            states = paged.new_empty((len(blocks.ids), *paged.shape[1:]))
            for run in blocks.runs:
                states[run.index : run.index + run.count] = paged[run.first : run.first + run.count]
        else:
            states = paged[blocks.on(paged.device)]
        return states.reshape(-1, heads, head_dim)[skip : skip + count]

    def write(self, blocks: Blocks, chunks: torch.Tensor, skip: int, part: int) -> None:
        """Fill whole blocks from chunks of tokens (chunk, token, head, dim), beginning with the `skip`th token."""
        paged, count = self._part(part), len(blocks.ids)
        chunk_blocks, rest = divmod(chunks.shape[1], self.block_tokens)
        if rest or skip % self.block_tokens:
            tokens = chunks.reshape(-1, *chunks.shape[2:])[skip : skip + count * self.block_tokens]
            chunks, skip, chunk_blocks = tokens.reshape(count, self.block_tokens, *tokens.shape[1:]), 0, 1
        cut = chunks.reshape(len(chunks), chunk_blocks, *paged.shape[1:])
        first = skip // self.block_tokens
        if paged.device.type != "cpu":
            paged[blocks.on(paged.device)] = cut.flatten(0, 1)[first : first + count]
        elif chunk_blocks == 1:
            for run in blocks.runs:
                paged[run.first : run.first + run.count] = cut[first + run.index : first + run.index + run.count, 0]
        else:
            for run in blocks.runs:
                for piece in run.pieces(chunk_blocks, first):
                    chunk, at = divmod(first + piece.index, chunk_blocks)
                    paged[piece.first : piece.first + piece.count] = cut[chunk, at : at + piece.count]

    def _part(self, part: int) -> torch.Tensor:
        return self.keys if part == 0 else self.values


def plain_layer(cache: torch.Tensor) -> PagedLayer:
    """A layer (block, head, token, 2 * dim) whose last dimension is a key, then a value."""
    half = cache.shape[-1] // 2
    keys, values = (part.permute(0, 2, 1, 3)[:, :, None, :, :, None] for part in (cache[..., :half], cache[..., half:]))
    return PagedLayer(keys, values)


def packed_layer(cache: torch.Tensor, packings: tuple[Packing, Packing]) -> PagedLayer:
    """A layer whose blocks hold, for each head, all keys and then all values, so packed."""
    block_count, heads, tokens, width = cache.shape
    halves = cache.view(block_count, heads, 2, tokens * width // 2)
    return PagedLayer(*(_unpacked(halves[:, :, part], tokens, packings[part]) for part in (0, 1)))


def page_layers(caches: Sequence[torch.Tensor], page_bytes: int, block_tokens: int) -> list[PagedLayer]:
    """The layers' memory as it lies, a page for each block. Raises ValueError where a block of a layer is no run
    of `page_bytes`, or where the layers of a block lie side by side, in another order than the model runs them.
    """
    pages = [_pages(cache, page_bytes) for cache in caches]
    places = [page.data_ptr() for page in pages]
    if pages[0].stride(0) != page_bytes and places != [places[0] + index * page_bytes for index in range(len(places))]:
        raise ValueError("layers of a block that do not lie in the model's order")
    return [_as_layer(page, block_tokens) for page in pages]


def _pages(cache: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """(block, byte), whatever the order of dimensions within a block."""
    size = cache.element_size()
    spans = [(length - 1) * stride for length, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True)]
    if (sum(spans) + 1) * size != page_bytes or cache[0].numel() * size != page_bytes:
        raise ValueError(f"a block of a layer that is no run of {page_bytes} bytes")
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        cache.untyped_storage(), cache.storage_offset() * size, (len(cache), page_bytes), (cache.stride(0) * size, 1)
    )


def _as_layer(pages: torch.Tensor, block_tokens: int) -> PagedLayer:
    """The first half of a page as keys and the second as values: the order of bytes within a chunk is all that comes of
    it.
    """
    half = pages.shape[1] // 2
    shape = len(pages), block_tokens, 1, 1, half // block_tokens, 1
    return PagedLayer(pages[:, :half].view(shape), pages[:, half:].view(shape))


def find_packings(
    block_tokens: int, heads: int, head_dim: int, dtype: torch.dtype, write: Write
) -> tuple[Packing, Packing]:
    """How the engine packs keys and values. Raises ValueError when that is none of the known packings."""
    generator = torch.Generator().manual_seed(1)
    shape = (block_tokens, heads, head_dim)
    states = [_samples(shape, dtype, generator) for _ in range(2)]
    cache = torch.zeros((1, heads, block_tokens, 2 * head_dim), dtype=dtype)
    write(states[0], states[1], cache)
    found = []
    for part in (0, 1):
        fitting = [packing for packing in _PACKINGS if _fits(packing, block_tokens, head_dim)]
        matching = [
            packing
            for packing in fitting
            if torch.equal(_read_part(packed_layer(cache, (packing, packing)), part, block_tokens), states[part])
        ]
        if not matching:
            raise ValueError(f"the engine packs {'values' if part else 'keys'} in a way that is not known")
        found.append(matching[0])
    return found[0], found[1]


def _samples(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype != torch.uint8:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(1, 120, shape, generator=generator, dtype=torch.uint8)  # numbers in any 8-bit float


def _fits(packing: Packing, block_tokens: int, head_dim: int) -> bool:
    return block_tokens % packing.tokens == 0 and head_dim % packing.elements == 0


def _read_part(layer: PagedLayer, part: int, tokens: int) -> torch.Tensor:
    return layer.read(Blocks((0,)), 0, tokens, part)


def _unpacked(half: torch.Tensor, tokens: int, packing: Packing) -> torch.Tensor:
    n, e = packing.tokens, packing.elements
    digits = (tokens // n, half.shape[2] // tokens // e, n, e)
    return half.view(*half.shape[:2], *digits).permute(0, 2, 4, 1, 3, 5)
