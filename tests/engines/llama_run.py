"""Runs llama.cpp's server, and our command in front of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from descriptors.headers import LOADED_HEADER
from tests.engines.environment import llama_cpp_python
from tests.support.requests import OWNER
from tests.support.tree import repository

PATIENCE_S = 60.0
GUIDE = repository() / "docs" / "guides" / "llama-cpp.md"


@dataclass(frozen=True)
class LlamaAnswer:
    """An answer, as JSON, and the tokens that were loaded for it; None from a server alone."""

    document: Any
    loaded_tokens: int | None

    @property
    def text(self) -> str:
        """The text of a completion."""
        return str(self.document["content"])

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server did not compute."""
        return int(self.document["timings"]["cache_n"])


@contextlib.contextmanager
def llama_server(model: Path, folder: Path, *options: str) -> Iterator[str]:
    """A server, whose slots' files lie in `folder`; its address."""
    script = Path(__file__).with_name("llama_process.py")
    command = [str(llama_cpp_python()), str(script), str(model), f"{folder}/", *options]
    with listening(command, dict[str, str]()) as (_, url):
        yield url


@contextlib.contextmanager
def sidecar(engine: str, folder: Path, endpoint: str) -> Iterator[tuple[str, Path]]:
    """`objectcache llama-cpp`; its address, and the file of its log."""
    account = {"AWS_ACCESS_KEY_ID": OWNER[0], "AWS_SECRET_ACCESS_KEY": OWNER[1], "PYTHONPATH": str(repository())}
    places = {"--engine": engine, "--data": str(folder), "--endpoint": endpoint}
    words = guide_command().split()
    options = [places.get(before, word) for before, word in itertools.pairwise(words)]
    run = "from objectcache.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", run, *options, "--port", "0", "--log-level", "info"]
    with listening(command, account) as (log, url):
        yield url, log


def guide_command() -> str:
    """The command as the guide prints it."""
    (found,) = [line for line in GUIDE.read_text().splitlines() if line.startswith("objectcache llama-cpp")]
    return found


@contextlib.contextmanager
def listening(command: list[str], variables: dict[str, str]) -> Iterator[tuple[Path, str]]:
    """A process that prints "listening on URL"; the file of its other output, and the URL."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
                env={**os.environ, **variables},
            )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "listening on " in line:
                    yield log, line.split("listening on ")[1].strip()
                    break
            else:
                raise AssertionError(f"{command[:4]} did not start: {log.read_text()[-2000:]}")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def ask(url: str, prompt: Any, path: str = "/completion", **options: Any) -> LlamaAnswer:
    """The answer to a prompt, or to messages."""
    what = "messages" if path.endswith("chat/completions") else "prompt"
    body = {what: prompt, "n_predict": 8, "max_tokens": 8, "temperature": 0, **options}
    with asked(url, path, body) as answer:
        loaded = answer.headers.get(LOADED_HEADER)
        return LlamaAnswer(json.load(answer), None if loaded is None else int(loaded))


def asked(url: str, path: str, body: Any) -> Any:
    """A running answer."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=PATIENCE_S)
