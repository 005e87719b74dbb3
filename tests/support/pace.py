"""A plugin for every run (`-p tests.support.pace`): it measures each test, and says how to run one that failed.

A test that takes over a second by itself has the marker `slow`. Its time is that of its call, and of its set-up and
teardown without fixtures that it shares with others (scopes of a class and more). `--check-times` names unmarked tests
above BOUND_S, and fails a run where one takes over FAILS_S. Such a test is run again, alone, and the least of TRIES
times counts, so that neither a busy machine nor one half as fast makes a test slow.

One seed decides the examples of property tests, and with `-p randomly` the order of tests.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.processes import last_lines

BOUND_S: Final = 2.0
"""A test without the marker takes no longer than this alone."""
FAILS_S: Final = 2 * BOUND_S
"""Above this, alone, a test without the marker fails a run with `--check-times`."""
TRIES: Final = 3
RUN_S_MAX: Final = 600.0
SLOW: Final = "slow"
FAST: Final = "fast"
"""The profile of `make test`. With all examples a property may take longer."""
ELSEWHERE: Final = frozenset({SLOW, "environments", "bench_smoke", "engines_full"})
"""The markers of tests that `make test` leaves out."""
OWN_S: Final = "own_s"


class Clock:
    """Measures the tests of one process, and adds what each took to its reports."""

    def __init__(self) -> None:
        self._shared_s = self._own_s = 0.0
        self._is_last = False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Note the time of a fixture that tests share. Those that it uses came before."""
        began_s = time.perf_counter()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._shared_s += time.perf_counter() - began_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        """The last test of a file also ends what the file shared."""
        self._shared_s = self._own_s = 0.0
        self._is_last = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Add the time, and to a failure what helps people."""
        if call.when == "setup":
            self._own_s = max(0.0, call.duration - self._shared_s)
        elif call.when == "call" or not self._is_last:
            self._own_s += call.duration
        if call.when == "teardown":
            item.user_properties.append((OWN_S, round(self._own_s, 4)))
        report: pytest.TestReport = yield
        if report.failed:
            seed = item.config.option.hypothesis_seed
            command = shlex.join([".venv/bin/python", "-m", "pytest", f"--hypothesis-seed={seed}", item.nodeid])
            report.sections.append(("this test alone", f"{command}\nload now: {os.getloadavg()[0]:.1f}"))
            if lines := last_lines():
                report.sections.append(("the servers' last lines", lines))
        return report


class Times:
    """Collects what the tests of all processes took, in the one that was asked for the run."""

    def __init__(self, profile: str | None) -> None:
        self.own_s: dict[str, float] = {}
        self.unmarked: list[str] = []
        self._free = ELSEWHERE if profile == FAST else ELSEWHERE | {"hypothesis"}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test's time."""
        own_s = dict(report.user_properties).get(OWN_S)
        if report.when == "teardown" and isinstance(own_s, float):
            self.own_s[report.nodeid] = own_s
            if own_s > BOUND_S and self._free.isdisjoint(report.keywords):
                self.unmarked.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the times, and look at those that are too long."""
        options = session.config.option
        if options.times:
            Path(options.times).write_text(json.dumps(self.own_s, indent=1, sort_keys=True))
        checked = options.check_times and session.exitstatus == pytest.ExitCode.OK
        if checked and any(self.own_s[nodeid] > FAILS_S < least_s(nodeid) for nodeid in self.unmarked):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_unconfigure(self) -> None:
        """Name what was found, at the very end: that is what people see of a failed run."""
        if self.unmarked:
            print(f"over {BOUND_S:.0f} s without the marker `{SLOW}`:")
            for nodeid in self.unmarked:
                print(f"{self.own_s[nodeid]:6.1f} s  {nodeid}")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pace", "what tests take")
    group.addoption("--times", metavar="FILE", help="write the seconds of each test there, as JSON")
    bound = f"fail where a test without the marker `{SLOW}` takes over {FAILS_S:.0f} s, also alone"
    group.addoption("--check-times", action="store_true", help=bound)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 31))
    config.pluginmanager.register(Clock())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times(config.option.hypothesis_profile))


def pytest_report_header(config: pytest.Config) -> str:
    return f"examples: --hypothesis-seed={config.option.hypothesis_seed}"


def least_s(nodeid: str) -> float:
    """The least that a test takes alone, over tries that end with the first one within the bound."""
    found = [float("inf")]
    while len(found) <= TRIES and min(found) > FAILS_S:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "times.json"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", f"--times={file}"]
            command += ["--hypothesis-profile", FAST]
            environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
            subprocess.run([*command, nodeid], stdout=subprocess.DEVNULL, timeout=RUN_S_MAX, env=environment)
            times = json.loads(file.read_text()) if file.exists() else {}
        found.append(times.get(nodeid, float("inf")))
    return min(found)
