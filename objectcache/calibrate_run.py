"""What every calibration shares: what it measures with, where it writes, what it says when it fails."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.nixl_agent import NixlFailure
from bench.calibration.measure import Where
from bench.content import VerificationError
from bench.server import BenchServerError
from descriptors.errors import ObjectCacheError
from objectcache.config import Config, load_config
from objectcache.config_text import table_lines

TRANSPORTS = ("shm", "ucx", "http")
DONE, FAILED, WRONG_USE = 0, 1, 2
FAILURES = (BenchServerError, ObjectCacheError, NixlFailure, ImportError, TimeoutError, ValueError, VerificationError)


def config_of(options: argparse.Namespace) -> Config:
    """The file's, or the defaults where there is none yet. Raises ConfigError."""
    return load_config(options.config if options.config is not None and options.config.exists() else None)


def target_of(options: argparse.Namespace) -> Path | None:
    """The file to be edited; None: show what would be written."""
    target: Path | None = None if options.dry_run or options.smoke else options.config
    return target


def transports_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Those to be measured where they can run."""
    return TRANSPORTS if options.transport == "auto" else (options.transport,)


def storage_of(config: Config) -> dict[str, Any]:
    """What the file's [storage] says and a measurement keeps to."""
    return config.storage.model_dump(mode="json", exclude_none=True, exclude={"theta_bytes"})


def where_of(options: argparse.Namespace, config: Config) -> Where:
    """Servers of our own run with the file's [storage] and nothing else of it."""
    text = "\n".join([*table_lines(("storage",), storage_of(config)), ""])
    return Where(options.data, config.storage_settings(Path()), text)


def failure(error: Exception | str) -> int:
    """Say why nothing came of it; the exit status."""
    what = f"WRONG BYTES: {error}" if isinstance(error, VerificationError) else str(error)
    print(f"objectcache calibrate: {what}", file=sys.stderr)
    return FAILED


def cannot_run(options: argparse.Namespace, missing: Mapping[str, str]) -> str | None:
    """Why the transport that was asked for by name did not run; None where it did."""
    if options.transport == "auto" or not missing:
        return None
    return f"{options.transport} cannot run here: {missing[options.transport]}"


def write_json(options: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Where `--json` says, if it does."""
    if options.json is not None:
        options.json.write_text(json.dumps(values, indent=2) + "\n")


def print_unwritten(lines: list[str]) -> None:
    """What a config file would have been told."""
    print("\nnothing was written; a config file would have:\n")
    print("\n".join(lines))
