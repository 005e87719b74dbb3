"""Node's @aws-sdk/client-s3, through a bridge that takes verbs as JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from contract import Target
from suite import CommandLine, main

_BRIDGE = Path(__file__).resolve().parent.parent / "node" / "bridge.cjs"


class Node(CommandLine):
    def __init__(self, target: Target) -> None:
        super().__init__(target)
        settings = {
            name: getattr(target, name) for name in ("endpoint", "access_key", "secret_key", "bucket", "region")
        }
        command = [self.program("node"), str(_BRIDGE), json.dumps(settings)]
        authority = {"NODE_EXTRA_CA_CERTS": target.ca_file} if target.ca_file else {}
        environment = {**os.environ, "NODE_PATH": str(Path(sys.prefix) / "node_modules"), **authority}
        self._node = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )
        node = self.call(self.program("node"), "--version").decode().strip()
        self.version = f"{self._ask('version')} (Node {node.removeprefix('v')})"

    def put(self, key: str, data: bytes) -> None:
        self._ask("put", key=key, file=str(self.file(data)))

    def get(self, key: str) -> bytes:
        into = self.file()
        self._ask("get", key=key, file=str(into))
        return into.read_bytes()

    def get_range(self, key: str, first: int, last: int) -> bytes:
        into = self.file()
        self._ask("range", key=key, file=str(into), first=first, last=last)
        return into.read_bytes()

    def list_keys(self, prefix: str) -> Iterable[str]:
        found = self._ask("list", prefix=prefix)
        assert isinstance(found, list)
        return found

    def multipart(self, key: str, data: bytes) -> None:
        self._ask("multipart", key=key, file=str(self.file(data)))

    def delete(self, keys: list[str]) -> None:
        self._ask("delete", keys=keys)

    def close(self) -> None:
        assert self._node.stdin is not None
        self._node.stdin.close()
        self._node.wait(30)
        super().close()

    def _ask(self, verb: str, **arguments: object) -> object:
        assert self._node.stdin is not None
        assert self._node.stdout is not None
        self._node.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._node.stdin.flush()
        answer = json.loads(self._node.stdout.readline() or '{"error": "node ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


if __name__ == "__main__":
    main("@aws-sdk/client-s3", Node)
