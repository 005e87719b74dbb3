"""pyarrow's S3FileSystem: the AWS SDK for C++ behind a file system."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import pyarrow
from contract import Target
from pyarrow.fs import FileSelector, FileType, S3FileSystem
from suite import Driver, main


class PyArrow(Driver):
    version = pyarrow.__version__
    notes: ClassVar = {"delete": "leaves an empty marker object for a folder it empties"}

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._files = S3FileSystem(
            access_key=target.access_key,
            secret_key=target.secret_key,
            region=target.region,
            scheme=target.endpoint.partition(":")[0],
            endpoint_override=target.address,
        )

    def put(self, key: str, data: bytes) -> None:
        with self._files.open_output_stream(self._path(key)) as out:
            out.write(data)

    def get(self, key: str) -> bytes:
        with self._files.open_input_stream(self._path(key)) as file:
            return file.read()

    def get_range(self, key: str, first: int, last: int) -> bytes:
        with self._files.open_input_file(self._path(key)) as file:
            return file.read_at(last - first + 1, first)

    def list_keys(self, prefix: str) -> Iterable[str]:
        found = self._files.get_file_info(FileSelector(self._path(prefix.rstrip("/")), recursive=True))
        start = len(self.target.bucket) + 1
        return [entry.path[start:] for entry in found if entry.type is FileType.File]

    multipart = put

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._files.delete_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self.target.bucket}/{key}"


if __name__ == "__main__":
    main("pyarrow", PyArrow)
