"""One store in a process of its own: `python -m bench.beds.kv_stores.worker ADAPTER FOLDER [ARGUMENT…]`.

ADAPTER names a module of this folder, whose `make` gets the folder and the arguments. The work comes as files of one
line each, whose names are the commands; the answers go to standard output. What libraries print goes to FOLDER/log.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from bench.beds.kv_stores.adapter import Replay, Replayed, replay
from bench.beds.processes import say, take_answers
from bench.core.lines import from_line, to_line


def main(name: str, folder: Path, arguments: list[str]) -> None:
    """Serve until standard input ends."""
    answers = take_answers(folder / "log")
    adapter = importlib.import_module(f"bench.beds.kv_stores.{name}_adapter").make(folder, *arguments)
    say("ready", answers)
    for line in sys.stdin:
        try:
            found = replay(adapter, from_line(Replay, Path(line.strip()).read_text()))
        except Exception as error:  # whatever a store's client raises is the store's failure, and the parent is told
            traceback.print_exc()
            found = Replayed((), f"{type(error).__name__}: {error}")
        say(to_line(found), answers)
    sys.stderr.flush()
    os._exit(0)  # some clients' threads never end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
