"""The questions that a model is asked about a text: for its next tokens, and for facts that stand in it.

    context:  <bos> … text … The code of room 41 is 70312. … text …      its KV is encoded
    asked:    the text's next tokens, and behind the same context  The code of room 41 is -> 70312

Every context begins as the model's tokenizer begins a text. Contexts are whole chunks, so that all of it is encoded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Ids = tuple[int, ...]
FACTS = 4
ROOMS = range(10, 100)
CODES = range(10_000, 100_000)


@dataclass(frozen=True, slots=True)
class AskedFact:
    """A fact that stands in a context: the question's tokens, and those of the right answer."""

    question: Ids
    answer: Ids


@dataclass(frozen=True, slots=True)
class Probe:
    """A context, the tokens that follow it, and the facts that stand in it."""

    context: Ids
    continuation: Ids
    facts: tuple[AskedFact, ...]


def encoder_of(tokenizer: Callable[..., dict[str, list[int]]]) -> Callable[[str], Ids]:
    """The tokens of a text, without those that begin or end one."""
    return lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def beginning_of(tokenizer: Callable[..., dict[str, list[int]]]) -> Ids:
    """The tokens with which the tokenizer begins a text: BOS, where the model wants it, or none."""
    encoded, plain = (tuple(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    return encoded[: encoded.index(plain[0])] if plain and plain[0] in encoded else ()


def probes(
    texts: Sequence[Ids], encode: Callable[[str], Ids], beginning: Ids, context_tokens: int, seed: int
) -> list[Probe]:
    """A probe for each text: its tokens, with facts between them, fill a context, and those that are left follow it.
    Raises ValueError where a text is too short.
    """
    chosen = random.Random(seed)
    return [_probe(text, encode, beginning, context_tokens, chosen) for text in texts]


def _probe(
    text: Ids, encode: Callable[[str], Ids], beginning: Ids, context_tokens: int, chosen: random.Random
) -> Probe:
    rooms, codes = chosen.sample(ROOMS, FACTS), chosen.sample(CODES, FACTS)
    placed = [encode(f"\n\nThe code of room {room} is {code}.\n\n") for room, code in zip(rooms, codes, strict=True)]
    room_left = context_tokens - len(beginning) - sum(map(len, placed))
    if room_left < FACTS + 1 or len(text) <= room_left:
        raise ValueError(f"a text of {len(text)} tokens for a context of {context_tokens}")
    cuts = [room_left * part // (FACTS + 1) for part in range(FACTS + 2)]
    context = list(beginning)
    for part in range(FACTS + 1):
        context += text[cuts[part] : cuts[part + 1]]
        context += placed[part] if part < FACTS else ()
    asked = tuple(_asked(encode, room, code) for room, code in zip(rooms, codes, strict=True))
    return Probe(tuple(context), text[room_left:], asked)


def _asked(encode: Callable[[str], Ids], room: int, code: int) -> AskedFact:
    question = encode(f"\n\nThe code of room {room} is")
    whole = encode(f"\n\nThe code of room {room} is {code}")
    same = next((at for at, pair in enumerate(zip(question, whole, strict=False)) if pair[0] != pair[1]), len(question))
    return AskedFact(whole[:same], whole[same:])


def cut(ids: Sequence[int], tokens: int, count: int) -> list[Ids]:
    """Up to `count` texts of so many tokens, spread over all of them. Raises ValueError where there is none."""
    whole = len(ids) // tokens
    if not whole:
        raise ValueError(f"the texts have {len(ids)} tokens, and {tokens} are needed")
    taken = min(count, whole)
    starts = [at * (whole - 1) // max(1, taken - 1) for at in range(taken)]
    return [tuple(ids[start * tokens : (start + 1) * tokens]) for start in starts]
