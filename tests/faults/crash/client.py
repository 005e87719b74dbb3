"""Signed requests over one connection, never repeated: a request without an answer may have been carried out."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections.abc import Iterator, Mapping
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.requests import OWNER, Reply

SIGNED_BODY_BYTES_MAX = 16_384
REQUEST_TIMEOUT_S = 30.0
SLOW_PIECES_MAX = 16


class NoAnswerError(Exception):
    """The connection ended before the answer did."""


class _UnsignedPayload(S3SigV4Auth):  # type: ignore[misc]
    def payload(self, request: AWSRequest) -> str:
        return "UNSIGNED-PAYLOAD"


class Client:
    """One caller. Not thread-safe. Once `killed` is set, an answer of 5xx says nothing: gateways outlive the store."""

    def __init__(self, url: str, bucket: str, killed: threading.Event | None = None) -> None:
        self.bucket = bucket
        self._killed = killed
        self.url = url
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REQUEST_TIMEOUT_S)
        self._credentials = Credentials(*OWNER)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def call(
        self,
        method: str,
        key: str = "",
        query: str = "",
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        slowly: random.Random | None = None,
    ) -> Reply:
        """One request and its whole answer. `slowly` sends the body in pieces, with pauses. Raises NoAnswerError."""
        target = f"/{self.bucket}" + (f"/{quote(key, safe='/-_.~')}" if key else "") + (f"?{query}" if query else "")
        request = AWSRequest(method=method, url=self.url + target, data=body, headers=dict(headers or {}))
        signer = S3SigV4Auth if len(body) <= SIGNED_BODY_BYTES_MAX else _UnsignedPayload
        signer(self._credentials, "s3", "us-east-1").add_auth(request)
        sent = {**dict(request.headers.items()), "Content-Length": str(len(body))}
        try:
            with contextlib.suppress(BrokenPipeError):  # refused before the body's end: the answer is there to be read
                self._connection.request(
                    method, target, body=body if slowly is None else _slow(body, slowly), headers=sent
                )
            answer = self._connection.getresponse()
            data = answer.read()
            announced = answer.headers.get("content-length")
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error
        if method != "HEAD" and announced is not None and int(announced) != len(data):
            self._connection.close()
            raise NoAnswerError(f"{len(data)} bytes of {announced}")
        if answer.status >= 500 and self._killed is not None and self._killed.is_set():
            raise NoAnswerError(f"{answer.status} while the server is killed")
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, data)


def _slow(body: bytes, rng: random.Random) -> Iterator[bytes]:
    step = max(1, -(-len(body) // rng.randrange(2, SLOW_PIECES_MAX)))
    for start in range(0, len(body), step):
        yield body[start : start + step]
        time.sleep(rng.uniform(0, 0.02))  # a client that drips, so that the server dies in mid-body


def error_code(reply: Reply) -> str:
    """The S3 code of an answer, or its status where it has none."""
    with contextlib.suppress(ElementTree.ParseError):
        code = ElementTree.fromstring(reply.body).findtext("Code")
        if code is not None:
            return code
    return str(reply.status)


def tree(reply: Reply) -> ElementTree.Element:
    """An XML answer, its namespace taken off."""
    root = ElementTree.fromstring(reply.body)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root
