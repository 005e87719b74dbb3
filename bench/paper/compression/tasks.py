"""Tasks that need the KV of their context: made from a seed, with everything that is asked for somewhere in the
context.

    recall      pairs of a key and a value; asked: the value of a key
    two_hops    pairs from a to b, and from b to c; asked: b and c of an a
    passkey     text with a few codes of four symbols, each behind a mark; asked: the code of a mark
    extraction  text with marked words; asked: the marked words, in order
    code        functions, each a name and a body; asked: the body of a name

Keys that are asked for are drawn without replacement, so that no answer is copied from an earlier one. The text is a
chain of words that the model learns; codes and marked words come from the same words, and marks that nobody asks for
stand between, so that a needle does not look unlike its surroundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
VOCABULARY = 512
ASK, ANSWER, MARK, NAME, END = 1, 2, 3, 4, 5
MARKS = range(8, 40)
"""Tokens that stand for codes of the passkey task."""
WORDS = range(64, 192)
SYMBOLS = range(192, VOCABULARY)
SUCCESSORS = 4
CODE_SYMBOLS, BODY_TOKENS, MARKED_WORDS = 4, 8, 4
IGNORED = -100


class Task(Enum):
    """The tasks; each is a class of content."""

    RECALL = "recall"
    TWO_HOPS = "two_hops"
    PASSKEY = "passkey"
    EXTRACTION = "extraction"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Sample:
    """`context` has the asked number of tokens. `questions` follow it, and `labels` has the token that each position is
    to predict where an answer is, else IGNORED; int64 of one length. `depths` has, for each answer, how deep in the
    context it lies, from 0 to 1. `text_labels` are the words that the context's text goes on with.
    """

    context: Tokens
    questions: Tokens
    labels: Tokens
    depths: tuple[float, ...]
    text_labels: Tokens


def sample(task: Task, context_tokens: int, question_count: int, random: np.random.Generator) -> Sample:
    """A context of so many tokens, and up to so many questions."""
    context, answers = _MAKERS[task](context_tokens, question_count, random)
    questions: list[int] = []
    labels: list[int] = []
    for prompt, answer, _ in answers:
        questions += [ASK, *prompt, ANSWER, *answer]
        labels += [IGNORED] * (1 + len(prompt)) + [*answer, IGNORED]
    text = np.full(context_tokens, IGNORED, dtype=np.int64)
    is_text = np.isin(context, WORDS)
    follows = is_text[:-1] & is_text[1:]
    text[:-1][follows] = context[1:][follows]
    return Sample(
        context, np.array(questions), np.array(labels), tuple(depth / context_tokens for *_, depth in answers), text
    )


Answers = list[tuple[list[int], list[int], int]]
"""The prompt of a question, its answer, and the place of the answer in the context."""


def _chain() -> Tokens:
    """The words that may follow each word, shape (words, SUCCESSORS): one language for all samples."""
    return np.random.default_rng(20_251).integers(0, len(WORDS), (len(WORDS), SUCCESSORS))


_SUCCESSORS = _chain()


def text(count: int, random: np.random.Generator) -> Tokens:
    """A text of so many words."""
    steps = random.integers(0, SUCCESSORS, count)
    words = np.empty(count, dtype=np.int64)
    word = int(random.integers(0, len(WORDS)))
    for at in range(count):
        word = int(_SUCCESSORS[word, steps[at]])
        words[at] = word
    return words + WORDS.start


def _draw(random: np.random.Generator, count: int, *, replace: bool = False) -> list[int]:
    return [int(each) for each in random.choice(np.arange(SYMBOLS.start, SYMBOLS.stop), count, replace=replace)]


def _recall(tokens: int, count: int, random: np.random.Generator) -> tuple[Tokens, Answers]:
    pairs = min(tokens // 2, len(SYMBOLS))
    keys, values = _draw(random, pairs), _draw(random, pairs, replace=True)
    context = np.stack([keys, values], axis=1).reshape(-1)
    context = _filled(context, tokens, random)
    asked = random.permutation(pairs)[:count]
    return context, [([keys[at]], [values[at]], 2 * int(at)) for at in asked]


def _two_hops(tokens: int, count: int, random: np.random.Generator) -> tuple[Tokens, Answers]:
    chains = min(tokens // 4, len(SYMBOLS) // 2)
    first, second = np.split(np.array(_draw(random, 2 * chains)), 2)
    last = np.array(_draw(random, chains, replace=True))
    pairs = np.concatenate([np.stack([first, second], axis=1), np.stack([second, last], axis=1)])
    order = random.permutation(len(pairs))
    context = _filled(pairs[order].reshape(-1), tokens, random)
    places = np.empty(len(pairs), dtype=np.int64)
    places[order] = np.arange(len(pairs))
    asked = random.permutation(chains)[:count]
    return context, [([int(first[at])], [int(second[at]), int(last[at])], 2 * int(places[at])) for at in asked]


def _passkey(tokens: int, count: int, random: np.random.Generator) -> tuple[Tokens, Answers]:
    context = text(tokens, random)
    step = 2 + CODE_SYMBOLS + 2
    codes = max(1, min(len(MARKS), tokens // (2 * step)))
    marks = random.permutation(np.array(MARKS))[:codes]
    slots = random.permutation(tokens // step)[:codes]
    answers: Answers = []
    for mark, slot in zip(marks, slots, strict=True):
        at = int(slot) * step
        code = [int(each) for each in text(CODE_SYMBOLS, random)]
        random.shuffle(code)
        context[at : at + 2 + CODE_SYMBOLS] = [MARK, mark, *code]
        answers.append(([MARK, int(mark)], code, at))
    return context, answers[: max(1, count // 2)]


def _extraction(tokens: int, count: int, random: np.random.Generator) -> tuple[Tokens, Answers]:
    """Each paragraph begins with its name, and has marked words; asked: those of a paragraph, in order."""
    paragraph = 32
    context = text(tokens, random)
    paragraphs = max(1, tokens // paragraph)
    names = random.permutation(np.array(MARKS))[:paragraphs]
    answers: Answers = []
    for number, name in enumerate(names):
        at = number * paragraph
        context[at : at + 2] = [NAME, name]
        places = at + 3 + 2 * np.sort(random.permutation((paragraph - 5) // 2)[:MARKED_WORDS])
        places = places[places + 1 < tokens]
        context[places] = END
        answers.append(([NAME, int(name)], [int(context[place + 1]) for place in places], at))
    order = random.permutation(len(answers))[: max(1, count // 2)]
    return context, [answers[at] for at in order if answers[at][1]]


def _code(tokens: int, count: int, random: np.random.Generator) -> tuple[Tokens, Answers]:
    step = 2 + BODY_TOKENS
    functions = max(1, tokens // step)
    names = _draw(random, functions)
    bodies = [_draw(random, BODY_TOKENS, replace=True) for _ in names]
    context = np.concatenate([np.array([NAME, name, *body]) for name, body in zip(names, bodies, strict=True)])
    asked = random.permutation(functions)[: max(1, count // 4)]
    return _filled(context, tokens, random), [([NAME, names[at]], bodies[at], step * int(at)) for at in asked]


def _filled(context: Tokens, tokens: int, random: np.random.Generator) -> Tokens:
    """The context, with text behind it up to the wanted length."""
    return np.concatenate([context[:tokens], text(max(0, tokens - len(context)), random)])


_MAKERS: Mapping[Task, Callable[[int, int, np.random.Generator], tuple[Tokens, Answers]]] = {
    Task.RECALL: _recall,
    Task.TWO_HOPS: _two_hops,
    Task.PASSKEY: _passkey,
    Task.EXTRACTION: _extraction,
    Task.CODE: _code,
}
