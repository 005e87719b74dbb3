"""Errors that are kept hold nothing of the frames that they passed."""

from __future__ import annotations

import gc
import weakref

from objectcache.adapters.kept_errors import without_frames


class _Buffer:
    """Something that a frame has."""


def _failed(buffer: _Buffer) -> Exception:
    try:
        try:
            raise OSError("the connection has ended")
        except OSError as error:
            raise ValueError("no answer") from error
    except ValueError as error:
        return error


def test_an_error_and_what_it_came_from_hold_no_variables() -> None:
    buffer = _Buffer()
    held = weakref.ref(buffer)
    error = without_frames(_failed(buffer))
    gc.disable()
    try:
        del buffer
        assert held() is None
    finally:
        gc.enable()
    assert isinstance(error.__cause__, OSError)


def test_errors_that_came_from_each_other_are_walked_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert without_frames(one) is one
