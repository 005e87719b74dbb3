"""Progress bars on standard error, where it is a terminal and tqdm is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, title: str) -> Iterator[Callable[[int], None]]:
    """A bar of `total` steps; call what it gives with the number of steps done since the last call."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _: None
        return
    with tqdm(total=total, desc=title, file=sys.stderr, disable=None, leave=False) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance
