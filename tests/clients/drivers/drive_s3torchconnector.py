"""s3torchconnector: mountpoint-s3's client (the CRT from Rust) under torch data sets and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable

import s3torchconnector
from contract import Target
from s3torchconnector import S3ReaderConstructor
from s3torchconnector._s3client import S3Client, S3ClientConfig
from suite import MIB, Driver, main


class S3TorchConnector(Driver):
    version = s3torchconnector.__version__

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        os.environ["AWS_ACCESS_KEY_ID"] = target.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = target.secret_key
        config = S3ClientConfig(part_size=8 * MIB, force_path_style=True, max_attempts=1)
        self._client = S3Client(target.region, endpoint=target.endpoint, s3client_config=config)

    def put(self, key: str, data: bytes) -> None:
        with self._client.put_object(self.target.bucket, key) as writer:
            writer.write(data)

    def get(self, key: str) -> bytes:
        return self._client.get_object(self.target.bucket, key).read()

    def get_range(self, key: str, first: int, last: int) -> bytes:
        reader = self._client.get_object(
            self.target.bucket, key, reader_constructor=S3ReaderConstructor.range_based(buffer_size=0)
        )
        reader.seek(first)
        return reader.read(last - first + 1)

    def list_keys(self, prefix: str) -> Iterable[str]:
        pages = self._client.list_objects(self.target.bucket, prefix, max_keys=2)
        return [entry.key for page in pages for entry in page.object_info]

    multipart = put

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._client.delete_object(self.target.bucket, key)


if __name__ == "__main__":
    main("s3torchconnector", S3TorchConnector)
