"""CASCADE's Table VI: what a content address costs, beside the put of the same block and our own content id."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.beds.kv_stores.adapter import block
from bench.core.show import Json
from calibration.content import Bytes
from calibration.samples import interleaved, spread
from calibration.servers import running_server
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport
from nixl_client.objects import Path as ObjectWay
from storage_server.planning.block_checksums import BlockChecksums
from storage_server.planning.extent import Extent
from storage_server.store.upkeep.dedup_rows import content_id

BLOCKS = {64: 20 * MIB, 256: 80 * MIB}
"""Tokens and bytes of a block of LLaMA-70B, of 320 KiB a token (the paper writes 82 MB)."""


def measure_hashing(parent: Path | None, runs: int, seed: int) -> Json:
    """Seconds, and parts of the time of a put."""
    with running_server(parent) as server, server.client(Transport.HTTP) as client:
        blocks = {
            f"{tokens} tokens": _measured(client, np.concatenate(block(f"{seed}-{tokens}", nbytes)), runs)
            for tokens, nbytes in BLOCKS.items()
        }
    return {"blocks": blocks}


def _measured(client: ObjectCacheClient, body: Bytes, runs: int) -> Json:
    checksums = BlockChecksums()
    checksums.update(body.data)
    extent = Extent("f", 0, body.nbytes, checksums.packed())
    tasks: dict[str, Callable[[], object]] = {
        "put": lambda: client.objects.put_object("block", body, path=ObjectWay.TCP),
        "sha256": lambda: hashlib.sha256(body.data).digest(),
        "crc32c_blocks": lambda: BlockChecksums().update(body.data),
        "content_id": lambda: content_id("owner", extent),
    }
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for round_index, name in interleaved(list(tasks), runs, f"blocks of {body.nbytes // MIB} MiB"):
        started_s = time.monotonic()
        tasks[name]()
        if round_index > 0:
            taken[name].append(time.monotonic() - started_s)
    return {
        "block_bytes": body.nbytes,
        "seconds": {name: spread(seconds) for name, seconds in taken.items()},
        "over_put": {
            name: statistics.median(one / other for one, other in zip(taken[name], taken["put"], strict=True))
            for name in tasks
            if name != "put"
        },
    }
