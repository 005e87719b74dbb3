"""`python -m tests.faults.bounds`: writers flood bounded caches, the server is killed in between, and the bytes of all
files under its directory are counted every 10 ms.

Counting itself takes some milliseconds, and on a loaded machine a gap between two samples may be of any length: the
longest one and the median are told.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from tqdm import tqdm

from descriptors.units import KIB, MIB
from tests.support.requests import OWNER, request, s3_client
from tests.support.servers import CONFIG, started
from tests.support.waiting import eventually

KINDS = ("embedded", "upstream", "written back")
DISK_BYTES = 96 * MIB
CAPACITY_BYTES = 64 * MIB
SAMPLE_S = 0.01
SIZES = (4 * KIB, 70_000, 300 * KIB, MIB, 2 * MIB)
WRITERS = 4
ORDINARY, CACHE, PINNED = "kept", "cached", "pinned"
CAPACITIES = {CACHE: CAPACITY_BYTES, PINNED: 32 * MIB}
INDEX_EVERY = 10
"""One sample of so many looks into the index, too."""
LEASE_EVERY_S, LEASE_S = 1.0, 15.0
COMING_S = 4.0
"""So long after the lookup a chunk that was on its way has come, and its lease is written down: other processes may
have the processor for a while.
"""
BUCKETS = f"""
[[buckets]]
name = "{CACHE}"
capacity_bytes = "{CAPACITY_BYTES}"
eviction = "lru"
[[buckets]]
name = "{PINNED}"
capacity_bytes = "{CAPACITIES[PINNED]}"
"""


WRITE_BACK = """
[upstream]
write = "back"
"""
DRAIN_S = 60.0
LATE_FRACTION_MAX = 0.1
"""How many of the leases of chunks that were on their way may come late."""


class BoundFailure(Exception):
    """A promise that did not hold."""


@dataclass
class Tally:
    """What was done and seen."""

    puts: int = 0
    refused: int = 0
    gets: int = 0
    gone: int = 0
    kills: int = 0
    samples: int = 0
    most_bytes: int = 0
    median_sample_gap_s: float = 0.0
    longest_sample_gap_s: float = 0.0
    index_samples: int = 0
    most_bucket_bytes: int = 0
    leases: int = 0
    leases_seen: int = 0
    late: int = 0
    compared: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Leased:
    """A chunk that a lookup leased. It must be in the cache from `since_s` to `until_s`, by the steady clock."""

    key: str
    since_s: float
    until_s: float


def content(key: str, nbytes: int) -> bytes:
    """The bytes of a key."""
    return random.Random(key).randbytes(nbytes)


def allocated(directory: Path) -> int:
    """What the files under a directory take."""
    total = 0
    waiting = [str(directory)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        with contextlib.suppress(FileNotFoundError):
                            total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


class Flood:
    """Writers and readers of one server, which is killed and started again at the same port."""

    def __init__(self, directory: Path, seed: int, upstream: str | None, *, writes_back: bool = False) -> None:
        self.tally = Tally()
        self._random = random.Random(seed)
        self._data = directory / "data"
        self._upstream = upstream
        self._config = directory / "config.toml"
        self._writes_back = writes_back
        self._config.write_text(CONFIG + ("" if upstream else BUCKETS) + (WRITE_BACK if writes_back else ""))
        self._stop = threading.Event()
        self._is_up = threading.Event()
        self._url = ""
        self._stored: list[tuple[str, str, int]] = []
        self._pinned: list[tuple[str, int]] = []
        self._leased: list[Leased] = []
        self._lock = threading.Lock()
        self._killed_s = time.monotonic()
        self._seen: set[str] = set()
        """Leased chunks that were in the cache when COMING_S had passed."""
        self._late: set[str] = set()
        """Those that were not, in front of another service: how soon they come depends on what else goes on."""

    def run(self, seconds: float, kill_every_s: float) -> Iterator[float]:
        """Yields the seconds that have passed. Failures are in the tally."""
        began_s = time.monotonic()
        threads = [threading.Thread(target=self._sample), threading.Thread(target=self._lease)]
        threads += [threading.Thread(target=self._guarded, args=(number,)) for number in range(WRITERS)]
        with contextlib.ExitStack() as stack:
            process = self._start(stack)
            self._prepare()
            for thread in threads:
                thread.start()
            try:
                killed_s = time.monotonic()
                while time.monotonic() - began_s < seconds and not self.tally.failures:
                    time.sleep(0.2)  # of the seconds that it lasts
                    yield time.monotonic() - began_s
                    if time.monotonic() - killed_s >= kill_every_s:
                        self._is_up.clear()
                        self._forget_young_leases()
                        process.send_signal(signal.SIGKILL)
                        process.wait()
                        self._killed_s = time.monotonic()
                        self.tally.kills += 1
                        process = self._start(stack)
                        killed_s = time.monotonic()
                self._check_pinned()
            finally:
                self._stop.set()
                self._is_up.set()
                for thread in threads:
                    thread.join()
            self.tally.late = len(self._late)
            if self.tally.late > LATE_FRACTION_MAX * max(10, self.tally.leases):
                self.tally.failures.append(f"{self.tally.late} leased chunks did not come within {COMING_S} s")
            if self._upstream is not None and not self.tally.failures:
                self._check_upstream()

    def _start(self, stack: contextlib.ExitStack) -> Any:
        options = ("--upstream", self._upstream) if self._upstream else ()
        keys = {"OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID": OWNER[0], "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY": OWNER[1]}
        url, process = stack.enter_context(
            started(
                "serve", "--data", str(self._data), "--port", "0", "--config", str(self._config), "--disk-bytes",
                str(DISK_BYTES), "--dram-bytes", "0", *options, environment=keys,
            )
        )  # fmt: skip
        self._url = url
        self._is_up.set()
        return process

    def _prepare(self) -> None:
        s3 = s3_client(self._url, OWNER)
        for bucket in (ORDINARY, CACHE, PINNED):
            s3.create_bucket(Bucket=bucket)
        for number in range(8):
            key = self._key(f"kept-{number}")
            s3.put_object(Bucket=ORDINARY, Key=key, Body=content(key, MIB))
        for number in range(4):
            key = self._key(f"pinned-{number}")
            s3.put_object(Bucket=PINNED, Key=key, Body=content(key, MIB), Tagging="objectcache-pin=")
            self._pinned.append((key, MIB))

    def _key(self, text: str) -> str:
        return sha256(text.encode()).hexdigest()

    def _check_pinned(self) -> None:
        """What nobody declared a cache, and what is pinned, is all there."""
        s3 = s3_client(self._url, OWNER)
        names = [(ORDINARY, self._key(f"kept-{number}"), MIB) for number in range(8)]
        names += [(PINNED, key, nbytes) for key, nbytes in self._pinned]
        for bucket, key, nbytes in names:
            if s3.get_object(Bucket=bucket, Key=key)["Body"].read() != content(key, nbytes):
                self.tally.failures.append(f"{bucket}/{key} has other bytes")

    def _check_upstream(self) -> None:
        """Everything that was acknowledged is there: at once where it was written through, and soon otherwise."""
        if self._writes_back and not eventually(
            lambda: metric(self._url, "objectcache_upstream_dirty_chunks") == 0, DRAIN_S
        ):
            self.tally.failures.append("some chunks do not get upstream")
        assert self._upstream is not None
        there = s3_client(self._upstream, OWNER)
        for bucket, key, nbytes in self._stored:
            if there.get_object(Bucket=bucket, Key=key)["Body"].read() != content(key, nbytes):
                self.tally.failures.append(f"{bucket}/{key} has other bytes upstream")
            self.tally.compared += 1

    def _sample(self) -> None:
        try:
            self._sample_to_the_end()
        except Exception as error:
            self.tally.failures.append(f"sampling: {type(error).__name__}: {error}")

    def _sample_to_the_end(self) -> None:
        last_s = time.monotonic()
        gaps_s: list[float] = []
        while not self._stop.is_set():
            nbytes = allocated(self._data)
            now_s = time.monotonic()
            self.tally.samples += 1
            self.tally.most_bytes = max(self.tally.most_bytes, nbytes)
            gaps_s.append(now_s - last_s)
            last_s = now_s
            if self.tally.samples % INDEX_EVERY == 0:
                with contextlib.suppress(sqlite3.OperationalError):  # a server that starts has it to itself
                    self._check_index()
                    self.tally.index_samples += 1
            if nbytes > DISK_BYTES:
                self.tally.failures.append(f"{nbytes} bytes are taken, {DISK_BYTES} may be")
                return
            time.sleep(SAMPLE_S)  # the pause between samples
        self.tally.longest_sample_gap_s = max(gaps_s)
        self.tally.median_sample_gap_s = statistics.median(gaps_s)

    def _check_index(self) -> None:
        """What each bucket's objects take, and that what is held is in the cache itself: a GET would bring it from
        upstream, too.
        """
        with contextlib.closing(sqlite3.connect(f"file:{self._data}/index.sqlite3?mode=ro", uri=True)) as db:
            if self._upstream is None:
                for bucket, capacity_bytes in CAPACITIES.items():
                    (nbytes,) = db.execute("SELECT SUM(nbytes) FROM objects WHERE bucket = ?", (bucket,)).fetchone()
                    self.tally.most_bucket_bytes = max(self.tally.most_bucket_bytes, nbytes or 0)
                    if (nbytes or 0) > capacity_bytes:
                        self.tally.failures.append(f"{bucket} has {nbytes} bytes, {capacity_bytes} may be")
            with self._lock:
                held = [(PINNED, key, "pinned") for key, _ in self._pinned]
                held += [
                    (CACHE, each.key, f"leased since {each.since_s - COMING_S:.1f}, now {time.monotonic():.1f},")
                    for each in self._leased
                    if each.since_s < time.monotonic() < each.until_s
                ]
            for bucket, key, what in held:
                if db.execute("SELECT 1 FROM objects WHERE bucket = ? AND key = ?", (bucket, key)).fetchone() is None:
                    with self._lock:
                        is_counted = what == "pinned" or any(each.key == key for each in self._leased)
                    if is_counted and what != "pinned" and self._upstream is not None and key not in self._seen:
                        self._late.add(key)
                        continue
                    if is_counted:
                        killed = f"{time.monotonic() - self._killed_s:.1f} s after the last kill"
                        self.tally.failures.append(f"{bucket}/{key} is {what}, and not in the cache, {killed}")
                elif what != "pinned":
                    self.tally.leases_seen += 1
                    self._seen.add(key)

    def _lease(self) -> None:
        """One chunk of the latest after the other; together they are less than pins and leases may hold."""
        chooser = random.Random(self._random.random())
        while not self._stop.wait(LEASE_EVERY_S):
            with self._lock:
                latest = [key for bucket, key, _ in self._stored[-20:] if bucket == CACHE]
            if not latest or not self._is_up.is_set():
                continue
            key = chooser.choice(latest)
            asked_s, kills = time.monotonic(), self.tally.kills
            try:
                body = json.dumps({"chunk_keys": [key], "lease_s": LEASE_S}).encode()
                reply = request(self._url, "POST", f"/{CACHE}?lookup", body=body)
            except (OSError, http.client.HTTPException):
                continue  # the server was killed
            if reply.status == 200 and json.loads(reply.body)["matched"] == 1:
                with self._lock:
                    if not self._is_up.is_set() or self.tally.kills != kills:
                        continue  # killed before it wrote the lease down
                    self._leased.append(Leased(key, time.monotonic() + COMING_S, asked_s + LEASE_S))
                self.tally.leases += 1

    def _forget_young_leases(self) -> None:
        """A server that is killed may not have written these down."""
        with self._lock:
            self._leased = [each for each in self._leased if each.since_s < time.monotonic()]

    def _guarded(self, number: int) -> None:
        chooser = random.Random(self._random.random() + number)
        while not self._stop.is_set():
            self._is_up.wait()
            s3 = s3_client(self._url, OWNER)
            try:
                while not self._stop.is_set() and self._is_up.is_set():
                    self._one(s3, chooser)
            except (BotoCoreError, OSError):
                time.sleep(0.05)  # the server was killed
            except Exception as error:
                self.tally.failures.append(f"{type(error).__name__}: {error}")
                return

    def _one(self, s3: Any, chooser: random.Random) -> None:
        with self._lock:
            known = chooser.choice(self._stored[-400:]) if self._stored and chooser.random() < 0.4 else None
        if known is not None:
            bucket, key, nbytes = known
            try:
                body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            except ClientError as error:
                self._expect(error, {"SlowDown"} if self._upstream else {"SlowDown", "NoSuchKey"})
                self.tally.gone += 1
                return
            self.tally.gets += 1
            if body != content(key, nbytes):
                raise BoundFailure(f"{bucket}/{key} has other bytes")
            return
        bucket = CACHE if chooser.random() < 0.8 or self._upstream is not None else PINNED
        key, nbytes = self._key(str(chooser.random())), chooser.choice(SIZES)
        try:
            s3.put_object(Bucket=bucket, Key=key, Body=content(key, nbytes))
        except ClientError as error:
            self._expect(error, {"InsufficientStorage", "SlowDown"})
            self.tally.refused += 1
            return
        self.tally.puts += 1
        with self._lock:
            self._stored.append((bucket, key, nbytes))

    def _expect(self, error: ClientError, codes: set[str]) -> None:
        code = error.response.get("Error", {}).get("Code", "")
        if code not in codes:
            raise BoundFailure(f"{code}: {error}") from error


def metric(url: str, name: str) -> float:
    """The value of a metric without labels."""
    lines = request(url, "GET", "/_objectcache/metrics").body.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@contextlib.contextmanager
def upstream_server(directory: Path) -> Iterator[str]:
    """Another ObjectCache, without a bound."""
    config = directory / "upstream.toml"
    config.write_text(CONFIG)
    data = directory / "upstream"
    with started("serve", "--data", str(data), "--port", "0", "--config", str(config), "--dram-bytes", "0") as (url, _):
        yield url


def main() -> int:
    """Exit status 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.bounds", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each of the three kinds; default: 600")
    parser.add_argument("--kill-every", type=float, default=15.0, metavar="S", help="default: 15")
    parser.add_argument("--seed", type=int, help="default: a new one, printed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    failed = False
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(prefix="objectcache-bounds-") as name, contextlib.ExitStack() as stack:
            url = None if kind == "embedded" else stack.enter_context(upstream_server(Path(name)))
            flood = Flood(Path(name), seed, url, writes_back=kind == "written back")
            with tqdm(total=round(options.seconds), unit="s", desc=kind) as bar:
                for passed_s in flood.run(options.seconds, options.kill_every):
                    bar.update(min(round(passed_s), bar.total) - bar.n)
        print(json.dumps({"kind": kind, **asdict(flood.tally)}), flush=True)
        failed = failed or bool(flood.tally.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
