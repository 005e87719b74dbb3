"""Runs a client's driver in its interpreter and reads its results."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tests.clients.catalogue import Client
from tests.clients.drivers.contract import OPERATIONS, Result, Target

LIMIT_S = 240
_TAIL = 4000
_SETTINGS_OF_OTHERS = ("AWS_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "RCLONE_", "S3_", "LMCACHE_")


@dataclass(frozen=True, slots=True)
class Run:
    """What one client did; `trouble` is why the driver itself failed, with what it wrote to stderr."""

    client: Client
    results: tuple[Result, ...]
    trouble: str = ""

    @property
    def failures(self) -> list[str]:
        """Everything that went wrong, one line each."""
        wrong = [f"{result.operation}: {result.detail}" for result in self.results if result.ok is False]
        return wrong + ([self.trouble] if self.trouble else [])


def run(client: Client, target: Target) -> Run:
    """Drive the client against a bucket that exists."""
    command = [
        str(client.python),
        str(client.script),
        *("--endpoint", target.endpoint, "--access-key", target.access_key, "--secret-key", target.secret_key),
        *("--bucket", target.bucket, "--region", target.region, "--json", "-"),
        *(("--ca-file", target.ca_file) if target.ca_file else ()),
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, env=_environment(client))
    except subprocess.TimeoutExpired as slow:
        return Run(client, (), f"not done after {LIMIT_S} s: {(slow.stderr or b'').decode(errors='replace')[-_TAIL:]}")
    said = done.stderr.decode(errors="replace")[-_TAIL:]
    try:
        results = tuple(Result(**result) for result in json.loads(done.stdout))
    except ValueError:
        return Run(client, (), f"no results, exit {done.returncode}: {said}")
    named = [result.operation for result in results]
    if done.returncode != 0 or named != list(OPERATIONS):
        return Run(client, results, f"exit {done.returncode} after {named}: {said}")
    return Run(client, results, said if any(result.ok is False for result in results) else "")


def describe(runs: Sequence[Run]) -> str:
    """Failures of all, by client."""
    lines = [f"{run.client.name}: {failure}" for run in runs for failure in run.failures]
    return "\n".join(lines) or "no failures"


def _environment(client: Client) -> dict[str, str]:
    """The inherited variables without those that would redirect a client."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS_OF_OTHERS)}
    return {**inherited, "AWS_EC2_METADATA_DISABLED": "true", **client.variables}
