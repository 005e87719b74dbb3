"""`python -m tests.faults.crash`: many rounds of load, SIGKILL, restart and comparison."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from objectcache.calibration.origin import describe_commit, describe_machine
from tests.faults.crash.journal import CrashFailure
from tests.faults.crash.rounds import Tally, run_rounds


def main() -> int:
    """Exit status 0 when every round passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.crash", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="default: 200")
    parser.add_argument("--seed", type=int, help="default: a new one, printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was done there")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="default: a temporary one")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 30) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="objectcache-crash-"))
    print(f"seed {seed}, in {directory}", flush=True)
    origin = {**describe_commit(), "machine": describe_machine(), "load_average_before": list(os.getloadavg())}
    tally = Tally()
    began_s = time.monotonic()
    failure = None
    try:
        with tqdm(total=options.rounds, unit="round") as bar:
            for done in run_rounds(directory, seed, options.rounds, tally):
                bar.update()
                bar.set_postfix(acknowledged=done.acknowledged, in_doubt=done.in_doubt, refresh=False)
    except CrashFailure as error:
        failure = str(error)
        print(f"FAILED\n{failure}", file=sys.stderr)
    if failure is None and options.directory is None:
        directory.rmdir()
    seconds = time.monotonic() - began_s
    result = {**origin, "seed": seed, "seconds": round(seconds, 1), **asdict(tally), "failure": failure}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name not in ("failure", *origin)}))
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
