"""What all benchmarks share: options, values in lines, targets, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from bench.cli import EXPERIMENTS
from bench.core import options
from bench.core.experiment import Experiment, WrongUse, plain, published
from bench.core.lines import from_line, to_line
from bench.core.options import ascending, each, filled, number, some_of
from bench.core.rounds import Side, Target, interval
from objectcache.calibration.samples import RoundTurns, interleaved
from objectcache.calibration.text import aligned


class Color(Enum):
    """Something to choose."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    """The value inside of a `Value`."""

    color: Color


@dataclass(frozen=True)
class Value:
    """One of each kind that travels."""

    numbers: tuple[int, ...]
    inner: Inner
    maybe: Inner | None
    notes: Mapping[str, float]


@dataclass(frozen=True)
class Settings:
    """The options of the command below."""

    runs: int = options.runs(5, 2)
    color: Color = options.choice("--color", Color, Color.RED, Color.BLUE)
    extra: int = options.sized(7, 8)


@pytest.mark.parametrize("maybe", [None, Inner(Color.BLUE)])
def test_values_come_out_of_a_line_as_they_went_in(maybe: Inner | None) -> None:
    value = Value((1, 2), Inner(Color.RED), maybe, {"a": 0.5})
    assert "\n" not in to_line(value)
    assert from_line(Value, to_line(value)) == value


def made(run: Any) -> Experiment:
    """A command with one option of its own."""
    return Experiment("try", "", "", Settings, run, lambda result: {"found": (f"seen: {result['seen']}",)}, print)


def parsed(*arguments: str) -> Settings:
    """Settings of these arguments."""
    parser = argparse.ArgumentParser()
    made(None).add(parser.add_subparsers())
    return filled(Settings, parser.parse_args(["try", *arguments]))


def test_what_was_asked_for_wins_over_the_size_of_the_run() -> None:
    assert parsed() == Settings() == Settings(5, Color.RED, 7)
    assert parsed("--smoke") == Settings(2, Color.BLUE, 8)
    assert parsed("--smoke", "--runs", "9") == Settings(9, Color.BLUE, 8)


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        (None, 0, "everything verified"),
        ("a wrong byte", 1, "FAILED: a wrong byte"),
        (WrongUse("not like this"), 2, "not like this"),
        (OSError("no disk"), 1, "no disk"),
        (MemoryError(), 1, "not enough memory"),
    ],
)
def test_the_status_says_how_it_ended(outcome: Any, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_: Settings, origin: Mapping[str, Any]) -> dict[str, Any]:
        assert origin["machine"]
        if isinstance(outcome, BaseException):
            raise outcome
        return published("try", origin, {}, outcome, seen=7)

    parser = argparse.ArgumentParser()
    experiment = made(measure)
    experiment.add(parser.add_subparsers())
    assert experiment.run(parser.parse_args(["try"])) == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert ("seen: 7" in printed.out) is not isinstance(outcome, BaseException)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (number(1, 5), "6"),
        (number(1, 5), "1.5"),
        (each(number(1, 5)), "1,1"),
        (each(number(1, 5), [1, 2]), "3"),
        (ascending(each(number(1, 5))), "2,1"),
        (some_of(tuple(Color)), "green"),
    ],
)
def test_values_that_mean_nothing_are_refused(parse: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse(text)


def test_limits_are_on_the_side_they_are_meant_for() -> None:
    sides = [Target("", 1.0, 1.0, side).is_met for side in (Side.AT_LEAST, Side.MORE_THAN, Side.AT_MOST)]
    assert sides == [True, False, True]
    assert Target("", 1.0, None).is_met is None


def test_rounds_take_turns() -> None:
    """Nobody always comes first, and rounds before the first do not count."""
    orders = {turns: ["".join(turns.ordered("abc", index)) for index in range(3)] for turns in RoundTurns}
    assert orders == {
        RoundTurns.SAME: ["abc"] * 3,
        RoundTurns.ALTERNATING: ["cba", "abc", "cba"],
        RoundTurns.ROTATING: ["abc", "bca", "cab"],
    }
    assert list(interleaved("ab", 1, "", turns=RoundTurns.ROTATING)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert aligned(["name", "GB/s"], [["a", "10.5"], ["longer", "9.1"]]) == [
        "name    GB/s",
        "a       10.5",
        "longer   9.1",
    ]


def test_results_are_plain_values() -> None:
    assert plain({Color.RED: (Inner(Color.BLUE), None)}) == {"red": [{"color": "blue"}, None]}


def test_one_setting_has_one_option_in_every_benchmark() -> None:
    """A user who has learned --runs, --contexts or --gather-s from one benchmark finds it in the others."""
    flags: dict[str, set[str]] = {}
    for experiment in EXPERIMENTS:
        parser = argparse.ArgumentParser()
        experiment.add(parser.add_subparsers())
        (command,) = next(
            each for each in parser._actions if isinstance(each, argparse._SubParsersAction)
        ).choices.values()
        for option in command._actions:
            flags.setdefault(option.dest, set()).add(option.option_strings[-1])
    differing = {name: sorted(found) for name, found in flags.items() if len(found) > 1}
    assert differing == {}


def test_an_interval_holds_the_median_and_is_narrow_where_rounds_agree() -> None:
    alike, apart = interval([1.0, 1.01, 0.99] * 7), interval([0.5, 1.0, 2.0] * 7)
    assert alike.min <= alike.median == 1.0 <= alike.max
    assert alike.max - alike.min < 0.05 < apart.max - apart.min
    assert interval([2.0]) == interval([2.0, 2.0])
    with pytest.raises(ValueError, match="no samples"):
        interval([])
