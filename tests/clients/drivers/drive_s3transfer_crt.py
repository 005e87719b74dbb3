"""s3transfer's CRT mode, which boto3[crt] brings.

Built from s3transfer: boto3's own `preferred_transfer_client="crt"` ignores `endpoint_url` and goes to AWS.
"""

from __future__ import annotations

import io
from importlib.metadata import version
from typing import ClassVar

import botocore.session
from botocore.config import Config
from botocore.credentials import Credentials
from contract import Target
from s3transfer.crt import (
    BotocoreCRTCredentialsWrapper,
    BotocoreCRTRequestSerializer,
    CRTTransferManager,
    create_s3_crt_client,
)
from suite import MIB, Driver, main


class S3TransferCrt(Driver):
    version = f"{version('s3transfer')} (awscrt {version('awscrt')})"
    notes: ClassVar = {
        "put": 'built from s3transfer itself: boto3\'s `preferred_transfer_client="crt"` ignores `endpoint_url`'
    }
    lacks: ClassVar = {
        "range": "whole objects; large downloads are the CRT's own ranged GETs",
        "list": "transfers only",
    }

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        settings = {
            "endpoint_url": target.endpoint,
            "region_name": target.region,
            "config": Config(s3={"addressing_style": "path"}),
        }
        credentials = BotocoreCRTCredentialsWrapper(Credentials(target.access_key, target.secret_key))
        crt = create_s3_crt_client(
            target.region,
            crt_credentials_provider=credentials.to_crt_credentials_provider(),
            num_threads=1,
            part_size=8 * MIB,
            use_ssl=target.is_tls,
            verify=target.ca_file,
        )
        self._transfers = CRTTransferManager(crt, BotocoreCRTRequestSerializer(botocore.session.Session(), settings))

    def put(self, key: str, data: bytes) -> None:
        self._transfers.upload(io.BytesIO(data), self.target.bucket, key).result()

    def get(self, key: str) -> bytes:
        into = io.BytesIO()
        self._transfers.download(self.target.bucket, key, into).result()
        return into.getvalue()

    multipart = put

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self._transfers.delete(self.target.bucket, key).result()

    def close(self) -> None:
        self._transfers.shutdown()


if __name__ == "__main__":
    main("s3transfer CRT", S3TransferCrt)
