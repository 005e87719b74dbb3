"""awscrt's S3 client: 32 MiB as parallel parts of 8 MiB, and ranged GETs."""

from __future__ import annotations

import io
from collections.abc import Iterable
from importlib.metadata import version
from typing import ClassVar
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

from awscrt.auth import AwsCredentialsProvider
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import (
    ClientBootstrap,
    ClientTlsContext,
    DefaultHostResolver,
    EventLoopGroup,
    TlsConnectionOptions,
    TlsContextOptions,
)
from awscrt.s3 import S3Client, S3RequestTlsMode, S3RequestType, create_default_s3_signing_config
from contract import Target
from suite import MIB, Driver, main

_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class AwsCrt(Driver):
    version = version("awscrt")
    large_bytes = 32 * MIB
    notes: ClassVar = {"list": "as a plain request", "delete": "as a plain request"}

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        group = EventLoopGroup(1)
        bootstrap = ClientBootstrap(group, DefaultHostResolver(group))
        credentials = AwsCredentialsProvider.new_static(target.access_key, target.secret_key)
        self._client = S3Client(
            bootstrap=bootstrap,
            region=target.region,
            tls_mode=S3RequestTlsMode.ENABLED if target.is_tls else S3RequestTlsMode.DISABLED,
            tls_connection_options=_trusting(target.ca_file) if target.ca_file else None,
            signing_config=create_default_s3_signing_config(region=target.region, credential_provider=credentials),
            part_size=8 * MIB,
            multipart_upload_threshold=8 * MIB,
        )

    def put(self, key: str, data: bytes) -> None:
        self._send("PUT", self._path(key), data, kind=S3RequestType.PUT_OBJECT)

    def get(self, key: str) -> bytes:
        return self._send("GET", self._path(key), kind=S3RequestType.GET_OBJECT)

    def get_range(self, key: str, first: int, last: int) -> bytes:
        wanted = {"Range": f"bytes={first}-{last}"}
        return self._send("GET", self._path(key), headers=wanted, kind=S3RequestType.GET_OBJECT)

    def list_keys(self, prefix: str) -> Iterable[str]:
        query = urlencode({"list-type": 2, "prefix": prefix}, quote_via=quote, safe="")
        answer = self._send("GET", f"/{self.target.bucket}/?{query}", operation="ListObjectsV2")
        return [element.text or "" for element in ElementTree.fromstring(answer).iter(f"{_NAMESPACE}Key")]

    multipart = put

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._send("DELETE", self._path(key), operation="DeleteObject")

    def _path(self, key: str) -> str:
        return f"/{self.target.bucket}/{quote(key, safe='/-_.~')}"

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        kind: S3RequestType = S3RequestType.DEFAULT,
        operation: str | None = None,
    ) -> bytes:
        sent = HttpHeaders([("Host", self.target.address), *(headers or {}).items()])
        if body is not None:
            sent.add("Content-Length", str(len(body)))
        pieces: dict[int, bytes] = {}

        def keep(chunk: bytes, offset: int, **_: object) -> None:
            pieces[offset] = bytes(chunk)

        request = HttpRequest(method, path, sent, io.BytesIO(body) if body is not None else None)
        self._client.make_request(
            request=request, type=kind, operation_name=operation, on_body=keep
        ).finished_future.result(120)
        return b"".join(piece for _, piece in sorted(pieces.items()))


def _trusting(ca_file: str) -> TlsConnectionOptions:
    options = TlsContextOptions()
    options.override_default_trust_store_from_path(ca_filepath=ca_file)
    return ClientTlsContext(options).new_connection_options()


if __name__ == "__main__":
    main("awscrt", AwsCrt)
