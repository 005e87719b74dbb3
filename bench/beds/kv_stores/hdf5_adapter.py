"""One HDF5 file with two datasets for each block, as CASCADE's HDF5 baseline has them."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from calibration.content import Bytes


class Hdf5Adapter:
    """Datasets `ID/keys` and `ID/values`, contiguous; HDF5 flushes when it likes."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file = h5py.File(file, "w", libver="latest")

    def initialize(self) -> bool:
        return bool(self._file)

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        if block_id in self._file:
            return True
        group = self._file.create_group(block_id)
        group.create_dataset("keys", data=key_data)
        group.create_dataset("values", data=value_data)
        return True

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        group = self._file.get(block_id)
        if group is None:
            return None
        return np.asarray(group["keys"]), np.asarray(group["values"])

    def contains(self, block_id: str) -> bool:
        return block_id in self._file

    def clear(self) -> None:
        self._file.close()
        self._file = h5py.File(self._path, "w", libver="latest")


def make(folder: Path) -> Hdf5Adapter:
    """For the worker."""
    return Hdf5Adapter(folder / "blocks.h5")
