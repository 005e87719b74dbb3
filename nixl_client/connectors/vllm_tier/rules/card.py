"""The engine card: what the workers of an engine know and the tier, beside the scheduler, is not told: the weights, all
of the configuration that KV bytes depend on, and which bytes of a row each group uses.

Each worker leaves one behind the rows of the primary tier, in the place of its rank, before the scheduler begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nixl_client.connectors.vllm_tier.rules.rows import RowForm, UsedPages

CARD_BYTES = 256 << 10
"""The place of one rank's card."""
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class EngineCard:
    """One worker's. `identity` is a digest of weights and configuration, `name` what people call the model, `hashing`
    how vLLM hashes blocks. `groups` has the pages that each cache group uses of a row, this rank's part; `are_whole`
    says for each whether every block of a chunk is always there.
    """

    identity: str
    name: str
    platform: str
    hashing: str
    has_adapters: bool
    groups: tuple[tuple[UsedPages, ...], ...]
    are_whole: tuple[bool, ...]

    def encode(self) -> bytes:
        """As it lies behind the rows. Raises ValueError for one that is too large."""
        document = {
            "identity": self.identity,
            "name": self.name,
            "platform": self.platform,
            "hashing": self.hashing,
            "has_adapters": self.has_adapters,
            "groups": [[[each.start, each.stride, each.nbytes, each.count] for each in group] for group in self.groups],
            "are_whole": list(self.are_whole),
        }
        text = json.dumps(document, separators=(",", ":")).encode()
        if len(text) + _LENGTH_BYTES > CARD_BYTES:
            raise ValueError(f"a card of {len(text)} bytes")
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_card(data: bytes) -> EngineCard | None:
    """The card of one rank; None where there is none. Raises ValueError for what is no card."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not length:
        return None
    text = data[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if len(text) != length:
        raise ValueError("the card is cut short")
    try:
        document: dict[str, Any] = json.loads(text)
        return EngineCard(
            identity=str(document["identity"]),
            name=str(document["name"]),
            platform=str(document["platform"]),
            hashing=str(document["hashing"]),
            has_adapters=bool(document["has_adapters"]),
            groups=tuple(tuple(UsedPages(*map(int, each)) for each in group) for group in document["groups"]),
            are_whole=tuple(map(bool, document["are_whole"])),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"this is no card: {error!r}") from error


def forms_of(
    cards: Sequence[EngineCard], group_count: int, row_bytes: int, blocks_per_chunk: int
) -> list[RowForm | None]:
    """How the rows of each group are used, by the cards of all ranks; None for a group that must not be stored, since a
    chunk of several blocks may lack some of them. Raises ValueError for cards that do not fit together.
    """
    if any(len(card.groups) != group_count or len(card.are_whole) != group_count for card in cards):
        raise ValueError("the workers have other cache groups than the scheduler")
    forms: list[RowForm | None] = []
    for group in range(group_count):
        is_whole = blocks_per_chunk == 1 or all(card.are_whole[group] for card in cards)
        pages = [each for card in cards for each in card.groups[group]]
        forms.append(RowForm.of(pages, row_bytes) if is_whole else None)
    return forms
