"""What the S3 tests share: a bucket of one's own, and calls that must be refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.requests import OWNER
from tests.support.servers import Stack


def fresh_bucket(servers: Stack, key: tuple[str, str] = OWNER) -> str:
    """A new, empty bucket of the key's."""
    name = f"b-{uuid.uuid4().hex[:20]}"
    servers.s3(key).create_bucket(Bucket=name)
    return name


def refused(call: Callable[..., Any], **arguments: Any) -> tuple[int, str]:
    """Status and code of a call that must fail."""
    with pytest.raises(ClientError) as error:
        call(**arguments)
    answer = error.value.response
    return int(answer["ResponseMetadata"]["HTTPStatusCode"]), str(answer["Error"]["Code"])


def headers_of(answer: dict[str, Any]) -> dict[str, str]:
    """The headers a boto3 answer came with."""
    return dict(answer["ResponseMetadata"]["HTTPHeaders"])


def status_of(answer: dict[str, Any]) -> int:
    """The status a boto3 answer came with."""
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


PART = 5 << 20
"""The least any part but the last may have."""


@dataclass
class Uploading:
    """An upload under way and the parts it has by number."""

    s3: Any
    bucket: str
    key: str
    options: dict[str, Any] = field(default_factory=dict)
    etags: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        created = self.s3.create_multipart_upload(Bucket=self.bucket, Key=self.key, **self.options)
        self.name = {"Bucket": self.bucket, "Key": self.key, "UploadId": created["UploadId"]}

    def put(self, number: int, body: bytes, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.s3.upload_part(**self.name, PartNumber=number, Body=body, **options)
        self.etags[number] = answer["ETag"]
        return answer

    def parts(self) -> dict[str, Any]:
        listed = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self.etags.items())]
        return {**self.name, "MultipartUpload": {"Parts": listed}}

    def complete(self, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.s3.complete_multipart_upload(**self.parts(), **options)
        return answer
