"""Files of slots in a folder that may be full."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from nixl_client.connectors.llama_cpp.slot_store import RUN_TOKENS, SlotStore
from tests.unit.nixl_client.connectors.llama_cpp.played import FORM, PlayedClient


def test_a_file_has_its_space_before_anything_is_written_into_it(tmp_path: Path) -> None:
    """In a full folder a write through a map of the file would end the process; so that is found before."""
    path = tmp_path / "a.slot"
    client = PlayedClient()
    tokens = np.arange(8 * RUN_TOKENS, dtype=np.uint32)

    def fails() -> None:
        raise OSError("the store is away")

    client.fetching = fails
    store = SlotStore(cast(Any, client), 1 << 20)
    with pytest.raises(OSError, match="away"):
        store.load([f"key {index}" for index in range(8)], FORM, tokens, path)
    assert path.stat().st_blocks * 512 >= path.stat().st_size == FORM.plan(tokens).nbytes
    store.close()
