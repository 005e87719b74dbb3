"""Signed requests by hand, boto3 clients, and the access keys that sign them."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import boto3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

OWNER = ("OWNERKEY", "owner-secret-1")
OTHER = ("OTHERKEY", "other-secret-2")
READER = ("READERKEY", "reader-secret-3")


def s3_client(url: str, key: tuple[str, str] = OWNER, verify: str | None = None, **config: Any) -> Any:
    config.setdefault("retries", {"max_attempts": 0})
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        verify=verify,
        config=Config(s3={"addressing_style": "path"}, **config),
    )


@dataclass(frozen=True)
class Reply:
    """A raw answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        return ElementTree.fromstring(self.body).findtext("Code")

    @property
    def named_field(self) -> str | None:
        return ElementTree.fromstring(self.body).findtext("ArgumentName")


def signed(
    url: str, method: str, target: str, body: bytes, headers: Mapping[str, str], key: tuple[str, str]
) -> dict[str, str]:
    """Headers of a signed request."""
    aws = AWSRequest(method=method, url=url + target, data=body, headers=dict(headers))
    S3SigV4Auth(Credentials(*key), "s3", "us-east-1").add_auth(aws)
    return dict(aws.headers.items())


def request(
    url: str,
    method: str,
    target: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    key: tuple[str, str] | None = OWNER,
    change: Callable[[dict[str, str]], None] | None = None,
    sent_body: bytes | None = None,
) -> Reply:
    """One request; `change` edits the headers after signing, `sent_body` replaces the body after signing."""
    all_headers = dict(headers or {}) if key is None else signed(url, method, target, body, headers or {}, key)
    if change is not None:
        change(all_headers)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request(method, target, body=body if sent_body is None else sent_body, headers=all_headers)
        answer = connection.getresponse()
        return Reply(answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def descriptor_request(url: str, body: bytes) -> bytes:
    """The owner's POST of a descriptor to bucket `chunks`, signed, as bytes for a plain socket."""
    headers = signed(url, "POST", "/chunks?layerwise", body, {}, OWNER)
    lines = ["POST /chunks?layerwise HTTP/1.1", f"Host: {urlsplit(url).netloc}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name.lower() not in ("host", "content-length")]
    return "\r\n".join([*lines, "", ""]).encode() + body
