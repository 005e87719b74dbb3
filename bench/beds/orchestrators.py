"""An orchestrator in a process of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import aiohttp

from bench.beds.processes import BaselineError, end
from objectcache.calibration.origin import python_path
from objectcache.cli import admin_token

READY = "is listening on "
START_S = 30.0
ADMIN_TOKEN = secrets.token_hex(16)
"""The token of the orchestrators that this process starts."""
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


@contextmanager
def orchestrator_process(
    engines: Sequence[str], *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """An orchestrator in a process of its own: its address, and its pid."""
    command = [sys.executable, "-m", "objectcache", "orchestrator", "--port", "0", *options]
    for engine in engines:
        command += ["--engine", engine]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path(), admin_token.VARIABLE: ADMIN_TOKEN, **(environment or {})},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        if READY not in line:
            raise BaselineError(f"the orchestrator does not start: {line!r}")
        yield line.strip().partition(READY)[2], process.pid
    finally:
        process.terminate()
        end(process)
        if process.stdout is not None:
            process.stdout.close()


def await_engine(url: str) -> None:
    """Return when the orchestrator can send requests on. Raises BaselineError."""

    async def wait() -> None:
        async with aiohttp.ClientSession() as http:
            for _ in range(round(START_S / 0.05)):
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(0.05)
        raise BaselineError("the orchestrator has no engine")

    asyncio.run(wait())
