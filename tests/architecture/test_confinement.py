"""Tests of `unit/` are held to their own process, and to nothing that another test has left behind."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.support.confinement import ConfinementError, confined


def resolve() -> None:
    with pytest.raises(ConfinementError):
        socket.getaddrinfo("127.0.0.1", 1)


@pytest.mark.needs_server
def test_a_name_is_not_resolved_in_a_confined_block() -> None:
    with confined() as refused:
        resolve()
        thread = threading.Thread(target=resolve)
        thread.start()
        thread.join()
    assert refused == ["socket.getaddrinfo"] * 2


@pytest.mark.needs_server
def test_a_thread_from_before_the_block_goes_on() -> None:
    """A heartbeat that an earlier test has left must not fail whichever test runs then."""
    go, found = threading.Event(), []

    def work() -> None:
        go.wait()
        found.append(socket.getaddrinfo("127.0.0.1", 1))

    thread = threading.Thread(target=work)
    thread.start()
    with confined() as refused:
        go.set()
        thread.join()
    assert found
    assert refused == []
