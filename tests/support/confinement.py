"""Refuses what reaches out of this process: connecting or binding a socket, resolving a name, starting a process.

An audit hook sees every such call of the interpreter, whichever library makes it. `socket.socketpair` is allowed: an
event loop wakes itself up with it. A call that C code makes on its own (NIXL, uvloop) is not seen.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import pytest

REFUSED = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.system",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.sendto",
        "subprocess.Popen",
    }
)
"""Audit events of CPython."""


class ConfinementError(RuntimeError):
    """A test reached out of its process where that is not allowed."""


class _Hook:
    """The audit hook, which stays for the life of the process and refuses only inside a `confined` block."""

    def __init__(self) -> None:
        self.refused: list[str] | None = None
        self.bystanders: frozenset[threading.Thread] = frozenset()
        self._is_installed = False

    def install(self) -> None:
        if not self._is_installed:
            sys.addaudithook(self)
            self._is_installed = True

    def __call__(self, event: str, _: tuple[object, ...]) -> None:
        if self.refused is None or event not in REFUSED:
            return
        if threading.current_thread() not in self.bystanders:
            self.refused.append(event)
            raise ConfinementError(f"{event} is refused here")


_hook = _Hook()


@contextlib.contextmanager
def confined() -> Iterator[list[str]]:
    """Refuse every call of REFUSED until the block ends, in this thread and in those that begin meanwhile. A thread
    that an earlier test has left behind does what it does for that test.

    Yields the list of the calls that were refused, because the code under test may catch ConfinementError.
    """
    _hook.install()
    _hook.bystanders = frozenset(threading.enumerate()) - {threading.current_thread()}
    refused = _hook.refused = []
    try:
        yield refused
    finally:
        _hook.refused = None


@pytest.fixture(autouse=True)
def confinement(request: pytest.FixtureRequest) -> Iterator[None]:
    """Confine each test of the folder whose conftest imports this fixture, except those marked `needs_server`."""
    if request.node.get_closest_marker("needs_server") is not None:
        yield
        return
    with confined() as refused:
        yield
    assert not refused, f"{sorted(set(refused))}: a test that needs this belongs to integration/ or faults/"
