"""Measuring the published results again."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from bench import results
from bench.cli import EXPERIMENTS
from bench.figures import load


def test_every_published_result_has_its_command() -> None:
    assert set(results.RUNS) == set(load())


def test_a_result_that_was_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was ended goes on where it stopped; a result of other files does not count."""
    monkeypatch.setattr(results, "MEASURED", tmp_path)
    monkeypatch.setattr(
        results, "describe_commit", lambda: {"commit": "abc", "tree": "def", "has_local_changes": False}
    )
    monkeypatch.setitem(results.RUNS, "crash", results.Run("-c pass"))
    (tmp_path / "crash.json").write_text(json.dumps({"commit": "abc", "tree": "def"}))
    assert results.main(["crash"]) == 0
    (tmp_path / "crash.json").write_text(json.dumps({"commit": "before", "tree": "before"}))
    assert results.main(["crash"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "crash: measured already"
    assert lines[1].startswith("crash: -c pass --json")


def test_a_checkout_with_changes_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "describe_commit", lambda: {"commit": "abc", "has_local_changes": True})
    assert results.main(["crash"]) == 2
    assert "has changes" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [{"has_local_changes": True}, {"problem": "chunk 1"}, {"failure": "lost"}])
def test_a_wrong_result_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, object]
) -> None:
    published = tmp_path / "published"
    published.mkdir()
    monkeypatch.setattr(results, "MEASURED", tmp_path)
    monkeypatch.setattr(results, "RESULTS", published)
    monkeypatch.setattr(results, "write_figures", lambda _: 0)
    (tmp_path / "crash.json").write_text(json.dumps({"commit": "abc", **fault}))
    assert results.main(["--publish", "crash"]) == 1
    assert not list(published.iterdir())
    (tmp_path / "crash.json").write_text(json.dumps({"commit": "abc", "has_local_changes": False, "failure": None}))
    assert results.main(["--publish", "crash"]) == 0
    assert (published / "crash.json").exists()


@pytest.mark.parametrize("name", results.RUNS)
def test_the_command_of_a_result_is_one(name: str) -> None:
    """Its module can be run, and knows the options."""
    module, *arguments = results.RUNS[name].command.removeprefix("-m ").split()
    assert importlib.util.find_spec(f"{module}.__main__" if module in ("objectcache", "tests.faults.crash") else module)
    if arguments[:1] == ["bench"]:
        parser = argparse.ArgumentParser()
        commands = parser.add_subparsers()
        for experiment in EXPERIMENTS:
            experiment.add(commands)
        assert parser.parse_args(arguments[1:]).command
