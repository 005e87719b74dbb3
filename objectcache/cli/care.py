"""`objectcache scrub`, `doctor` and `compact`: the commands that check and clean a store."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeAlias

from objectcache.cli.arguments import add_common, with_upstream
from objectcache.cli.cluster import add_adopt
from objectcache.cli.config import ConfigError, load_config

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_care(commands: _Commands, logs: argparse.ArgumentParser) -> None:
    """Add the commands that check and clean a store."""
    scrub = commands.add_parser(
        "scrub",
        help="read everything stored and report damaged bytes",
        usage="%(prog)s --data DIR [options]",
        description="Check a store, served or not: every block is read and compared with its checksum, and nothing is "
        "changed. The exit status is 1 where something is damaged.",
        parents=[logs],
    )
    scrub.add_argument("--data", type=Path, required=True, metavar="DIR", help="a store, served or not")
    scrub.add_argument("--json", type=Path, metavar="FILE", help="write the report here as JSON; - is standard output")
    scrub.set_defaults(command=_scrub)

    doctor = commands.add_parser(
        "doctor",
        help="say what this host and an upstream service offer, and what to change",
        usage="%(prog)s [options]",
        description="Look at this host, at the file system of DIR, at the S3 service upstream, and at a server as its "
        "clients find it. With --bucket objects are put there and deleted again; of a server, a bucket that is missing "
        "is made as a cache. The exit status is 1 where something should be changed.",
        parents=[logs],
    )
    doctor.add_argument("--data", type=Path, metavar="DIR", help="the directory of a server, there or not yet")
    doctor.add_argument("--endpoint", metavar="URL", help="a server, to be tried as a client of this host finds it")
    doctor.add_argument(
        "--credentials", type=Path, metavar="FILE", help="the access key for it; else $AWS_ACCESS_KEY_ID"
    )
    doctor.add_argument("--upstream", metavar="URL", help="the service; its account is found as `serve` finds it")
    doctor.add_argument(
        "--bucket", metavar="NAME", help="a bucket of the server or service, to measure and try it with"
    )
    doctor.add_argument("--config", type=Path, metavar="FILE", help="TOML; docs/reference/configuration.md")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the findings here; - is standard output")
    doctor.set_defaults(command=_doctor)

    add_adopt(commands, [logs])
    compact = commands.add_parser(
        "compact",
        help="rewrite sparse segments of a store that is not being served",
        usage="%(prog)s --data DIR [options]",
        description="Give back the space that deleted objects left in segments which are mostly empty. A server does "
        "so by itself in the background; this is for a store at rest.",
        parents=[logs],
    )
    compact.add_argument("--data", type=Path, required=True, metavar="DIR", help="a store, not served")
    compact.add_argument("--json", type=Path, metavar="FILE", help="write what was done here; - is standard output")
    add_common(compact)
    compact.set_defaults(command=_compact)


def _scrub(options: argparse.Namespace) -> int:
    from objectcache.cli.scrub import run as run_scrub

    return run_scrub(options.data, options.json)


def _doctor(options: argparse.Namespace) -> int:
    from objectcache.cli.doctor import run as run_doctor

    if options.endpoint is not None and options.upstream is not None:
        raise ConfigError("--endpoint and --upstream are looked at by one call each")
    config = with_upstream(load_config(options.config), options)
    upstream = config.upstream.settings(os.environ)
    tried = None
    if options.endpoint is not None:
        from objectcache.cli.doctor_client import client_findings

        tried = client_findings(options)
    return run_doctor(options.data, upstream, options.bucket, options.json, tried)


def _compact(options: argparse.Namespace) -> int:
    from objectcache.cli.compact import run as run_compact

    return run_compact(load_config(options.config).storage_settings(options.data), options.json)
