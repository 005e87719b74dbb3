"""Imports vLLM once, then forks an engine's process for each line of its input: what a start costs is mostly imports.

A line is the port the test listens on and the file for the engine's output. Ends with its input.

python -m tests.engines.engine_host
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback

from tests.engines.engine_process import drive

_PRELOADED = (
    "vllm",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "nixl_client.connectors.vllm.connector",
)


def main() -> None:
    """Fork until the input ends."""
    for name in _PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    print("ready", flush=True)
    for line in sys.stdin:
        port, _, output = line.rstrip("\n").partition(" ")
        if os.fork() == 0:
            _become_engine(int(port), output)


def _become_engine(port: int, output: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        drive(port)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
