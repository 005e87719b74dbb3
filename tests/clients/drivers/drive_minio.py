"""MinIO's Python client."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from importlib.metadata import version

from contract import Target
from minio import Minio
from minio.deleteobjects import DeleteObject
from suite import MIB, Driver, main


class MinioClient(Driver):
    version = version("minio")

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._bucket = target.bucket
        if target.ca_file:
            os.environ["SSL_CERT_FILE"] = target.ca_file
        self._client = Minio(
            target.address,
            access_key=target.access_key,
            secret_key=target.secret_key,
            region=target.region,
            secure=target.is_tls,
        )

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(self._bucket, key, io.BytesIO(data), len(data))

    def get(self, key: str) -> bytes:
        return self._read(key)

    def get_range(self, key: str, first: int, last: int) -> bytes:
        return self._read(key, offset=first, length=last - first + 1)

    def list_keys(self, prefix: str) -> Iterable[str]:
        return [entry.object_name or "" for entry in self._client.list_objects(self._bucket, prefix, recursive=True)]

    def multipart(self, key: str, data: bytes) -> None:
        self._client.put_object(self._bucket, key, io.BytesIO(data), len(data), part_size=8 * MIB)

    def delete(self, keys: list[str]) -> None:
        errors = list(self._client.remove_objects(self._bucket, [DeleteObject(key) for key in keys]))
        assert not errors, errors

    def _read(self, key: str, offset: int = 0, length: int = 0) -> bytes:
        answer = self._client.get_object(self._bucket, key, offset=offset, length=length)
        try:
            return answer.read()
        finally:
            answer.close()
            answer.release_conn()


if __name__ == "__main__":
    main("minio", MinioClient)
