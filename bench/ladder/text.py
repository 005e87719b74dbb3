"""Text to tokenize, and a tokenizer trained here: no model hub is asked.

Both come from the Python standard library's sources, which every machine that runs this has. What is tokenized is held
out of the training: the language reference kept in `pydoc_data`, and then sources in the order of their names.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CHARACTERS = 4096
SOURCE_FOLDERS = (".", "asyncio", "email", "idlelib", "test")


@dataclass(frozen=True, slots=True)
class Corpus:
    """`held_out` is what gets tokenized, `training` what the tokenizer learned from."""

    held_out: str
    training: Sequence[str]


def read_corpus(held_out_characters: int, training_characters: int) -> Corpus:
    """At least as many characters of each, where the library has them."""
    held_out: list[str] = []
    training: list[str] = []
    held_count = training_count = 0
    for text in _sources():
        if held_count < held_out_characters:
            held_out.append(text)
            held_count += len(text)
        elif training_count < training_characters:
            training += [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]
            training_count += len(text)
        else:
            break
    return Corpus("".join(held_out), training)


def train_tokenizer(corpus: Corpus, vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with GPT-2's splitting into words, the kind Llama 3 and Qwen have. Raises ImportError
    where `tokenizers` is not installed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus.training, trainer)
    return tokenizer


def text_of(tokenizer: Tokenizer, text: str, token_count: int) -> str:
    """The shortest beginning of `text` with at least `token_count` tokens. Raises ValueError when there are fewer."""
    encoding = tokenizer.encode(text)
    if len(encoding.ids) < token_count:
        raise ValueError(f"the held-out text has {len(encoding.ids)} tokens, {token_count} are needed")
    return text[: encoding.offsets[token_count - 1][1]]


def _sources() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    reference = library / "pydoc_data" / "topics.py"
    others = sorted(path for folder in SOURCE_FOLDERS for path in (library / folder).glob("*.py"))
    for path in [reference, *others]:
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")
