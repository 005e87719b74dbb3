"""Adapters of stores that this interpreter's environment has, each made with its folder and further arguments."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from bench.paper.kv_stores.adapter import halves
from descriptors.errors import CallerError, ErrorCode
from nixl_client.client import Client, Transport
from nixl_client.objects import Path as ObjectWay
from objectcache.calibration.content import Bytes
from objectcache.calibration.servers import s3_client


class FilesAdapter:
    """A file for each block, in one folder, written under another name and renamed; nothing is synced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "blocks"

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


class Hdf5Adapter:
    """One HDF5 file with two datasets for each block, as CASCADE's HDF5 baseline has them: `ID/keys` and `ID/values`,
    contiguous. HDF5 flushes when it likes.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "blocks.h5"
        self._file = self._opened()

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
        self._file = self._opened()

    def _opened(self) -> Any:
        import h5py

        return h5py.File(self._path, "w", libver="latest")


class RedisAdapter:
    """Redis, with hiredis: two hash fields for each block, by redis-py. `address` is `HOST:PORT`."""

    def __init__(self, folder: Path, address: str) -> None:
        import redis

        host, _, port = address.rpartition(":")
        self._redis: Any = redis.Redis(host=host, port=int(port))

    def initialize(self) -> bool:
        return bool(self._redis.ping())

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        self._redis.hset(block_id, mapping={"keys": key_data.data, "values": value_data.data})
        return True

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        keys, values = self._redis.hmget(block_id, ["keys", "values"])
        if keys is None or values is None:
            return None
        return np.frombuffer(keys, dtype=np.uint8), np.frombuffer(values, dtype=np.uint8)

    def contains(self, block_id: str) -> bool:
        return bool(self._redis.exists(block_id))

    def clear(self) -> None:
        self._redis.flushall()


class ObjectCacheAdapter:
    """ObjectCache block by block, over plain HTTP, as any S3 client would use it: `put` and `get` of our client, S3TCP.
    A block is an object, keys first; `get` needs no size beforehand.
    """

    def __init__(self, folder: Path, url: str, access_key: str, secret_key: str, bucket: str) -> None:
        self._client = Client(url, bucket, access_key=access_key, secret_key=secret_key, transport=Transport.HTTP)
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
