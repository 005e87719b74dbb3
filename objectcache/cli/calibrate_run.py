"""Steps that every calibration shares: its settings, its output files, and its failures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from descriptors.errors import ObjectCacheError
from objectcache.adapters.nixl_agent import NixlFailure
from objectcache.calibration.content import VerificationError
from objectcache.calibration.measure import Where
from objectcache.calibration.servers import LocalServerError
from objectcache.cli.config import Config, load_config
from objectcache.cli.config_text import table_lines

TRANSPORTS = ("shm", "ucx", "http")
DONE, FAILED, WRONG_USE = 0, 1, 2
FAILURES = (LocalServerError, ObjectCacheError, NixlFailure, ImportError, TimeoutError, ValueError, VerificationError)


def config_of(options: argparse.Namespace) -> Config:
    """The configuration in the file, or the defaults where there is no file yet. Raises ConfigError."""
    return load_config(options.config if options.config is not None and options.config.exists() else None)


def target_of(options: argparse.Namespace) -> Path | None:
    """The file to be edited; None where the result is only printed."""
    target: Path | None = None if options.smoke else options.config
    return target


def transports_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The transports to be measured, if they can run."""
    return TRANSPORTS if options.transport == "auto" else (options.transport,)


def storage_of(config: Config) -> dict[str, Any]:
    """The settings of the file's [storage] that a measurement uses."""
    return config.storage.model_dump(mode="json", exclude_none=True, exclude={"theta_bytes"})


def where_of(options: argparse.Namespace, config: Config) -> Where:
    """Where to measure: on servers that run with the file's [storage], and with defaults for everything else."""
    text = "\n".join([*table_lines(("storage",), storage_of(config)), ""])
    return Where(options.data, config.storage_settings(Path()), text)


def failure(error: Exception | str) -> int:
    """Print the error; returns the exit status."""
    what = f"WRONG BYTES: {error}" if isinstance(error, VerificationError) else str(error)
    print(f"objectcache calibrate: {what}", file=sys.stderr)
    return FAILED


def cannot_run(options: argparse.Namespace, missing: Mapping[str, str]) -> str | None:
    """The reason why the transport in the options did not run; None where it did."""
    if options.transport == "auto" or not missing:
        return None
    return f"{options.transport} cannot run here: {missing[options.transport]}"


def write_json(options: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Write the values to the file that `--json` names, if any."""
    if options.json is not None:
        options.json.write_text(json.dumps(values, indent=2) + "\n")


def print_unwritten(lines: list[str]) -> None:
    """Print the lines that would have been written into a config file."""
    print("\nnothing was written; a config file would have:\n")
    print("\n".join(lines))
