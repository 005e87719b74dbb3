"""The page that says which command makes which table of the papers names commands that there are."""

from __future__ import annotations

import argparse
import re

import pytest

from bench.cli import EXPERIMENTS
from tests.support.tree import repository

COMMANDS = re.findall(r"`objectcache bench ([^`]+)`", (repository() / "bench" / "paper" / "README.md").read_text())


def test_the_page_names_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_understood(command: str) -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for experiment in EXPERIMENTS:
        experiment.add(commands)
    assert parser.parse_args(command.split()).command
