"""Figure 4: hashing a prefix and asking which of its chunks are stored, beside tokenizing the same text.

All of it, the server included, runs on one core.
"""

from __future__ import annotations

import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.core.show import Json
from bench.paper.ladder.bed import Session, figure, served
from descriptors.prefix_keys import Namespace, chunk_keys
from nixl_client.client import Transport
from objectcache.calibration.chunks import store_bodies
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import Task, run_rounds

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZE, HASH_ALONE, HASH_AND_LOOKUP = "tokenize", "hash", "hash and lookup"
TRAINING_CHARACTERS_PER_ENTRY = 512
CHARACTERS_PER_TOKEN = 8
PIECE_CHARACTERS = 4096
SOURCE_FOLDERS = (".", "asyncio", "email", "idlelib", "test")


def hashing(session: Session) -> Json:
    """Times of tokenization, of hashing alone and of hashing with lookup. Raises ImportError without `tokenizers`."""
    settings = session.settings
    vocabulary, counts, grains = 32_000, [1024, 4096, 16_384, 65_536], [16, 32, 64, 128, 256, 512]
    if settings.is_smoke:
        vocabulary, counts, grains = 1000, [1024], [16, 512]
    held_out, training = read_corpus(max(counts) * CHARACTERS_PER_TOKEN, vocabulary * TRAINING_CHARACTERS_PER_ENTRY)
    tokenizer = train_tokenizer(training, vocabulary)
    prompts = [prompt_of(tokenizer, held_out, count) for count in counts]
    with _one_core() as core, ExitStack() as stack:
        server = served(settings, stack)
        client = stack.enter_context(server.client(Transport.HTTP))
        stored = [key for grain in grains for key in _hashing(prompts[-1][1], grain)()]  # others are its prefixes
        store_bodies(server, stored, lambda index: stored[index][:16].encode(), 16, "figure 4: storing keys")
        tasks = []
        for text, tokens in prompts:
            count = len(tokens)
            tasks.append(_task(TOKENIZE, count, 0, partial(tokenizer.encode, text), tokens.tolist()))
            for grain in grains:
                hashed = _hashing(tokens, grain)
                keys, lookup = hashed(), partial(lambda given: client.lookup(given()), hashed)
                tasks.append(_task(HASH_ALONE, count, grain, hashed, keys))
                tasks.append(_task(HASH_AND_LOOKUP, count, grain, lookup, len(keys)))
        cells = run_rounds(tasks, settings.runs, "figure 4")
    characters, entries = sum(map(len, training)), tokenizer.get_vocab_size()
    found = {"vocabulary": entries, "training_characters": characters, "token_counts": counts}
    notes = [
        f"tokenizer: byte-level BPE of {entries} entries by the `tokenizers` library, trained at bench time on "
        f"{characters / 1e6:.1f} million characters of Python's own library; the text is not among them",
        "client and server on one core; every key is stored, so the lookup walks the whole prefix",
        "keys of each lookup are checked by the count it answers",
    ]
    tokenizing_s = {cell.labels["tokens"]: cell.median_s() for cell in cells if cell.labels["what"] == TOKENIZE}
    ratios = []
    for cell in cells:
        labels = cell.labels
        if labels["what"] == HASH_AND_LOOKUP:
            over = round(cell.median_s() / tokenizing_s[labels["tokens"]], 4)
            shape = {name: labels[name] for name in ("tokens", "chunk_tokens")}
            ratios.append({**shape, "over_tokenization": over})
    return figure({**found, "chunk_tokens": grains, "core": core}, notes, cells, ratios)


def _hashing(tokens: np.ndarray, chunk_tokens: int) -> Callable[[], list[str]]:
    namespace = Namespace(model="bench-ladder", dtype="uint8", block_tokens=chunk_tokens)
    return partial(chunk_keys, namespace, tokens, chunk_tokens)


def _task(what: str, tokens: int, chunk_tokens: int, run: Callable[[], Any], wanted: object) -> Task:
    def sample() -> float:
        started_s = time.monotonic()
        found = run()
        duration_s = time.monotonic() - started_s
        if (found.ids[:tokens] if what == TOKENIZE else found) != wanted:
            raise VerificationError(f"{what}: {tokens} tokens gave something else than before")
        return duration_s

    return Task({"what": what, "tokens": tokens, "chunk_tokens": chunk_tokens}, 0, sample)


def read_corpus(held_out_characters: int, training_characters: int) -> tuple[str, list[str]]:
    """What gets tokenized, and pieces that the tokenizer learns from: as many characters of each, where Python's
    library has them.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    others = sorted(path for folder in SOURCE_FOLDERS for path in (library / folder).glob("*.py"))
    paths = filter(Path.is_file, [library / "pydoc_data" / "topics.py", *others])
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    end = min(held_out_characters + training_characters, len(text))
    starts = range(held_out_characters, end, PIECE_CHARACTERS)
    return text[:held_out_characters], [text[start : min(start + PIECE_CHARACTERS, end)] for start in starts]


def train_tokenizer(training: Sequence[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with GPT-2's splitting into words, the kind Llama 3 and Qwen have. Raises ImportError
    where `tokenizers` is not installed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(training, trainer)
    return tokenizer


def prompt_of(tokenizer: Tokenizer, text: str, token_count: int) -> tuple[str, np.ndarray]:
    """The shortest beginning of `text` with at least so many tokens, and these. Raises ValueError for a short text."""
    encoding = tokenizer.encode(text)
    if len(encoding.ids) < token_count:
        raise ValueError(f"the held-out text has {len(encoding.ids)} tokens, {token_count} are needed")
    beginning = text[: encoding.offsets[token_count - 1][1]]
    return beginning, np.array(tokenizer.encode(beginning).ids[:token_count], dtype=np.uint32)


@contextmanager
def _one_core() -> Iterator[int]:
    """Keep this thread, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    core = max(before)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, before)
