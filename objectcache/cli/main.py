"""The `objectcache` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from descriptors.cluster import ClusterError
from descriptors.errors import ObjectCacheError
from descriptors.version import __version__
from objectcache.adapters.interfaces import UnknownInterfaceError
from objectcache.adapters.membership import MembershipError
from objectcache.adapters.nixl_agent import NixlFailure, leave
from objectcache.cli.calibrate import add_calibrate
from objectcache.cli.care import add_care
from objectcache.cli.config import Config, ConfigError
from objectcache.cli.config_reference import reference
from objectcache.cli.config_values import NoServerError
from objectcache.cli.demo import add_demo
from objectcache.cli.llama_cpp import add_llama_cpp
from objectcache.cli.log_format import FORMATS, configure_log
from objectcache.cli.lookup import add_lookup
from objectcache.cli.orchestrate import add_orchestrator
from objectcache.cli.remote import printable
from objectcache.cli.serving import add_serving
from objectcache.cli.status import add_status
from objectcache.cli.stored import add_stored
from storage_server.home.claim import WrongDirectoryError
from storage_server.home.directory.membership import WrongHomeError
from storage_server.kernel.index.identity import IndexMismatchError
from storage_server.kernel.index.migrations import SchemaError

REFUSALS = (
    ClusterError, IndexMismatchError, MembershipError, SchemaError, WrongDirectoryError, WrongHomeError
)  # fmt: skip
"""The errors of a start that say what to do."""


def main() -> None:
    """Entry point of the console script."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit status: 0 done, 1 failed, 2 wrong use."""
    if arguments[:1] == ["bench"]:
        return _run_bench(arguments[1:])
    options = make_parser().parse_args(arguments)
    configure_log(options.log_level, options.log_format)
    try:
        status: int = options.command(options)
    except ConfigError as error:
        print(f"objectcache: {error}", file=sys.stderr)
        return 2
    except NoServerError as error:
        print(f"objectcache: {printable(str(error))}", file=sys.stderr)
        return 1
    except (NixlFailure, UnknownInterfaceError) as error:
        print(f"objectcache: the ucx transport cannot be offered: {error}", file=sys.stderr)
        return 1
    except REFUSALS as error:
        print(f"objectcache: {error}", file=sys.stderr)
        return 1
    except ObjectCacheError as error:
        print(f"objectcache: the server cannot start: {error.message}", file=sys.stderr)
        return 1
    except sqlite3.Error as error:
        print(f"objectcache: the index cannot be opened: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        said = ": ".join(filter(None, (str(error.filename or ""), error.strerror or str(error))))
        print(f"objectcache: {said}", file=sys.stderr)
        return 1
    return status


def _run_bench(arguments: Sequence[str]) -> int:
    """Benchmarks are no part of an installation: the package `bench` is looked for beside this one, in a checkout."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "bench" / "cli.py").is_file():
        print("objectcache: benchmarks run from a checkout; this installation has none", file=sys.stderr)
        return 2
    if str(checkout) not in sys.path:  # an editable installation knows the packages of the product only
        sys.path.insert(0, str(checkout))
    status: int = importlib.import_module("bench.cli").run(arguments)
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="objectcache", description="S3-compatible object storage that serves LLM KV caches layer by layer."
    )
    parser.add_argument("--version", action="version", version=f"objectcache {__version__}")
    levels = ("debug", "info", "warning", "error")
    logs = argparse.ArgumentParser(add_help=False)
    for each, default in ((parser, ("warning", "text")), (logs, (argparse.SUPPRESS, argparse.SUPPRESS))):
        each.add_argument("--log-level", default=default[0], choices=levels, help="default: warning")
        each.add_argument("--log-format", default=default[1], choices=FORMATS, help="default: text")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_serving(commands, logs)
    add_demo(commands, [logs])
    add_orchestrator(commands, [logs])
    add_llama_cpp(commands, [logs])
    add_status(commands, [logs])
    add_lookup(commands, [logs])
    add_stored(commands, [logs])
    add_care(commands, logs)
    add_calibrate(commands, [logs])
    settings = commands.add_parser(
        "config",
        help="print a config file with all settings",
        usage="%(prog)s > objectcache.toml",
        description="Print every setting that a config file may have, with an example and what it means. All are "
        "comments: uncomment what you want to set.",
    )
    settings.set_defaults(command=_print_settings)
    completion = commands.add_parser(
        "completion",
        help="print what makes a shell complete this command",
        usage="%(prog)s SHELL",
        description="Print a script for the shell: `objectcache completion bash > "
        "~/.local/share/bash-completion/completions/objectcache`, or `source <(objectcache completion zsh)`.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), metavar="SHELL", help="bash, zsh or tcsh")
    completion.set_defaults(command=_completion)
    commands.add_parser("bench", help="measure; each figure comes with what it is a ratio of")
    return parser


def _print_settings(options: argparse.Namespace) -> int:
    print(reference(Config, as_comments=True), end="")
    return 0


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(make_parser(), options.shell))
    return 0


if __name__ == "__main__":
    main()
