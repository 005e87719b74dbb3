"""LMCache's L2 adapters in a process of their own: `python -m bench.beds.kv_peers.lmcache_l2_host`, in an environment
with LMCache. Reads JSON requests, writes JSON answers, a line each.

An adapter is made by LMCache's own factory from the configuration that `lmcache server --l2-adapter` takes, and called
as its controllers call it: tasks are submitted, and an event descriptor says when they are over. One adapter stores and
another one, which has seen no key yet, finds and loads, as in a server that was started anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR")

import torch  # noqa: E402
from lmcache.cli.commands.bench.l2_adapter_bench.data import (  # noqa: E402
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    wait_eventfd,
)
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config  # noqa: E402

PATIENCE_S = 60.0
PAGE_BYTES = 4096


class AdapterBed:
    """Two adapters of one configuration, and the memory that they store from and load into."""

    def __init__(self, config: dict[str, Any], chunks: int, chunk_bytes: int) -> None:
        self._chunks, self._chunk_bytes = chunks, chunk_bytes
        (parsed,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(config)])).adapters
        self._memory = make_aligned_tensor(2 * chunks * chunk_bytes, PAGE_BYTES)
        described = create_l1_memory_desc(self._memory, align_bytes=PAGE_BYTES)
        self._writer, self._reader = (create_l2_adapter(parsed, l1_memory_desc=described) for _ in range(2))
        self._sources = make_memory_objects(self._memory, chunks, chunk_bytes, 0)
        self._targets = make_memory_objects(self._memory, chunks, chunk_bytes, chunks * chunk_bytes)

    def timed(self, seed: int) -> dict[str, Any]:
        """Seconds of each call for chunks that nobody has stored, and whether all came as they were."""
        generator = torch.Generator().manual_seed(seed)
        for source, target in zip(self._sources, self._targets, strict=True):
            source.raw_data.random_(generator=generator)
            target.raw_data.zero_()
        keys = [
            ObjectKey(chunk_hash=seed.to_bytes(8, "big") + number.to_bytes(8, "big"), model_name="bench", kv_rank=0)
            for number in range(self._chunks)
        ]
        layout = MemoryLayoutDesc(shapes=[torch.Size([self._chunk_bytes])], dtypes=[torch.uint8])
        began_s = time.perf_counter()
        task = self._writer.submit_store_task(keys, self._sources)
        store = _ended(self._writer.get_store_event_fd(), lambda: self._writer.pop_completed_store_tasks().get(task))
        stored_s = time.perf_counter()
        task = self._reader.submit_lookup_and_lock_task(keys, {0: layout})
        lookup = self._reader.query_lookup_and_lock_result
        found = _ended(self._reader.get_lookup_and_lock_event_fd(), lambda: lookup(task))
        looked_up_s = time.perf_counter()
        loading = self._reader.submit_load_task(keys, self._targets)
        loaded = _ended(self._reader.get_load_event_fd(), lambda: self._reader.query_load_result(loading))
        loaded_s = time.perf_counter()
        self._reader.submit_unlock(keys)
        self._writer.delete(keys)  # or the rounds would fill the disk
        pairs = zip(self._sources, self._targets, strict=True)
        is_right = store.is_successful() and found.popcount() == loaded.popcount() == self._chunks
        return {
            "store": stored_s - began_s,
            "lookup": looked_up_s - stored_s,
            "load": loaded_s - looked_up_s,
            "is_right": is_right and all(torch.equal(source.raw_data, target.raw_data) for source, target in pairs),
        }

    def close(self) -> None:
        """End both adapters."""
        self._writer.close()
        self._reader.close()


class L2Host:
    """Beds by name."""

    def __init__(self) -> None:
        self._beds: dict[str, AdapterBed] = {}

    def open(self, bed: str, config: dict[str, Any], chunks: int, chunk_bytes: int) -> None:
        """Make a bed."""
        self._beds[bed] = AdapterBed(config, chunks, chunk_bytes)

    def timed(self, bed: str, seed: int) -> dict[str, Any]:
        """One round."""
        return self._beds[bed].timed(seed)

    def close(self) -> None:
        """End all beds."""
        for bed in self._beds.values():
            bed.close()


def _ended(event: int, result: Callable[[], Any]) -> Any:
    """The result of a task, once the descriptor says that it is over. Raises TimeoutError."""
    while (found := result()) is None:
        if not wait_eventfd(event, PATIENCE_S):
            raise TimeoutError(f"the adapter has not answered in {PATIENCE_S:.0f} s")
    return found


def main() -> None:
    """Answer until the input ends."""
    host = L2Host()
    answer: dict[str, Any] = {"is_ready": True}
    while True:
        OUT.write(json.dumps(answer) + "\n")
        OUT.flush()
        line = sys.stdin.readline()
        if not line:
            break
        request = json.loads(line)
        try:
            answer = {"value": getattr(host, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    host.close()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
