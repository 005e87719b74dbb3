"""SGLang's hierarchical cache on a CPU, in a process of its own: reads JSON requests, writes JSON answers, a line each.

    python -m tests.engines.sglang_host

It has SGLang's own host pools, its controllers with their threads, and its factory of storage back-ends; only the GPU
and the radix tree are missing. Pages are made from a seed, put into the pools and read from there by SGLang's own
functions, and compared byte by byte. Only answers go to standard output.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
warnings.simplefilter("ignore")

from tests.engines.sglang_stand_ins import install  # noqa: E402

install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s", force=True)
PATIENCE_S = 60.0
CANARY = 0x5A


def page_hashes(key: Sequence[int], prior_hash: str | None = None, page_size: int = 1) -> list[str]:
    """A chain of hashes, one for each page, as SGLang's own, which is compiled where it runs."""
    digest = bytes.fromhex(prior_hash) if prior_hash else b""
    hashes = []
    for first in range(0, len(key) - page_size + 1, page_size):
        digest = hashlib.sha256(digest + np.asarray(key[first : first + page_size], "<u4").tobytes()).digest()
        hashes.append(digest.hex())
    return hashes


cache_controller.get_storage_hash_str = page_hashes
hybrid_cache_controller.get_storage_hash_str = page_hashes


class Node:
    """An engine process: pools, a controller, and a back-end."""

    def __init__(
        self,
        backend: str,
        options: dict[str, Any],
        *,
        kind: str = "mha",
        layout: str = "page_first",
        model: str = "tiny/model",
        page_tokens: int = 16,
        pages: int = 64,
        layers: int = 4,
        heads: int = 2,
        head_dim: int = 64,
        tp_rank: int = 0,
        tp_size: int = 1,
        failures: float = 0.0,
        metrics: bool = False,
    ) -> None:
        self.page_tokens, self.page_count = page_tokens, pages
        if failures:
            os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = str(failures)
        else:
            os.environ.pop("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", None)
        tokens = pages * page_tokens
        places = {"device_capacity_tokens": tokens, "start_layer": 0, "end_layer": layers, "pin_memory": False}
        geometry = (1.0, 0, page_tokens, layout)
        device: Any
        host: Any
        if kind == "mla":
            device = MLATokenToKVPool(tokens, page_tokens, torch.bfloat16, 512, 64, layers, "cpu", False)
            info = device.get_device_pool_infos()[0].buffer_info
            host = MLATokenToKVPoolHost(info, *geometry, target_layer_num=layers, **places)
        else:
            device = MHATokenToKVPool(tokens, page_tokens, torch.bfloat16, heads, head_dim, layers, "cpu", False)
            host = MHATokenToKVPoolHost(device.get_device_pool_infos()[0].buffer_info, *geometry, **places)
        self.pools: dict[str, Any] = {"kv": host}
        if kind == "hybrid":
            state = MambaStateBufferInfo(
                temporal=torch.zeros(2, pages, 4, 160), conv=(torch.zeros(2, pages, 320, dtype=torch.bfloat16),)
            )
            self.pools["mamba"] = MambaPoolHost(state, 1.0, 0, device_capacity=pages, pin_memory=False, layout=layout)
        ranks = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": 0, "pp_size": 1}
        get_parallel().override_permanently(
            **ranks, attn_tp_rank=tp_rank, attn_tp_size=tp_size, attn_dp_rank=0, attn_dcp_size=1, attn_dcp_rank=0
        )
        arguments: dict[str, Any] = {
            "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: device),
            "page_size": page_tokens,
            "tp_group": None,
            "load_cache_event": threading.Event(),
            "io_backend": "direct",
            "storage_backend": backend,
            "model_name": model,
            "storage_backend_extra_config": dict(options),
            "enable_storage_metrics": metrics,
        }
        if kind == "hybrid":
            entries = [
                PoolEntry(PoolName.KV, host, device, lambda layer: layer, is_primary_index_anchor=True),
                PoolEntry(PoolName.MAMBA, self.pools["mamba"], None, lambda layer: layer),
            ]
            self.controller = _LoneHybrid(mem_pool_host=HostPoolGroup(entries), **arguments)
        else:
            self.controller = _Lone(mem_pool_host=host, **arguments)
        self.backend = self.controller.storage_backend
        self.own = getattr(self.backend, "_backend", self.backend)

    def fill(self, value: int = CANARY) -> None:
        """Give every byte of the pools one value."""
        for name, pool in self.pools.items():
            page = pool.get_dummy_flat_data_page()
            page.view(torch.uint8).fill_(value)
            for number in range(self._count(name)):
                pool.set_from_flat_data_page(number * pool.page_size, page)

    def page(self, pool: str, seed: int, number: int) -> torch.Tensor:
        """The bytes of a page."""
        dummy = self.pools[pool].get_dummy_flat_data_page()
        rng = np.random.default_rng([seed, number, len(pool)])
        return torch.from_numpy(rng.integers(0, 256, dummy.numel() * dummy.element_size(), np.uint8))

    def put(self, pool: str, seed: int, slots: Sequence[int]) -> None:
        """Put the first pages of a seed into these pages of a pool."""
        host = self.pools[pool]
        dtype = host.get_dummy_flat_data_page().dtype
        for number, slot in enumerate(slots):
            host.set_from_flat_data_page(slot * host.page_size, self.page(pool, seed, number).view(dtype))

    def is_right(self, pool: str, seed: int, slots: Sequence[int], count: int, first: int = 0) -> bool:
        """Whether the first `count` of these pages of a pool hold those of a seed, and pages beside them nothing."""
        host = self.pools[pool]
        for number in range(self._count(pool)):
            found = host.get_data_page(number * host.page_size).contiguous().view(torch.uint8).reshape(-1)
            if number not in slots:
                is_right = bool((found == CANARY).all())
            elif slots.index(number) < count:
                is_right = torch.equal(found, self.page(pool, seed, first + slots.index(number)))
            else:
                is_right = True  # a page that did not come may hold anything
            if not is_right:
                return False
        return True

    def slots(self, pool: str, seed: int, count: int) -> list[int]:
        """Some pages of a pool, in no order."""
        return [int(each) for each in np.random.default_rng(seed + 1).permutation(self._count(pool))[:count]]

    def tokens(self, seed: int, count: int) -> list[int]:
        """The tokens of so many pages."""
        whole = np.random.default_rng(seed).integers(0, 50_000, 4096 * 16)
        return [int(token) for token in whole[: count * self.page_tokens]]

    def hashes(self, seed: int, count: int) -> list[str]:
        """The names that SGLang has for them."""
        return page_hashes(self.tokens(seed, count), None, self.page_tokens)

    def indices(self, pool: str, slots: Sequence[int]) -> torch.Tensor:
        """The tokens of these pages in a pool."""
        size = self.pools[pool].page_size
        return torch.tensor([slot * size + token for slot in slots for token in range(size)], dtype=torch.int64)

    def _count(self, pool: str) -> int:
        return int(self.pools[pool].size // self.pools[pool].page_size)


def hold_once(traffic: Any) -> None:
    """Have the next request of a load wait, as `Host.get` says."""
    begin = traffic._begin

    def held(*arguments: Any) -> Any:
        traffic._begin = begin
        fetch = begin(*arguments)
        fetch.wait_admitted(PATIENCE_S)
        OUT.write(json.dumps({"is_begun": True}) + "\n")
        OUT.flush()
        sys.stdin.readline()
        return fetch

    traffic._begin = held


class _Lone(cache_controller.HiCacheController):  # type: ignore[misc]
    """A controller whose process is alone."""

    def _create_sync_groups(self) -> list[Any]:
        return []


class _LoneHybrid(hybrid_cache_controller.HybridCacheController):  # type: ignore[misc]
    """One of several pools, whose process is alone."""

    def _create_sync_groups(self) -> list[Any]:
        return []


class Host:
    """The requests of a test. A node is named in each."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def open(self, node: str, backend: str, options: dict[str, Any], **arguments: Any) -> float:
        """Start an engine process; how long that took."""
        began_s = time.monotonic()
        self.nodes[node] = Node(backend, options, **arguments)
        return time.monotonic() - began_s

    def close(self, node: str) -> None:
        """End it."""
        self.nodes.pop(node).controller.detach_storage_backend()

    def set(self, node: str, seed: int, count: int) -> list[bool]:
        """Store pages of KV by one call of the back-end."""
        at = self.nodes[node]
        slots = at.slots("kv", seed, count)
        at.put("kv", seed, slots)
        return list(at.backend.batch_set_v1(at.hashes(seed, count), at.indices("kv", slots)))

    def exists(self, node: str, seed: int, count: int) -> int:
        """How many of them are stored."""
        at = self.nodes[node]
        return int(at.backend.batch_exists(at.hashes(seed, count)))

    def get(self, node: str, seed: int, count: int, is_held: bool = False) -> tuple[list[bool], bool, float]:
        """Load them into other places: for each whether it came, whether the bytes are right, and the seconds. One that
        is held stops once the server has admitted its request, says so, and goes on after a line.
        """
        at = self.nodes[node]
        at.fill()
        if is_held:
            hold_once(at.own.traffic)
        slots = at.slots("kv", seed + 1000, count)
        began_s = time.monotonic()
        found = list(at.backend.batch_get_v1(at.hashes(seed, count), at.indices("kv", slots)))
        seconds = time.monotonic() - began_s
        leading = found.index(False) if False in found else len(found)
        return found, at.is_right("kv", seed, slots, leading), seconds

    def timed(self, node: str, seed: int, count: int) -> dict[str, Any]:
        """Seconds of storing pages that nobody has stored, of finding them, and of loading them into other places, each
        as a controller's thread calls the back-end, whichever interface that has; and whether all came right.
        """
        at = self.nodes[node]
        controller, hashes = at.controller, at.hashes(seed, count)
        slots, others = at.slots("kv", seed, count), at.slots("kv", seed + 1000, count)
        at.put("kv", seed, slots)
        began_s = time.perf_counter()
        is_stored = controller.page_set_func(hashes, at.indices("kv", slots))
        set_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        found = at.backend.batch_exists(hashes)
        exists_s = time.perf_counter() - began_s
        at.fill()
        request = SimpleNamespace(request_id="timed", is_terminated=lambda: False)
        began_s = time.perf_counter()
        came = controller.page_get_func(request, hashes, at.indices("kv", others))
        get_s = time.perf_counter() - began_s
        is_right = is_stored and found == came == count and at.is_right("kv", seed, others, count)
        return {"set": set_s, "exists": exists_s, "get": get_s, "is_right": bool(is_right)}

    def set_all(self, node: str, seed: int, count: int, states: Sequence[int]) -> dict[str, list[bool]]:
        """Store pages of KV, and states for these pages, by the calls for several pools."""
        at = self.nodes[node]
        slots, hashes = at.slots("kv", seed, count), at.hashes(seed, count)
        at.put("kv", seed, slots)
        state_slots = at.slots("mamba", seed, count)
        at.put("mamba", seed, state_slots)
        transfers = [
            PoolTransfer(PoolName.KV, at.indices("kv", slots), keys=hashes),
            PoolTransfer(
                PoolName.MAMBA,
                at.indices("mamba", [state_slots[page] for page in states]),
                keys=[hashes[page] for page in states],
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            ),
        ]
        return {str(name): list(found) for name, found in at.backend.batch_set_v2(transfers).items()}

    def exists_all(self, node: str, seed: int, count: int, policy: str = "trailing_pages") -> tuple[int, Any, Any]:
        """The hit, by pool, and the lengths that can be restored."""
        at = self.nodes[node]
        hashes = at.hashes(seed, count)
        transfer = PoolTransfer(PoolName.MAMBA, keys=hashes[-1:], hit_policy=PoolHitPolicy(policy))
        result = at.backend.batch_exists_v2(hashes, [transfer])
        pools = {str(name): pages for name, pages in result.extra_pool_hit_pages.items()}
        return result.kv_hit_pages, pools, result.restorable_prefix_pages

    def get_all(self, node: str, seed: int, count: int, state: int) -> tuple[dict[str, list[bool]], bool]:
        """Load pages of KV, and the state of one page: whether each came, and whether the bytes are right."""
        at = self.nodes[node]
        at.fill()
        hashes = at.hashes(seed, count)
        slots, state_slots = at.slots("kv", seed + 1000, count), at.slots("mamba", seed + 1000, 1)
        transfers = [
            PoolTransfer(PoolName.KV, at.indices("kv", slots), keys=hashes),
            PoolTransfer(PoolName.MAMBA, at.indices("mamba", state_slots), keys=[hashes[state]]),
        ]
        found = {str(name): list(each) for name, each in at.backend.batch_get_v2(transfers).items()}
        kv, mamba = found["kv"], found["mamba"]
        leading = kv.index(False) if False in kv else len(kv)
        is_right = at.is_right("kv", seed, slots, leading)
        return found, is_right and at.is_right("mamba", seed, state_slots, int(mamba[0]), first=state)

    def backup(self, node: str, seed: int, count: int) -> int:
        """Have the controller's thread store pages; how many it says are stored."""
        at = self.nodes[node]
        slots, hashes = at.slots("kv", seed, count), at.hashes(seed, count)
        at.put("kv", seed, slots)
        extra = {}
        if "mamba" in at.pools:
            state = at.slots("mamba", seed, count)
            at.put("mamba", seed, state)
            extra["extra_pools"] = [
                PoolTransfer(
                    PoolName.MAMBA,
                    at.indices("mamba", state[-1:]),
                    keys=hashes[-1:],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            ]
        at.controller.write_storage(at.indices("kv", slots), at.tokens(seed, count), hash_value=hashes, **extra)
        operation = at.controller.ack_backup_queue.get(timeout=PATIENCE_S)
        return int(operation.completed_tokens) // at.page_tokens

    def prefetch(self, node: str, seed: int, count: int) -> tuple[int, int, bool]:
        """Have the controller's threads look pages up and load them, as the scheduler has them: how many were found and
        how many came, and whether the bytes are right.
        """
        at = self.nodes[node]
        at.fill()
        request: Any = f"request-{seed}"
        extra: dict[str, Any] = {}
        state_slots = at.slots("mamba", seed + 1000, 1) if "mamba" in at.pools else []
        if state_slots:
            request = SimpleNamespace(rid=request)
            extra["extra_pools"] = [
                PoolTransfer(
                    PoolName.MAMBA,
                    at.indices("mamba", state_slots),
                    keys=at.hashes(seed, count)[-1:],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            ]
        at.controller.prefetch(request, at.tokens(seed, count), **extra)
        operation = at.controller.prefetch_hit_queue.get(timeout=PATIENCE_S)
        found = int(operation.storage_hit_count) // at.page_tokens
        slots = at.slots("kv", seed + 1000, found)
        operation.host_indices = at.indices("kv", slots)
        at.controller.prefetch_buffer.put(operation)
        loaded, states = 0, 0
        while True:
            ack = at.controller.ack_prefetch_queue.get(timeout=PATIENCE_S)
            if ack.completed_tokens is not None:
                loaded = int(ack.completed_tokens) // at.page_tokens
            states += sum((ack.pool_hits or {}).values())
            if ack.completed_req:
                break
        is_right = at.is_right("kv", seed, slots, loaded)
        if state_slots and states:
            is_right = is_right and at.is_right("mamba", seed, state_slots, 1, first=found - 1)
        return found, loaded, is_right

    def hashes(self, node: str, seed: int, count: int) -> list[str]:
        """SGLang's names of the pages."""
        return self.nodes[node].hashes(seed, count)

    def names(self, node: str, pool: str, seed: int, count: int) -> list[str]:
        """The objects of our back-end."""
        at = self.nodes[node]
        return list(at.own._pages[pool].space.object_names(at.hashes(seed, count)))

    def counters(self, node: str) -> dict[str, float]:
        """Our back-end's figures."""
        return dict(self.nodes[node].own.traffic.counters.totals)

    def stats(self, node: str) -> dict[str, Any]:
        """The figures that SGLang asks for."""
        return dict(vars(self.nodes[node].backend.get_stats()))

    def clear(self, node: str) -> None:
        """Clear the storage, as SGLang's administration does."""
        self.nodes[node].controller.storage_backend.clear()

    def flags(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What SGLang's server makes of these arguments, as far as they are about its hierarchical cache."""
        import argparse

        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        found = vars(parser.parse_args(list(arguments)))
        return {name: value for name, value in found.items() if "hicache" in name or name == "page_size"}

    def threads(self) -> int:
        """How many threads of ours there are."""
        return sum(thread.name.startswith("objectcache") for thread in threading.enumerate())


def main() -> None:
    """Answer until the input ends."""
    host = Host()
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
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
    OUT.write(json.dumps({"is_closed": True}) + "\n")
    OUT.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
