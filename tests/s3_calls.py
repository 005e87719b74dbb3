"""What the S3 tests share: a bucket of one's own, and calls that must be refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support import OWNER, Stack


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
