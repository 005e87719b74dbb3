"""The AWS command line: `aws s3` for files, `aws s3api` where it has no verb. The first command is the program as a
user runs it. Later ones share this process, since a start takes longer than a command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterable
from importlib.metadata import version
from typing import ClassVar

from awscli.clidriver import create_clidriver
from suite import CommandLine, Target, main


class AwsCli(CommandLine):
    version = version("awscli")
    notes: ClassVar = {"range": "`s3api get-object --range`"}

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._has_run = False

    def environment(self) -> dict[str, str]:
        authority = {"AWS_CA_BUNDLE": self.target.ca_file} if self.target.ca_file else {}
        return {
            **authority,
            "AWS_ACCESS_KEY_ID": self.target.access_key,
            "AWS_SECRET_ACCESS_KEY": self.target.secret_key,
            "AWS_DEFAULT_REGION": self.target.region,
            "AWS_CONFIG_FILE": str(self.folder / "config"),
            "AWS_MAX_ATTEMPTS": "1",
            "PYTHONUTF8": "1",
        }

    def put(self, key: str, data: bytes) -> None:
        self._aws("s3", "cp", "--quiet", str(self.file(data)), self._url(key))

    def get(self, key: str) -> bytes:
        into = self.file()
        self._aws("s3", "cp", "--quiet", self._url(key), str(into))
        return into.read_bytes()

    def get_range(self, key: str, first: int, last: int) -> bytes:
        into = self.file()
        named = ("--bucket", self.target.bucket, "--key", key, "--range", f"bytes={first}-{last}")
        self._aws("s3api", "get-object", *named, str(into))
        return into.read_bytes()

    def list_keys(self, prefix: str) -> Iterable[str]:
        self._aws("s3", "ls", "--recursive", self._url(prefix))
        query = ("--prefix", prefix, "--page-size", "2", "--output", "json")
        answer = json.loads(self._aws("s3api", "list-objects-v2", "--bucket", self.target.bucket, *query))
        return [entry["Key"] for entry in answer["Contents"]]

    multipart = put

    def delete(self, keys: list[str]) -> None:
        self._aws("s3", "rm", "--quiet", self._url(keys[0]))
        self._aws("s3", "rm", "--quiet", "--recursive", self._url(""))

    def _aws(self, *arguments: str) -> bytes:
        words = ("--endpoint-url", self.target.endpoint, *arguments)
        if not self._has_run:
            self._has_run = True
            return self.call(self.program("aws"), *words)
        os.environ.update(self.environment())
        said, problems = io.TextIOWrapper(io.BytesIO()), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(problems):
            status = create_clidriver().main(list(words))
        said.flush()
        told = said.buffer.getvalue()
        if status:
            raise RuntimeError(f"aws {' '.join(words)}: exit {status}: {problems.getvalue()[-1500:]}{told[-1500:]!r}")
        return told

    def _url(self, key: str) -> str:
        return f"s3://{self.target.bucket}/{key}"


if __name__ == "__main__":
    main("awscli", AwsCli)
