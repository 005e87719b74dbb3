"""The process that loads clients' metadata first: it may be somebody else's by now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from objectcache.adapters.nixl_agent import NixlFailure
from storage_server.delivery.transport.metadata_probe import ANSWER_BYTES_MAX, MetadataProbe


class PlayedChild:
    """Answers each question with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.stdin = self
        self.stdout = asyncio.StreamReader(limit=ANSWER_BYTES_MAX)
        self.returncode: int | None = None
        self._answer = answer

    def write(self, line: bytes) -> None:
        self.stdout.feed_data(self._answer)

    async def drain(self) -> None: ...

    def kill(self) -> None:
        self.returncode = -9

    async def wait(self) -> None: ...


class PlayedProbe(MetadataProbe):
    """Its children are played."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__({})
        self.children = [PlayedChild(answer) for answer in answers]
        self.begun = iter(self.children)

    async def _started(self) -> Any:
        if self._child is None:
            child: Any = next(self.begun)
            self._child = child
        return self._child


@pytest.mark.parametrize("answer", [b"x" * (2 * ANSWER_BYTES_MAX), b"\xff\xff\n"], ids=["long", "no text"])
async def test_a_child_whose_answer_is_none_is_ended(answer: bytes) -> None:
    """Its next lines would be taken for the answers to other keys' registrations."""
    probe = PlayedProbe(answer + b"ok\nok\n", b"ok\n")
    with pytest.raises(NixlFailure):
        await probe.check(b"m", [])
    assert probe.children[0].returncode == -9
    await probe.check(b"m", [])
    await probe.close()
