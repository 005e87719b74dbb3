"""Blocks that were written down of an engine come back into the index, page by page, so that nothing waits for all."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

from objectcache.orchestrator.rules.prefix_index import RANKS_MAX, PrefixIndex

Page = list[tuple[bytes, bytes]]
"""Blocks as a source names them, and our names of them."""
_log = logging.getLogger(__name__)


async def restored(
    index: PrefixIndex, sources: Iterable[str], page_of: Callable[[str, bytes], Awaitable[Page]]
) -> set[str]:
    """The data-parallel ranks of one engine for which the index has room, and has their blocks now. `page_of` gives
    those of a source behind a block. Raises what `page_of` raises.
    """
    found: set[str] = set()
    for source in sources:
        try:
            if len(found) >= RANKS_MAX:
                raise ValueError(f"more than {RANKS_MAX} ranks")
            index.add_engine(source)
        except ValueError as error:  # what an engine said of itself keeps no orchestrator from starting
            _log.warning("the blocks of %s that were written down are forgotten: %s", source, error)
            continue
        found.add(source)
        last = b""
        while page := await page_of(source, last):
            index.restore(source, page)
            last, _ = page[-1]
    return found
