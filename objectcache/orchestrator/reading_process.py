"""A reading process: parses large bodies and makes tokens, for an orchestrator that must not stand still meanwhile.

`python -m objectcache.orchestrator.reading_process` reads frames (`orchestrator.rules.reading`) from its standard input
and answers each on its standard output, until its input ends. A frame may bring the files of a tokenizer.
`orchestrator.readers` starts the process, and ends it when it takes too long.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import IO, Any

from objectcache.orchestrator.rules import reading
from objectcache.orchestrator.rules.openai_requests import WrongRequestError, token_ids
from objectcache.orchestrator.tokenizer import LocalTokenizer, NoTokensError, TokenizerFiles

MEMORY_BYTES_MAX = 3 << 30
"""The process may have so many bytes of addresses. A body of 16 MiB of empty lists takes 0.4 GB as Python's objects."""
PROBLEM_CHARACTERS_MAX = 512
PANICS = "pyo3_runtime"
"""The module of the errors that a panic of a library in Rust raises. Python takes them for a wish to end."""


def main() -> None:
    """Answer frames until there are no more."""
    for number in (signal.SIGINT, signal.SIGHUP):  # meant for the orchestrator, which ends this process by its pipe
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold prompts
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    tokenizer: LocalTokenizer | None = None
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        _send(answers, reading.packed({}))
        while (frame := _received(sys.stdin.buffer)) is not None:
            head, blobs = frame
            try:
                if head["call"] == "tokenizer":
                    tokenizer = LocalTokenizer(TokenizerFiles(head["name"], *blobs))
                    answer = reading.packed({})
                else:
                    answer = _answered(head, blobs, tokenizer)
            except BaseException as error:
                if not isinstance(error, Exception) and type(error).__module__ != PANICS:
                    raise
                about = "files" if head["call"] == "tokenizer" else "tokens"
                problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                answer = reading.packed({"error": problem[:PROBLEM_CHARACTERS_MAX], "about": about})
            _send(answers, answer)


def _answered(head: dict[str, Any], blobs: list[bytes], tokenizer: LocalTokenizer | None) -> list[bytes]:
    """Raises whatever a tokenizer raises for what clients send."""
    try:
        match head["call"]:
            case "read":
                return reading.packed_body(reading.read_body(blobs[0], reading.order_of(head["order"])), blobs[0])
            case "edit":
                return reading.packed({}, [reading.edited(blobs[0], head["drop"], head["put"], blobs[1])])
            case "handed over":
                return reading.packed({}, [reading.handed_over(blobs[0])])
            case "answer":
                return reading.packed({}, [reading.answered_tokens(blobs[0]).tobytes()])
        if tokenizer is None:
            raise NoTokensError("there is no tokenizer")
        return reading.packed({}, [token_ids(tokenizer.tokens(json.loads(blobs[0]))).tobytes()])
    except WrongRequestError as error:
        return reading.packed({"error": str(error), "about": "request", "field": error.field})
    except MemoryError:
        return reading.packed({"error": "it takes too much memory", "about": "size"})


def _received(requests: IO[bytes]) -> tuple[dict[str, Any], list[bytes]] | None:
    size = requests.read(reading.HEAD.size)
    if len(size) < reading.HEAD.size:
        return None
    head, lengths = reading.head_of(requests.read(reading.HEAD.unpack(size)[0]))
    return head, [requests.read(length) for length in lengths]


def _send(answers: IO[bytes], pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        answers.write(piece)
    answers.flush()


if __name__ == "__main__":
    main()
