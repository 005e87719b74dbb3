"""Files of slots in a folder that may be full."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from nixl_client.connectors.llama_cpp.slot_folder import SlotFolder
from nixl_client.connectors.llama_cpp.slot_store import RUN_TOKENS, SlotStore
from tests.unit.nixl_client.connectors.llama_cpp.played import FORM, PlayedClient


def test_a_file_has_its_space_before_anything_is_written_into_it(tmp_path: Path) -> None:
    """In a full folder nothing is fetched in vain."""
    path = tmp_path / "a.slot"
    client = PlayedClient()
    tokens = np.arange(8 * RUN_TOKENS, dtype=np.uint32)

    def fails() -> None:
        raise OSError("the store is away")

    client.fetching = fails
    store = SlotStore(cast(Any, client), 1 << 20)
    with pytest.raises(OSError, match="away"):
        store.load([f"key {index}" for index in range(8)], FORM, tokens, SlotFolder(tmp_path), path.name)
    assert path.stat().st_blocks * 512 >= path.stat().st_size == FORM.plan(tokens).nbytes
    store.close()


def test_a_load_does_not_follow_a_link_that_takes_the_place_of_its_file(tmp_path: Path) -> None:
    """Whoever may write the folder could have any file of this host overwritten."""
    folder, victim = tmp_path / "slots", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"v" * (1 << 20))
    client = PlayedClient()
    tokens = np.arange(2 * RUN_TOKENS, dtype=np.uint32)
    keys = ["key 0", "key 1"]
    client.chunks = dict.fromkeys(keys, b"k" * (FORM.token_bytes * RUN_TOKENS))

    def swap() -> None:
        (file,) = folder.iterdir()
        file.unlink()
        file.symlink_to(victim)

    client.fetching = swap
    store = SlotStore(cast(Any, client), 1 << 20)
    assert store.load(keys, FORM, tokens, SlotFolder(folder), "a.slot") == 2
    assert victim.read_bytes() == b"v" * (1 << 20)
    with pytest.raises(OSError, match="File exists"):
        store.load(keys, FORM, tokens, SlotFolder(folder), "a.slot")
    store.close()
