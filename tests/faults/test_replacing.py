"""A server that is killed while it replaces chunks by encoded ones: each key shows one or the other, whole."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from descriptors.errors import ObjectCacheError
from descriptors.headers import CODEC_HEADER
from nixl_client.client import Client
from objectcache.kv_codecs.encoding import encode
from objectcache.kv_codecs.layer import Codec
from tests.integration.test_compression import LAYERS, SHAPE, kv_chunks
from tests.integration.test_replacing import KV_LAYOUT
from tests.support.requests import OWNER, request
from tests.support.servers import CONFIG, started
from tests.support.waiting import eventually

ROUNDS = 4
REPLACING = """
[compression]
policy = "adaptive"

[compression.codecs.kivi4-1]
quality = 0.99
decoded_bytes_per_s = "2GB"

[[buckets]]
name = "chunks"
capacity_bytes = "1MiB"
eviction = "lru"
lossy = "replace"
"""


def encoded(chunk: np.ndarray) -> bytes:
    """As the server encodes it: the same bytes always."""
    layers = chunk.reshape(LAYERS, SHAPE.nbytes)
    return b"".join(encode(layer, SHAPE, Codec.KIVI4) for layer in layers)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_kill_leaves_the_exact_chunk_or_the_encoded_one(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG + REPLACING)
    keys, chunks = kv_chunks(400)
    whole = {key: (chunk.tobytes(), encoded(chunk)) for key, chunk in zip(keys, chunks, strict=True)}
    seed = random.Random(7)
    acknowledged: list[str] = []
    seen = {"exact": 0, "encoded": 0}
    for round_index in range(ROUNDS):
        serve = ("serve", "--data", str(tmp_path / "data"), "--port", "0", "--config", str(config))
        with (
            started(*serve) as (url, process),
            Client(url, "chunks", access_key=OWNER[0], secret_key=OWNER[1], transport="http", timeout_s=30) as client,
        ):
            if not round_index:
                assert request(url, "PUT", "/chunks").status == 200
            for key in acknowledged:
                answer = request(url, "GET", f"/chunks/{key}")
                if answer.status == 200:
                    is_encoded = CODEC_HEADER in answer.headers
                    assert answer.body == whole[key][is_encoded]
                    seen["encoded" if is_encoded else "exact"] += 1
                else:
                    assert answer.status == 404
            mine = iter(keys[round_index * 100 : round_index * 100 + 100])

            def write(mine=mine, client=client) -> None:  # type: ignore[no-untyped-def]
                for key in mine:
                    try:
                        client.put_chunks([key], [whole[key][0]], kv_layout=KV_LAYOUT)
                    except (ObjectCacheError, OSError):
                        return
                    acknowledged.append(key)

            before = len(acknowledged)
            writer = threading.Thread(target=write)
            writer.start()
            assert eventually(lambda before=before: len(acknowledged) >= before + seed.randrange(30, 80))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            writer.join()
    assert min(seen.values()) > 5
