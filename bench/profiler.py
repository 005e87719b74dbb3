"""Profiles of our server under the load, sampled by py-spy from outside; `python -m bench.profiler FILE` reads one.

py-spy leaves out threads it takes for idle, but own time of `_worker` and `Runner.run` is still mostly waiting. The
server is a little slower while it is watched.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLES_PER_S = 100
STOP_TIMEOUT_S = 60.0
LINES_MAX = 25
FILE_NAME = "ours.folded"


def find_py_spy() -> str | None:
    """The program, on the path or beside the interpreter; None when there is none."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


@contextmanager
def sampled(pid: int, folder: Path) -> Iterator[None]:
    """Sample a process and its children until the block ends; folded stacks go to a file in `folder`."""
    program = find_py_spy()
    assert program is not None
    rate = str(SAMPLES_PER_S)
    command = [program, "record", "--pid", str(pid), "--subprocesses", "--threads", "--rate", rate, "--format", "raw"]
    with (folder / "py-spy.log").open("wb") as log:
        process = subprocess.Popen([*command, "--output", str(folder / FILE_NAME)], stdout=log, stderr=log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def shares(lines: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Samples of each function of folded stacks: its own, and those with what it calls. Pure."""
    own, inclusive = Counter[str](), Counter[str]()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        functions = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]
        own[functions[-1]] += int(count)
        for function in set(functions):
            inclusive[function] += int(count)
    return own, inclusive


def main(file: Path) -> None:
    """Print where the samples were."""
    own, inclusive = shares(file.read_text().splitlines())
    printed = {"own": own, "with callees": inclusive}
    for title, counts in printed.items():
        print(f"\n{title}, of {own.total()} samples")
        for name, samples in counts.most_common(LINES_MAX):
            print(f"{samples / own.total():7.1%}  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
