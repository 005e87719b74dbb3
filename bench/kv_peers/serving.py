"""The loop of a peer's process: what it can do, then one run for each line, until its standard input ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from bench.content import VerificationError
from bench.kv_peers.work import Capability, Outcome, Work, capabilities_to_line

_PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
Run = Callable[[], tuple[float, float | None]]
"""One run: seconds in all and until the first layer. Raises VerificationError for wrong bytes."""


def serve(start: Callable[[Work], Sequence[tuple[Capability, Run]]], arguments: Sequence[str]) -> None:
    """Serve the runs that `start` offers for the work described in the file named first.

    Standard output belongs to the answers: what libraries print goes to a log beside that file.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with log_of(Path(arguments[0])).open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    for name in _PROXIES:  # everything is on loopback
        os.environ.pop(name, None)
    offered = start(Work.from_json(Path(arguments[0]).read_text()))
    runs = {capability.name: run for capability, run in offered}
    _say(answers, capabilities_to_line([capability for capability, _ in offered]))
    for line in sys.stdin:
        _say(answers, _outcome(runs[line.strip()]).to_line())


def log_of(work: Path) -> Path:
    """Where a peer with that file of work writes what it has to say."""
    return work.with_suffix(".log")


def _outcome(run: Run) -> Outcome:
    try:
        return Outcome(*run())
    except VerificationError as error:
        return Outcome(0.0, problem=str(error))
    except Exception as error:  # whatever a peer's library raises is the peer's failure, and the parent is told
        traceback.print_exc()
        return Outcome(0.0, problem=f"{type(error).__name__}: {error}")


def _say(answers: TextIO, line: str) -> None:
    print(line, file=answers, flush=True)
