"""boto3: low-level calls, and its managed transfer for parts."""

from __future__ import annotations

import io
from collections.abc import Iterable

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from contract import Target
from suite import MIB, Driver, main


class Boto3(Driver):
    version = boto3.__version__

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._bucket = target.bucket
        self._s3 = boto3.client(
            "s3",
            endpoint_url=target.endpoint,
            region_name=target.region,
            aws_access_key_id=target.access_key,
            aws_secret_access_key=target.secret_key,
            verify=target.ca_file or True,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}),
        )

    def put(self, key: str, data: bytes) -> None:
        self._s3.put_object(Bucket=self._bucket, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        return self._s3.get_object(Bucket=self._bucket, Key=key)["Body"].read()

    def get_range(self, key: str, first: int, last: int) -> bytes:
        return self._s3.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={first}-{last}")["Body"].read()

    def list_keys(self, prefix: str) -> Iterable[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix, PaginationConfig={"PageSize": 2}
        )
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def multipart(self, key: str, data: bytes) -> None:
        parts = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB)
        self._s3.upload_fileobj(io.BytesIO(data), self._bucket, key, Config=parts)

    def delete(self, keys: list[str]) -> None:
        wanted = {"Objects": [{"Key": key} for key in keys]}
        answer = self._s3.delete_objects(Bucket=self._bucket, Delete=wanted)
        assert not answer.get("Errors"), answer["Errors"]


if __name__ == "__main__":
    main("boto3", Boto3)
