"""What every client has to do, and an independent reader that checks it. Standard library only: drivers run as scripts.

A driver is a class with some of the six verbs below, whose absent verbs are named in `lacks` with the reason; `main`
runs it and prints results as JSON. What a client stored is read back by `Reader`, which signs and speaks HTTP itself,
so that a client and a server that agree on the wrong thing (a plus sign read as a space, say) are found out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from contract import OPERATIONS, Result, Target
from sigv4_reader import Reader

MIB = 1024 * 1024
SMALL = {
    "objects/empty": 0,
    "objects/one+byte": 1,
    "objects/with space": 1,
    "objects/percent%41&query=1": 1,
    "objects/ünïcödé/日本.bin": 1000,
    "objects/nested/a/b/c.bin": 100 * 1024,
}
LARGE = "large/parts"
RANGED = "objects/nested/a/b/c.bin"
FIRST, LAST = 1000, 70_001


class Driver:
    """The six verbs. Keys are the suite's names unless `stored_as` says what the client makes of them."""

    version = "?"
    small: ClassVar[Mapping[str, int]] = SMALL
    large_bytes: ClassVar[int] = 20 * MIB
    lacks: ClassVar[Mapping[str, str]] = {}
    notes: ClassVar[Mapping[str, str]] = {}

    def __init__(self, target: Target) -> None:
        self.target = target

    def stored_as(self, key: str) -> str:
        """The S3 key of the suite's `key`."""
        return key

    def put(self, key: str, data: bytes) -> None:
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        raise NotImplementedError

    def get_range(self, key: str, first: int, last: int) -> bytes:
        """Bytes `first` to `last`, both included."""
        raise NotImplementedError

    def list_keys(self, prefix: str) -> Iterable[str]:
        """Every S3 key under the prefix."""
        raise NotImplementedError

    def multipart(self, key: str, data: bytes) -> None:
        """Store in more than one part."""
        raise NotImplementedError

    def delete(self, keys: list[str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release what the client holds."""


class Suite:
    """The six operations on one driver, each checked by the reader."""

    def __init__(self, driver: Driver, reader: Reader) -> None:
        self._driver = driver
        self._reader = reader
        self._data = {key: content(key, size) for key, size in driver.small.items()}
        self._data[LARGE] = content(LARGE, driver.large_bytes)

    def put(self) -> None:
        for key in self._driver.small:
            self._driver.put(key, self._data[key])
            self._expect_stored(key)

    def get(self) -> None:
        for key in self._driver.small:
            expect_same(key, self._driver.get(key), self._data[key])

    def range(self) -> None:
        got = self._driver.get_range(RANGED, FIRST, LAST)
        expect_same(RANGED, got, self._data[RANGED][FIRST : LAST + 1])

    def list(self) -> None:
        wanted = sorted(self._driver.stored_as(key) for key in self._driver.small)
        got = sorted(self._driver.list_keys("objects/"))
        assert got == wanted, f"listed {got}, stored {wanted}"

    def multipart(self) -> None:
        self._driver.multipart(LARGE, self._data[LARGE])
        etag = self._expect_stored(LARGE)
        parts = etag.strip('"').partition("-")[2]
        assert int(parts or 0) > 1, f"not stored in parts: ETag {etag}"
        if "get" not in self._driver.lacks:
            expect_same(LARGE, self._driver.get(LARGE), self._data[LARGE])
        if "range" not in self._driver.lacks:
            around = 8 * MIB
            got = self._driver.get_range(LARGE, around - 1000, around + 999)
            expect_same(LARGE, got, self._data[LARGE][around - 1000 : around + 1000])

    def delete(self) -> None:
        keys = [key for key in self._data if self._exists(key)]
        assert keys, "nothing was stored that could be deleted"
        self._driver.delete(keys)
        left = [key for key in keys if self._exists(key)]
        assert not left, f"still there: {left}"

    def _expect_stored(self, key: str) -> str:
        """Compare what the server holds under the key; the ETag."""
        stored = self._reader.get(self._driver.stored_as(key))
        assert stored is not None, f"{key!r} was not stored under {self._driver.stored_as(key)!r}"
        expect_same(key, stored.body, self._data[key])
        return stored.etag

    def _exists(self, key: str) -> bool:
        return self._reader.exists(self._driver.stored_as(key))


def content(key: str, size: int) -> bytes:
    """The bytes stored under a key: random, the same in every run."""
    return random.Random(hashlib.sha256(key.encode()).digest()).randbytes(size)


def expect_same(key: str, got: bytes, wanted: bytes) -> None:
    """Compare without printing megabytes."""
    if bytes(got) == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    raise AssertionError(f"{key!r}: {len(got)} bytes for {len(wanted)}, different from byte {at}")


def run(client: str, make: Callable[[Target], Driver], target: Target) -> list[Result]:
    """Every operation, each tried whatever became of the one before."""
    driver = make(target)
    suite = Suite(driver, Reader(target))
    results = []
    for operation in OPERATIONS:
        if reason := driver.lacks.get(operation):
            results.append(Result(client, driver.version, operation, None, reason))
            continue
        try:
            getattr(suite, operation)()
        except Exception as error:
            traceback.print_exc()
            detail = f"{type(error).__name__}: {error}"[:2000]
            results.append(Result(client, driver.version, operation, False, detail))
        else:
            results.append(Result(client, driver.version, operation, True, driver.notes.get(operation, "")))
    driver.close()
    return results


def main(client: str, make: Callable[[Target], Driver]) -> None:
    """Command line of a driver. Standard output carries the results alone: clients' own chatter goes to stderr."""
    arguments = argparse.ArgumentParser()
    for name in ("--endpoint", "--access-key", "--secret-key", "--bucket"):
        arguments.add_argument(name, required=True)
    arguments.add_argument("--region", default="us-east-1")
    arguments.add_argument("--ca-file", help="certificate authority of an https endpoint")
    arguments.add_argument("--json", default="-", help="where results go; - is standard output")
    options = arguments.parse_args()
    standard_output = os.dup(1)
    os.dup2(2, 1)
    target = Target(
        options.endpoint.rstrip("/"),
        options.access_key,
        options.secret_key,
        options.bucket,
        options.region,
        options.ca_file,
    )
    results = run(client, make, target)
    with open(standard_output if options.json == "-" else options.json, "w", encoding="utf-8") as answer:
        json.dump([{name: getattr(result, name) for name in Result.__slots__} for result in results], answer)


class CommandLine(Driver):
    """A client that is a program: files in, files out."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._folder = tempfile.TemporaryDirectory(prefix="objectcache-client-")
        self.folder = Path(self._folder.name)

    def environment(self) -> dict[str, str]:
        """Variables the program runs with, beside the inherited ones."""
        return {}

    def program(self, name: str) -> str:
        """A program installed beside this interpreter."""
        return str(Path(sys.prefix) / "bin" / name)

    def file(self, data: bytes = b"") -> Path:
        """A file of these bytes."""
        path = self.folder / "body"
        path.write_bytes(data)
        return path

    def call(self, *command: str) -> bytes:
        """Run the program; its standard output."""
        done = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, **self.environment()})
        if done.returncode != 0:
            said = (done.stderr + done.stdout).decode(errors="replace").strip()
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {said[-1500:]}")
        return done.stdout

    def close(self) -> None:
        self._folder.cleanup()
