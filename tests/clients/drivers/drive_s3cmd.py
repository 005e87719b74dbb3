"""s3cmd."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import ClassVar

from contract import Target
from suite import CommandLine, main


class S3Cmd(CommandLine):
    version = version("s3cmd")
    notes: ClassVar = {"range": "`get --continue` of a partial download"}

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        settings = {
            "access_key": target.access_key,
            "secret_key": target.secret_key,
            "bucket_location": target.region,
            "host_base": target.address,
            "host_bucket": target.address,
            "use_https": str(target.is_tls),
            "ca_certs_file": target.ca_file or "",
            "signature_v2": "False",
            "max_retries": "1",
            "multipart_chunk_size_mb": "8",
        }
        self._config = self.folder / "s3cfg"
        self._config.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))

    def environment(self) -> dict[str, str]:
        return {"PYTHONUTF8": "1"}

    def put(self, key: str, data: bytes) -> None:
        self._s3cmd("put", str(self.file(data)), self._url(key))

    def get(self, key: str) -> bytes:
        into = self.file()
        self._s3cmd("get", "--force", self._url(key), str(into))
        return into.read_bytes()

    def get_range(self, key: str, first: int, last: int) -> bytes:
        into = self.file(bytes(first))
        self._s3cmd("get", "--continue", self._url(key), str(into))
        return into.read_bytes()[first : last + 1]

    def list_keys(self, prefix: str) -> Iterable[str]:
        lines = self._s3cmd("ls", "--recursive", self._url(prefix)).decode().splitlines()
        start = self._url("")
        return [start.join(line.split(start)[1:]) for line in lines]

    multipart = put

    def delete(self, keys: list[str]) -> None:
        self._s3cmd("del", self._url(keys[0]))
        self._s3cmd("del", "--recursive", "--force", self._url(""))

    def _s3cmd(self, *arguments: str) -> bytes:
        return self.call(self.program("s3cmd"), "--config", str(self._config), "--no-progress", *arguments)

    def _url(self, key: str) -> str:
        return f"s3://{self.target.bucket}/{key}"


if __name__ == "__main__":
    main("s3cmd", S3Cmd)
