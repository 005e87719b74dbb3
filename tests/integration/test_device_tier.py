"""Prefixes that are loaded again come from the device's memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from descriptors.errors import ChunkUnavailable
from nixl_client.device_tier import DeviceTier
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import OWNER
from tests.support.servers import LocalStack


@pytest.mark.parametrize("transport", ["http", "shm"])
def test_only_what_is_not_here_is_fetched(tmp_path: Path, transport: str) -> None:
    keys, chunks = make_chunks(N, LAYOUT)
    wanted = chunks.reshape(N, LAYOUT.num_layers, -1).transpose(1, 0, 2)
    with LocalStack(tmp_path / "data") as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        with running.client("chunks", transport) as client:
            client.put_chunks(keys, list(chunks))
            tier = DeviceTier(N * LAYOUT.chunk_bytes, LAYOUT)
            assert np.array_equal(tier.load(client, keys[:4]).numpy(), wanted[:, :4])
            assert np.array_equal(tier.load(client, keys).numpy(), wanted)
            client.delete(keys)
            assert np.array_equal(tier.load(client, keys).numpy(), wanted)
            with pytest.raises(ChunkUnavailable):
                tier.load(client, [*keys, "0" * 64])
            assert tier.matched(keys) == N
