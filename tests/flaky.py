"""Look for tests that fail by chance: `python -m tests.flaky`, or `make flaky`.

The tests of `make test` run five times, and all tests once, in random order and with two busy processes beside them.
Each failure is printed with its seed and the load. It is a fault of the product, or of the test. What a run with
failures said, its tests' output and servers' logs among it, stays in out/flaky.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KEPT: Final = Path(__file__).resolve().parents[1] / "out" / "flaky"
FAST_RUNS: Final = 5
ALL_RUNS: Final = 1
BUSY_PROCESSES: Final = 2
FAST: Final = (
    "--hypothesis-profile",
    "fast",
    "-m",
    "not slow and not environments and not bench_smoke and not engines_full",
)
ALL: Final = ("-m", "not engines_full")


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed, and how to see it fail again."""

    name: str
    message: str
    seed: int
    load: float

    def __str__(self) -> str:
        return f"{self.name}\n    seed {self.seed}, load {self.load:.1f}: {self.message}"


def main() -> None:
    """Exits with 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast-runs", type=int, default=FAST_RUNS, help=f"of the tests of `make test`: {FAST_RUNS}")
    parser.add_argument("--all-runs", type=int, default=ALL_RUNS, help=f"of all tests: {ALL_RUNS}")
    parser.add_argument("--processes", type=int, default=3, help="that run tests: 3")
    parser.add_argument("--busy", type=int, default=BUSY_PROCESSES, help=f"that only burn time: {BUSY_PROCESSES}")
    parser.add_argument("--seed", type=int, help="of the first run; the others follow from it")
    options = parser.parse_args()
    seeds = random.Random(options.seed) if options.seed is not None else random.SystemRandom()
    runs = [FAST] * options.fast_runs + [ALL] * options.all_runs
    failures: list[Failure] = []
    with busy(options.busy):
        for number, chosen in enumerate(runs, 1):
            seed = options.seed if options.seed is not None and number == 1 else seeds.randrange(1 << 31)
            print(f"run {number} of {len(runs)}: seed {seed}", flush=True)
            began_s = time.monotonic()
            found = run(chosen, seed, options.processes)
            failures += found
            print(f"    {time.monotonic() - began_s:.0f} s, {len(found)} failed", flush=True)
            for failure in found:
                print(failure, flush=True)
    print(f"\n{len(failures)} failures in {len(runs)} runs beside {options.busy} busy processes")
    for failure in failures:
        print(failure)
    raise SystemExit(1 if failures else 0)


def run(chosen: Sequence[str], seed: int, processes: int) -> list[Failure]:
    """Run these tests once, in the order of this seed. A run that ends before its tests is a failure, too."""
    with tempfile.TemporaryDirectory(prefix="objectcache-flaky-") as folder:
        report, log = Path(folder) / "report.xml", Path(folder) / "log"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]
        command += ["-p", "randomly", f"--randomly-seed={seed}", f"--hypothesis-seed={seed}"]
        command += ["--numprocesses", str(processes), "--dist", "loadfile"]
        with log.open("wb") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        load = os.getloadavg()[0]
        if not report.exists():
            tail = log.read_text(errors="replace")[-2000:]
            return [Failure("the run", f"pytest ended with {status}: {tail}", seed, load)]
        failures = [Failure(name, message, seed, load) for name, message in failures_in(report.read_text())]
        if failures:
            KEPT.mkdir(parents=True, exist_ok=True)
            for said in (report, log):
                shutil.copy(said, KEPT / f"{seed}-{said.name}")
    if status not in (0, 1) and not failures:
        failures.append(Failure("the run", f"pytest ended with {status}", seed, load))
    return failures


def failures_in(report: str) -> list[tuple[str, str]]:
    """The tests that failed in a JUnit report, by name, and the first line of what they say."""
    found = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        for kind in ("failure", "error"):
            for failure in case.iter(kind):
                message = (failure.get("message") or failure.text or kind).strip().splitlines()[0]
                found.append((f"{case.get('classname')}::{case.get('name')}", message[:300]))
    return found


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but take a processor's time, until the block ends."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
