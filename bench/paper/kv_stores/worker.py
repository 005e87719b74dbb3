"""One store in a process of its own: `python -m bench.paper.kv_stores.worker MODULE CLASS FOLDER [ARGUMENT…]`.

CLASS is the adapter of a module of this folder, and is given the folder and the arguments. The work comes as files of
one line each, whose names are the commands; the answers go to standard output. What libraries print goes to FOLDER/log.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from bench.beds.processes import answer_lines, say, take_answers
from bench.core.lines import from_line, to_line
from bench.paper.kv_stores.adapter import Replay, Replayed, replay


def main(module: str, name: str, folder: Path, arguments: list[str]) -> None:
    """Serve until standard input ends."""
    answers = take_answers(folder / "log")
    adapter = getattr(importlib.import_module(f"bench.paper.kv_stores.{module}"), name)(folder, *arguments)
    say("ready", answers)
    answer_lines(
        answers,
        lambda file: to_line(replay(adapter, from_line(Replay, Path(file).read_text()))),
        lambda error: to_line(Replayed((), f"{type(error).__name__}: {error}")),
    )
    os._exit(0)  # some clients' threads never end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
