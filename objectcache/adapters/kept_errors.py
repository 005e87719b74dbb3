"""Errors that are kept for whoever asks for them later. An error holds the frames that it passed, and those hold all
their variables: the buffers of an answer, for example.
"""

from __future__ import annotations

from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)


def without_frames(error: _E) -> _E:
    """The same error, which holds no frames any more, nor do the errors that it came from."""
    left, seen = list[BaseException]([error]), set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        left += [before for before in (each.__cause__, each.__context__) if before is not None]
    return error
