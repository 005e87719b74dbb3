"""A file for each block, written under another name and renamed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from bench.beds.kv_stores.adapter import halves
from calibration.content import Bytes


class FilesAdapter:
    """Blocks in one folder; nothing is synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def initialize(self) -> bool:
        self._folder.mkdir(exist_ok=True)
        return True

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        temporary = self._folder / f"{block_id}.new"
        with temporary.open("wb") as file:
            file.write(key_data.data)
            file.write(value_data.data)
        temporary.rename(self._folder / block_id)
        return True

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        try:
            return halves(np.fromfile(self._folder / block_id, dtype=np.uint8))
        except FileNotFoundError:
            return None

    def contains(self, block_id: str) -> bool:
        return (self._folder / block_id).exists()

    def clear(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()


def make(folder: Path) -> FilesAdapter:
    """For the worker."""
    return FilesAdapter(folder / "blocks")
