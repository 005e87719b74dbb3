"""ObjectCache block by block, over plain HTTP, as any S3 client would use it: URL ACCESS_KEY SECRET_KEY BUCKET."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.beds.kv_stores.adapter import halves
from calibration.content import Bytes
from calibration.servers import s3_client
from descriptors.errors import CallerError, ErrorCode
from nixl_client.client import ObjectCacheClient, Transport
from nixl_client.objects import Path as ObjectWay


class ObjectCacheAdapter:
    """`put` and `get` of our client, S3TCP. A block is an object, keys first; `get` needs no size beforehand."""

    def __init__(self, url: str, access_key: str, secret_key: str, bucket: str) -> None:
        self._client = ObjectCacheClient(
            url, bucket, access_key=access_key, secret_key=secret_key, transport=Transport.HTTP
        )
        self._s3 = s3_client(url, access_key, secret_key)
        self._bucket = bucket
        self._nbytes = 0

    def initialize(self) -> bool:
        return bool(self._s3.head_bucket(Bucket=self._bucket))

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        body = np.concatenate((key_data, value_data))
        self._nbytes = len(body)
        return self._client.objects.put_object(block_id, body, path=ObjectWay.TCP).nbytes == len(body)

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        buffer = np.empty(self._nbytes, dtype=np.uint8)
        try:
            moved = self._client.objects.get_object(block_id, buffer, path=ObjectWay.TCP)
        except CallerError as error:
            if error.code is not ErrorCode.NO_SUCH_KEY:
                raise
            return None
        return halves(buffer[: moved.nbytes])

    def contains(self, block_id: str) -> bool:
        return self._client.lookup([block_id]) == 1

    def clear(self) -> None:
        for page in self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket):
            keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
            if keys:
                self._s3.delete_objects(Bucket=self._bucket, Delete={"Objects": keys})


def make(folder: Path, *arguments: str) -> ObjectCacheAdapter:
    """For the worker."""
    return ObjectCacheAdapter(*arguments)
