"""`python -m fuzz.atheris_targets TARGET [-runs=N ...]`: libFuzzer, through atheris, on one of `fuzz.targets`.

`all` runs every target in a process of its own, each with the options given.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["descriptors", "gateway", "fuzz"]):
    from fuzz.seeds import seeds
    from fuzz.targets import TARGETS


def main(arguments: list[str]) -> int:
    """Exit status 0 when nothing but answers came out."""
    if not arguments or arguments[0] not in {*TARGETS, "all"}:
        print(f"usage: python -m fuzz.atheris_targets {{{','.join(TARGETS)},all}} [libFuzzer options]", file=sys.stderr)
        return 2
    name, *options = arguments
    if name == "all":
        command = [sys.executable, "-m", "fuzz.atheris_targets"]
        return max(subprocess.run([*command, target, *options], check=False).returncode for target in TARGETS)
    with tempfile.TemporaryDirectory() as corpus:
        for index, seed in enumerate(seeds(name)):
            (Path(corpus) / f"seed-{index}").write_bytes(seed)
        atheris.Setup([sys.argv[0], *options, corpus], TARGETS[name])
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
