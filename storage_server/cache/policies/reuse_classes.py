"""Classes of chunks that are used again after similar times."""

from __future__ import annotations

from dataclasses import dataclass

CONTINUATION_COUNT_MAX = 2
"""More continuations than this say nothing more."""


@dataclass(frozen=True, slots=True)
class Use:
    """One chunk of one request. `known_count` leading chunks of the request were known before; the chunk has been used
    `use_count` times before, and `continuation_count` different chunks have followed it.
    """

    position: int
    chunk_count: int
    known_count: int
    use_count: int
    continuation_count: int


def former_class_path(use_count: int, continuation_count: int) -> tuple[int, ...]:
    """The class of a chunk of before a restart, which was used so often before its last use. It has no finer features:
    the prompts that used it are not known.
    """
    return int(not continuation_count), min(continuation_count, CONTINUATION_COUNT_MAX), use_count.bit_length()


def class_path(use: Use) -> tuple[int, ...]:
    """The features of a chunk, from the coarsest class to the finest one. Counts are put together by powers of two, so
    there are few classes.
    """
    return (
        int(use.position == use.chunk_count - 1),
        min(use.continuation_count, CONTINUATION_COUNT_MAX),
        use.use_count.bit_length(),
        (use.chunk_count - use.known_count).bit_length(),
        use.chunk_count.bit_length(),
    )
