"""Reads objects of an S3 server with the standard library alone: Signature Version 4, path-style, GET and HEAD."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import ssl
from dataclasses import dataclass
from urllib.parse import quote

from contract import Target

_NO_BODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as the server gives it back."""

    body: bytes
    etag: str


class Reader:
    """An independent look at what a client stored."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get(self, key: str) -> Stored | None:
        """The object, or None where there is none."""
        status, etag, body = self._request("GET", key)
        if status == 404:
            return None
        assert status == 200, f"reading {key!r} back: {status} {body[:500]!r}"
        return Stored(body, etag)

    def exists(self, key: str) -> bool:
        """Whether the server has the key."""
        status, _, _ = self._request("HEAD", key)
        assert status in (200, 404), f"HEAD of {key!r}: {status}"
        return status == 200

    def _request(self, method: str, key: str) -> tuple[int, str, bytes]:
        path = f"/{self._target.bucket}/{quote(key, safe='/-_.~')}"
        connection = self._connection()
        try:
            connection.request(method, path, headers=self._headers(method, path))
            answer = connection.getresponse()
            return answer.status, answer.getheader("ETag") or "", answer.read()
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._target.is_tls:
            context = ssl.create_default_context(cafile=self._target.ca_file)
            return http.client.HTTPSConnection(self._target.address, timeout=60, context=context)
        return http.client.HTTPConnection(self._target.address, timeout=60)

    def _headers(self, method: str, path: str) -> dict[str, str]:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{now[:8]}/{self._target.region}/s3/aws4_request"
        headers = {"host": self._target.address, "x-amz-content-sha256": _NO_BODY, "x-amz-date": now}
        names = ";".join(headers)
        canonical = "\n".join([method, path, "", *(f"{n}:{v}" for n, v in headers.items()), "", names, _NO_BODY])
        to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
        key = b"AWS4" + self._target.secret_key.encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        credential = f"Credential={self._target.access_key}/{scope}"
        headers["authorization"] = f"AWS4-HMAC-SHA256 {credential},SignedHeaders={names},Signature={signature}"
        return headers
