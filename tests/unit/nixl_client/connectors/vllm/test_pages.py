"""Blocks of layers as they lie, as the objects of vLLM's tier have them."""

from __future__ import annotations

import pytest
import torch

from nixl_client.connectors.vllm.blocks import Blocks, page_layers

BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 4, 6
PAGE_BYTES = HEADS * TOKENS * WIDTH * 4


def caches(count: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> list[torch.Tensor]:
    """Layers (block, head, token, width) that lie in memory in this order of dimensions."""
    sizes = [(BLOCKS, HEADS, TOKENS, WIDTH)[each] for each in order]
    back = [order.index(each) for each in range(4)]
    return [torch.randn(sizes).permute(back) for _ in range(count)]


def packed(order: list[int]) -> list[torch.Tensor]:
    """Layers that lie side by side in each block, in this order."""
    memory = torch.randn(BLOCKS, len(order), HEADS, TOKENS, WIDTH)
    return [memory[:, place] for place in order]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("ids", [(1, 2, 4), (5, 0)])
def test_pages_go_to_chunks_and_back_as_they_lie(order: tuple[int, ...], ids: tuple[int, ...]) -> None:
    (cache,), (other,) = caches(1, order), caches(1, order)
    (layer,), (target,) = page_layers([cache], PAGE_BYTES, TOKENS), page_layers([other], PAGE_BYTES, TOKENS)
    blocks, count = Blocks(ids), len(ids) * TOKENS
    parts = [layer.read(blocks, 0, count, part).view(len(ids), TOKENS, 1, -1) for part in (0, 1)]
    chunks = torch.stack(parts, dim=1)
    lying = cache.permute(order)  # as it lies in memory
    for index, block in enumerate(ids):
        assert chunks[index].flatten().numpy().tobytes() == lying[block].contiguous().numpy().tobytes()
    untouched = other.clone()
    for part in (0, 1):
        target.write(blocks, chunks[:, part], 0, part)
    for block in range(BLOCKS):
        assert torch.equal(other[block], cache[block] if block in ids else untouched[block])


def test_layers_that_lie_side_by_side_must_be_in_the_models_order() -> None:
    layers = page_layers(packed([0, 1, 2]), PAGE_BYTES, TOKENS)
    assert [layer.keys.stride(0) for layer in layers] == [3 * PAGE_BYTES] * 3
    with pytest.raises(ValueError, match="do not lie in the model's order"):
        page_layers(packed([0, 2, 1]), PAGE_BYTES, TOKENS)


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(BLOCKS, HEADS, TOKENS, 2 * WIDTH)[..., :WIDTH],
        torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH + 1),
        torch.zeros(HEADS, BLOCKS, TOKENS, WIDTH).permute(1, 0, 2, 3),
    ],
    ids=["with gaps", "of another size", "keys and values apart"],
)
def test_a_block_that_is_no_run_of_bytes_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="is no run of"):
        page_layers([cache], PAGE_BYTES, TOKENS)
