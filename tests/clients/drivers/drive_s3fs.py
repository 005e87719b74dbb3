"""s3fs: fsspec over aiobotocore."""

from __future__ import annotations

from collections.abc import Iterable

import s3fs
from contract import Target
from suite import MIB, Driver, main


class S3Fs(Driver):
    version = s3fs.__version__

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._files = s3fs.S3FileSystem(
            key=target.access_key,
            secret=target.secret_key,
            client_kwargs={
                "endpoint_url": target.endpoint,
                "region_name": target.region,
                "verify": target.ca_file or True,
            },
            config_kwargs={"s3": {"addressing_style": "path"}},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def put(self, key: str, data: bytes) -> None:
        self._files.pipe_file(self._path(key), data)

    def get(self, key: str) -> bytes:
        return self._files.cat_file(self._path(key))

    def get_range(self, key: str, first: int, last: int) -> bytes:
        return self._files.cat_file(self._path(key), start=first, end=last + 1)

    def list_keys(self, prefix: str) -> Iterable[str]:
        start = len(self.target.bucket) + 1
        return [path[start:] for path in self._files.find(self._path(prefix))]

    def multipart(self, key: str, data: bytes) -> None:
        self._files.pipe_file(self._path(key), data, chunksize=8 * MIB)

    def delete(self, keys: list[str]) -> None:
        self._files.rm([self._path(key) for key in keys])

    def _path(self, key: str) -> str:
        return f"{self.target.bucket}/{key}"


if __name__ == "__main__":
    main("s3fs", S3Fs)
