"""What DECISIONS 49 rests on: one layer out of vLLM's paged blocks into one payload, as a list of pieces in one NIXL
write, and as a copy and a write of the whole. `python -m bench.engine.scatter`; both give the same bytes.
"""

from __future__ import annotations

import statistics
import time
import uuid

import numpy as np
import torch

from adapters.nixl_agent import Agent, Memory, PostedTransfer, TransferState
from nixl_client.connectors.vllm.blocks import Blocks, plain_layer

TOKENS, HEADS, HEAD_DIM, BLOCK_TOKENS = 2048, 8, 128, 32
RUNS = 7


def main() -> None:
    """Print milliseconds of both and their ratio, for a layer of Llama 3.1 8B in bfloat16."""
    shape = (TOKENS // BLOCK_TOKENS, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    staging = torch.empty((2, TOKENS, HEADS, HEAD_DIM), dtype=torch.bfloat16)
    payload = np.zeros(cache.nbytes, np.uint8)
    ours, theirs = Agent(str(uuid.uuid4())), Agent(str(uuid.uuid4()))
    target = Memory(payload.ctypes.data, payload.nbytes)
    kept = [ours.register(_memory(each)) for each in (cache, staging)] + [theirs.register(target)]
    peer = ours.add_peer(theirs.metadata())
    layer, blocks, spans = plain_layer(cache), Blocks(range(len(cache))), _pieces(cache)
    listed_s, copied_s = [], []
    for _ in range(RUNS):
        payload.fill(0)
        began_s = time.perf_counter()
        _finish(theirs, *ours.post_gathered_write(peer, spans, target))
        listed_s.append(time.perf_counter() - began_s)
        wanted = payload.copy()
        payload.fill(0)
        began_s = time.perf_counter()
        for part in (0, 1):
            staging[part] = layer.read(blocks, 0, TOKENS, part)
        _finish(theirs, *ours.post_write(peer, _memory(staging), target))
        copied_s.append(time.perf_counter() - began_s)
        if not np.array_equal(payload, wanted):
            raise AssertionError("both ways must give the same bytes")
    ratios = sorted(listed / copied for listed, copied in zip(listed_s, copied_s, strict=True))
    print(f"{len(spans)} pieces of {spans[0, 1]} bytes, {payload.nbytes / 1e6:.1f} MB, {RUNS} runs")
    for name, seconds in (("pieces", listed_s), ("copy and write", copied_s)):
        print(f"{name}: {_milliseconds(seconds)} ms")
    print(f"ratio: {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")
    for registration in kept:
        registration.close()


def _memory(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.data_ptr(), tensor.nbytes)


def _pieces(cache: torch.Tensor) -> np.ndarray:
    """Rows of (address, nbytes) in the payload's order: keys, then values, token after token, head after head."""
    part, token, head = np.unravel_index(np.arange(2 * TOKENS * HEADS), (2, TOKENS, HEADS))
    cell = ((token // BLOCK_TOKENS) * HEADS + head) * BLOCK_TOKENS + token % BLOCK_TOKENS
    nbytes = HEAD_DIM * cache.itemsize
    addresses = cache.data_ptr() + (2 * cell + part) * nbytes
    return np.stack([addresses, np.full_like(addresses, nbytes)], axis=1)


def _finish(receiver: Agent, transfer: PostedTransfer, state: TransferState) -> None:
    while state is not TransferState.DONE:
        receiver.notices()
        state = transfer.poll()
    transfer.release()


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f})"


if __name__ == "__main__":
    main()
