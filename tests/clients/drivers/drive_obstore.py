"""obstore: the Rust object_store crate."""

from __future__ import annotations

from collections.abc import Iterable

import obstore
from contract import Target
from obstore.store import S3Store
from suite import MIB, Driver, main


class Obstore(Driver):
    version = obstore.__version__

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._store = S3Store(
            target.bucket,
            endpoint=target.endpoint,
            region=target.region,
            access_key_id=target.access_key,
            secret_access_key=target.secret_key,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def put(self, key: str, data: bytes) -> None:
        obstore.put(self._store, key, data, use_multipart=False)

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self._store, key).bytes())

    def get_range(self, key: str, first: int, last: int) -> bytes:
        return bytes(obstore.get_range(self._store, key, start=first, end=last + 1))

    def list_keys(self, prefix: str) -> Iterable[str]:
        return [entry["path"] for batch in obstore.list(self._store, prefix, chunk_size=2) for entry in batch]

    def multipart(self, key: str, data: bytes) -> None:
        obstore.put(self._store, key, data, use_multipart=True, chunk_size=8 * MIB)

    def delete(self, keys: list[str]) -> None:
        obstore.delete(self._store, keys)


if __name__ == "__main__":
    main("obstore", Obstore)
