"""What DECISIONS 49 rests on: one layer out of vLLM's paged blocks into one payload, as a list of pieces in one NIXL
write, and as a copy and a write of the whole. `python -m bench.experiments.engine.scatter`; both give the same bytes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import torch

from bench.core.show import fixed, written
from nixl_client.connectors.vllm.blocks import Blocks, plain_layer
from objectcache.adapters.nixl_agent import Agent, PostedTransfer, TransferState
from objectcache.adapters.nixl_memory import Memory
from objectcache.calibration.samples import spread

TOKENS, HEADS, HEAD_DIM, BLOCK_TOKENS = 2048, 8, 128, 32
RUNS = 7


def main() -> None:
    """Print milliseconds of both and their ratio, for a layer of Llama 3.1 8B in bfloat16."""
    shape = (TOKENS // BLOCK_TOKENS, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    staging = torch.empty((2, TOKENS, HEADS, HEAD_DIM), dtype=torch.bfloat16)
    payload = np.zeros(cache.nbytes, np.uint8)
    source, staged = (Memory(each.data_ptr(), each.nbytes) for each in (cache, staging))
    target = Memory(payload.ctypes.data, payload.nbytes)
    ours, theirs = Agent(str(uuid.uuid4())), Agent(str(uuid.uuid4()))
    kept = [ours.register(source), ours.register(staged), theirs.register(target)]
    peer = ours.add_peer(theirs.metadata())
    layer, blocks, spans = plain_layer(cache), Blocks(range(len(cache))), _pieces(cache)

    def copy_and_write() -> tuple[PostedTransfer, TransferState]:
        for part in (0, 1):
            staging[part] = layer.read(blocks, 0, TOKENS, part)
        return ours.post_write(peer, staged, target)

    def timed_s(post: Callable[[], tuple[PostedTransfer, TransferState]]) -> float:
        payload.fill(0)
        began_s = time.perf_counter()
        transfer, state = post()
        while state is not TransferState.DONE:
            theirs.notices()
            state = transfer.poll()
        transfer.release()
        return time.perf_counter() - began_s

    listed_s, copied_s = [], []
    for _ in range(RUNS):
        listed_s.append(timed_s(lambda: ours.post_gathered_write(peer, spans, [target])))
        wanted = payload.copy()
        copied_s.append(timed_s(copy_and_write))
        if not np.array_equal(payload, wanted):
            raise AssertionError("both ways must give the same bytes")
    ratios = [listed / copied for listed, copied in zip(listed_s, copied_s, strict=True)]
    print(f"{len(spans)} pieces of {spans[0, 1]} bytes, {payload.nbytes / 1e6:.1f} MB, {RUNS} runs")
    print(f"pieces: {written(asdict(spread(listed_s)), fixed(1, 1e3))} ms")
    print(f"copy and write: {written(asdict(spread(copied_s)), fixed(1, 1e3))} ms")
    print(f"ratio: {written(asdict(spread(ratios)), fixed(1))}")
    for registration in kept:
        registration.close()


def _pieces(cache: torch.Tensor) -> np.ndarray:
    """Rows of (address, nbytes) in the payload's order: keys, then values, token after token, head after head."""
    part, token, head = np.unravel_index(np.arange(2 * TOKENS * HEADS), (2, TOKENS, HEADS))
    cell = ((token // BLOCK_TOKENS) * HEADS + head) * BLOCK_TOKENS + token % BLOCK_TOKENS
    nbytes = HEAD_DIM * cache.itemsize
    addresses = cache.data_ptr() + (2 * cell + part) * nbytes
    return np.stack([addresses, np.full_like(addresses, nbytes)], axis=1)


if __name__ == "__main__":
    main()
