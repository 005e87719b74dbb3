"""Models to try, and the prompts that they read: the document, and two questions about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

CHUNK_TOKENS = 16
SEED = 20260101
ATTENTION_GAIN = 2.5
"""Queries and keys of the seeded model are scaled by this: with the plain random ones attention is nearly uniform, and
one wrong chunk among hundreds would hardly show in the logits."""

FIRST_QUESTION = "What is the name of this license?"
SECOND_QUESTION = "Who is the Licensor?"
_HERE = Path(__file__).parent

Model: TypeAlias = Any
"""A causal language model of transformers."""

# attention reads grouped keys and values in place; else transformers first copies them for every query head
os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")


class ModelRefusedError(Exception):
    """The demo cannot run on this model; the message says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in float32, the tokens of both prompts, and how its tokens are read.

    `chunk_count`: the whole chunks that both prompts begin with.
    """

    name: str
    weights: str
    model: Model
    first_prompt: list[int]
    second_prompt: list[int]
    text_of: Callable[[Sequence[int]], str]

    @property
    def chunk_count(self) -> int:
        """At least one whole chunk of the first prompt lies behind these."""
        pairs = enumerate(zip(self.first_prompt, self.second_prompt, strict=False))
        together = next(place for place, (one, other) in pairs if one != other)
        return min(together, len(self.first_prompt) - CHUNK_TOKENS) // CHUNK_TOKENS

    @property
    def document(self) -> list[int]:
        """The tokens of the chunks that both prompts begin with."""
        return self.second_prompt[: self.chunk_count * CHUNK_TOKENS]

    @property
    def question(self) -> list[int]:
        """The tokens of the second prompt that follow."""
        return self.second_prompt[self.chunk_count * CHUNK_TOKENS :]

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers, in the order in which they run."""
        layers: Sequence[torch.nn.Module] = self.model.get_decoder().layers
        return layers

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id
        return frozenset([ends] if isinstance(ends, int) else ends or ())


def pretrained(source: str, document: str) -> Subject:
    """A model of a folder (or of a hub, where it can be reached) with questions about `document`, by the model's own
    chat template where it has one. Raises ModelRefusedError.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if source.startswith(("/", ".")) and not (Path(source) / "config.json").is_file():
        raise ModelRefusedError(f"{source}: this folder has no model (config.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model: Model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.eval()
    except (OSError, ValueError) as error:
        raise ModelRefusedError(f"{source}: {str(error).strip().splitlines()[0].rstrip('.')}") from None
    if getattr(model.get_decoder(), "layers", None) is None:
        raise ModelRefusedError(f"{source}: the layers of {type(model).__name__} are not where the demo looks for them")
    prompts = [_prompt(tokenizer, document, question) for question in (FIRST_QUESTION, SECOND_QUESTION)]
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and max(map(len, prompts)) + ANSWER_TOKENS > positions:
        raise ModelRefusedError(f"{source} reads {positions:,} tokens; the prompt has {len(prompts[0]):,}")
    name = Path(source).name

    def text_of(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    return Subject(
        name=name, weights="", model=model, first_prompt=prompts[0], second_prompt=prompts[1], text_of=text_of
    )


ANSWER_TOKENS = 32
"""The most that an answer has."""


def _prompt(tokenizer: Any, document: str, question: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(f"{document}\n\nQuestion: {question}\nAnswer:"))
    said = [{"role": "user", "content": f"{document}\n\n{question}"}]
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def seeded(chunk_count: int) -> Subject:
    """A small Llama with seeded random weights, which reads bytes: nothing is fetched, and its answers mean nothing."""
    config = LlamaConfig.from_json_file(_HERE / "seeded.json")
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= ATTENTION_GAIN
            layer.self_attn.k_proj.weight *= ATTENTION_GAIN
    document = list(read_document().encode()[: chunk_count * CHUNK_TOKENS])
    prompts = [document + list(f"\n{question}\n".encode()) for question in (FIRST_QUESTION, SECOND_QUESTION)]
    return Subject(
        name="seeded-llama",
        weights="seeded random weights",
        model=model,
        first_prompt=prompts[0],
        second_prompt=prompts[1],
        text_of=lambda tokens: repr(bytes(tokens)),
    )


def read_document() -> str:
    """The Apache License 2.0, of 11 kB."""
    return (_HERE / "document.txt").read_text().strip()


def logits_of_last(model: Model, tokens: Sequence[int], cache: object = None) -> torch.Tensor:
    """Run the model on `tokens`, after what `cache` holds; the last token's logits, (vocabulary,)."""
    output = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def decode(subject: Subject, logits: torch.Tensor, cache: object) -> list[int]:
    """The answer's tokens: the likeliest one each time, from the logits of the prompt and the cache behind them."""
    tokens: list[int] = []
    while len(tokens) < ANSWER_TOKENS and (best := int(logits.argmax())) not in subject.end_tokens:
        tokens.append(best)
        logits = logits_of_last(subject.model, [best], cache)
    return tokens


def first_tokens(cache: DynamicCache, tokens: int) -> DynamicCache:
    """A copy of a cache, cut to its first `tokens` tokens."""
    copy = DynamicCache()
    layers: list[Any] = cache.layers
    for layer_index, layer in enumerate(layers):
        copy.update(layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone(), layer_index)
    return copy
