"""The slots of one server: the tokens that each held last, and the slots that are in use. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nixl_client.connectors.llama_cpp.rules.slot_file import Tokens

NO_TOKENS = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class ChosenSlot:
    """A slot that a request has, and how many of its prompt's first tokens the slot holds."""

    index: int
    held_tokens: int


class SlotLedger:
    """All slots are free and empty at first. The server compares tokens itself: a record that is wrong costs time, and
    never a wrong answer.
    """

    def __init__(self, slot_count: int) -> None:
        self._held = [NO_TOKENS] * slot_count
        self._used_at = [0] * slot_count
        self._uses = 0
        self._busy: set[int] = set()

    @property
    def slot_count(self) -> int:
        """How many slots the server has."""
        return len(self._held)

    def choose(self, prompt: Tokens) -> ChosenSlot | None:
        """Take the free slot that holds the longest beginning of the prompt, of several the one used longest ago. None
        where no slot is free.
        """
        free = [index for index in range(len(self._held)) if index not in self._busy]
        if not free:
            return None
        common = {index: common_tokens(self._held[index], prompt) for index in free}
        best = max(free, key=lambda index: (common[index], -self._used_at[index]))
        self._busy.add(best)
        self._uses += 1
        self._used_at[best] = self._uses
        return ChosenSlot(best, common[best])

    def release(self, index: int, holds: Tokens) -> None:
        """The slot is free, and holds these tokens."""
        self._held[index] = holds
        self._busy.discard(index)

    def forget(self) -> None:
        """Nobody knows any more what the slots hold."""
        self._held = [NO_TOKENS] * len(self._held)


def common_tokens(left: Tokens, right: Tokens) -> int:
    """How many of the first tokens are the same."""
    count = min(len(left), len(right))
    differ = np.flatnonzero(left[:count] != right[:count])
    return int(differ[0]) if len(differ) else count
