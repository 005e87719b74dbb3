"""Figure 4: hashing a prefix and asking which of its chunks are stored, beside tokenizing the same text.

All of it, the server included, runs on one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.content import VerificationError
from bench.ladder.bed import Session, one_core, served_folder
from bench.ladder.results import Cell, Figure, FigureName, Label, State
from bench.ladder.rounds import Task, run_rounds
from bench.ladder.text import Corpus, read_corpus, text_of, train_tokenizer
from bench.progress import progress_bar
from descriptors.prefix_keys import Namespace, chunk_keys
from nixl_client.client import ObjectCacheClient, Transport

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TITLE = "hashing and lookup beside tokenization"
TOKENIZE, HASH_ALONE, HASH_AND_LOOKUP = "tokenize", "hash", "hash and lookup"
PUT_BATCH = 512
TRAINING_CHARACTERS_PER_ENTRY = 512
CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    vocabulary: int
    token_counts: tuple[int, ...]
    chunk_tokens: tuple[int, ...]


FULL = Sizes(32_000, (1024, 4096, 16_384, 65_536), (16, 32, 64, 128, 256, 512))
SMOKE = Sizes(1000, (1024,), (16, 512))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its tokens."""

    text: str
    tokens: np.ndarray


def hashing(session: Session) -> Figure:
    """Times of tokenization, of hashing alone and of hashing with lookup. Raises ImportError without `tokenizers`."""
    settings = session.settings
    sizes = SMOKE if settings.is_smoke else FULL
    training = sizes.vocabulary * TRAINING_CHARACTERS_PER_ENTRY
    corpus = read_corpus(max(sizes.token_counts) * CHARACTERS_PER_TOKEN, training)
    tokenizer = train_tokenizer(corpus, sizes.vocabulary)
    prompts = {count: _prompt(tokenizer, corpus, count) for count in sizes.token_counts}
    with one_core() as core, served_folder(settings) as served, served.server.client(Transport.HTTP) as client:
        _store(client, prompts[max(sizes.token_counts)], sizes)
        cells = run_rounds(_tasks(client, tokenizer, prompts, sizes), settings.runs, "figure 4")
    training_characters = sum(map(len, corpus.training))
    return Figure(
        FigureName.HASHING,
        TITLE,
        State.DONE,
        settings={
            "vocabulary": tokenizer.get_vocab_size(),
            "training_characters": training_characters,
            "token_counts": sizes.token_counts,
            "chunk_tokens": sizes.chunk_tokens,
            "core": core,
        },
        notes=[
            f"tokenizer: byte-level BPE of {tokenizer.get_vocab_size()} entries by the `tokenizers` library, trained "
            f"at bench time on {training_characters / 1e6:.1f} million characters of Python's own library; the text is "
            "not among them",
            "client and server on one core; every key is stored, so the lookup walks the whole prefix",
            "keys of each lookup are checked by the count it answers",
        ],
        cells=cells,
        rows=_ratios(cells),
    )


def _ratios(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What hashing and lookup take of the time tokenization takes: medians."""
    tokenizing = {cell.labels["tokens"]: cell for cell in cells if cell.labels["what"] == TOKENIZE}
    return [
        {
            "tokens": cell.labels["tokens"],
            "chunk_tokens": cell.labels["chunk_tokens"],
            "over_tokenization": round(cell.median_s() / tokenizing[cell.labels["tokens"]].median_s(), 4),
        }
        for cell in cells
        if cell.labels["what"] == HASH_AND_LOOKUP
    ]


def _prompt(tokenizer: Tokenizer, corpus: Corpus, token_count: int) -> Prompt:
    text = text_of(tokenizer, corpus.held_out, token_count)
    return Prompt(text, np.array(tokenizer.encode(text).ids[:token_count], dtype=np.uint32))


def _namespace(chunk_tokens: int) -> str:
    return Namespace(model="bench-ladder", dtype="uint8", block_tokens=chunk_tokens).text()


def _store(client: ObjectCacheClient, longest: Prompt, sizes: Sizes) -> None:
    """An object for every chunk of the longest prompt; shorter ones are its prefixes."""
    keys = [key for size in sizes.chunk_tokens for key in chunk_keys(_namespace(size), longest.tokens, size)]
    with progress_bar(len(keys), "figure 4: storing keys") as advance:
        for first in range(0, len(keys), PUT_BATCH):
            some = keys[first : first + PUT_BATCH]
            client.put_chunks(some, [key[:16].encode() for key in some])
            advance(len(some))


def _tasks(client: ObjectCacheClient, tokenizer: Tokenizer, prompts: dict[int, Prompt], sizes: Sizes) -> list[Task]:
    tasks = []
    for count, prompt in prompts.items():
        tasks.append(Task({"what": TOKENIZE, "tokens": count, "chunk_tokens": 0}, 0, _tokenize(tokenizer, prompt)))
        for size in sizes.chunk_tokens:
            tasks.append(Task({"what": HASH_ALONE, "tokens": count, "chunk_tokens": size}, 0, _hash(prompt, size)))
            labels: dict[str, Label] = {"what": HASH_AND_LOOKUP, "tokens": count, "chunk_tokens": size}
            tasks.append(Task(labels, 0, _hash_and_lookup(client, prompt, size)))
    return tasks


def _tokenize(tokenizer: Tokenizer, prompt: Prompt) -> Callable[[], float]:
    def run() -> float:
        started_s = time.monotonic()
        encoding = tokenizer.encode(prompt.text)
        duration_s = time.monotonic() - started_s
        if not np.array_equal(encoding.ids[: len(prompt.tokens)], prompt.tokens):
            raise VerificationError("the tokenizer gave other tokens than before")
        return duration_s

    return run


def _hash(prompt: Prompt, chunk_tokens: int) -> Callable[[], float]:
    expected = chunk_keys(_namespace(chunk_tokens), prompt.tokens, chunk_tokens)

    def run() -> float:
        started_s = time.monotonic()
        keys = chunk_keys(_namespace(chunk_tokens), prompt.tokens, chunk_tokens)
        duration_s = time.monotonic() - started_s
        if keys != expected:
            raise VerificationError("the same tokens gave other keys")
        return duration_s

    return run


def _hash_and_lookup(client: ObjectCacheClient, prompt: Prompt, chunk_tokens: int) -> Callable[[], float]:
    def run() -> float:
        started_s = time.monotonic()
        keys = chunk_keys(_namespace(chunk_tokens), prompt.tokens, chunk_tokens)
        matched = client.lookup(keys)
        duration_s = time.monotonic() - started_s
        if matched != len(keys):
            raise VerificationError(f"{matched} of {len(keys)} stored chunks were found")
        return duration_s

    return run
