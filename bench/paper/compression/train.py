"""Train the small models of `bench compression`, from scratch: `python -m bench.paper.compression.train SIZE`.

Muon for matrices and AdamW for the rest, bfloat16 where the processor has it: where it has not, it is three times
slower than float32. The loss is that of answers, and a quarter of that of the text. Contexts grow when the answers of
the stage are right, not by the clock: with long contexts from the start no model learns to look anything up. A
checkpoint after each stage lets a run go on where it stopped. Weights are kept as float16 in a file of a few MB.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.paper.compression.sizes import SIZES, WEIGHTS, Size
from bench.paper.compression.tasks import IGNORED, VOCABULARY, Sample, Task, sample

MALLOC = {
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
}
"""glibc gives big arrays back to the system at each step otherwise, which makes training five times slower."""
ALL = tuple(Task)
FIRST = (Task.RECALL, Task.CODE)
STAGES = {
    "small": ((64, 0.9, 1500, FIRST), (128, 0.9, 400, ALL), (256, 1.0, 600, ALL)),
    "smaller": ((64, 1.0, 2000, FIRST), (128, 1.0, 450, ALL), (256, 1.0, 450, ALL)),
}
"""Context tokens, the accuracy of recall that ends the stage, its steps at most, and its tasks. The rates of learning
fall in the last stage. A stage that wants 1.0 goes to its end.
"""
TOKENS_OF_A_STEP = 16_384
QUESTIONS = 32
TEXT_WEIGHT = 0.25
SEED = 7


def make_model(size: Size) -> LlamaForCausalLM:
    """The model with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
            head_dim=size.head_dim, max_position_embeddings=2048, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def load_model(name: str) -> LlamaForCausalLM:
    """A trained model, in float32. Raises FileNotFoundError where it has not been trained."""
    file = WEIGHTS / f"{name}.safetensors"
    if not file.exists():
        raise FileNotFoundError(f"{file}: train it with python -m bench.paper.compression.train {name}")
    model = make_model(SIZES[name])
    model.load_state_dict({key: value.float() for key, value in load_file(file).items()}, strict=False)
    model.tie_weights()
    model.train(False)
    return model


def batch(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, the labels of answers, and those of the text: each int64 of shape (samples, tokens), padded."""
    length = max(len(each.context) + len(each.questions) for each in samples)
    inputs = np.zeros((len(samples), length), dtype=np.int64)
    answers = np.full((len(samples), length), IGNORED, dtype=np.int64)
    words = np.full((len(samples), length), IGNORED, dtype=np.int64)
    for row, each in enumerate(samples):
        start, end = len(each.context), len(each.context) + len(each.questions)
        inputs[row, :end] = np.concatenate([each.context, each.questions])
        answers[row, start:end] = each.labels
        words[row, :start] = each.text_labels
    return torch.from_numpy(inputs), torch.from_numpy(answers), torch.from_numpy(words)


def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 by itself."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices within layers, AdamW for embeddings and norms."""
    matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name]
    others = [each for name, each in model.named_parameters() if each.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(name: str, *, say: Any = print) -> LlamaForCausalLM:
    """Train through all stages; goes on after the last stage that a checkpoint has."""
    torch.manual_seed(SEED)
    model = make_model(SIZES[name])
    checkpoint = WEIGHTS / f"{name}.checkpoint"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        first = state["stage"] + 1
    steppers = optimizers(model)
    for stage in range(first, len(STAGES[name])):
        _train_stage(model, steppers, name, stage, say)
        checkpoint.parent.mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), "stage": stage}, checkpoint)
    weights = {key: value.half().contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    save_file(weights, WEIGHTS / f"{name}.safetensors")
    checkpoint.unlink(missing_ok=True)
    return model


def _train_stage(
    model: LlamaForCausalLM, steppers: Sequence[torch.optim.Optimizer], name: str, stage: int, say: Any
) -> None:
    tokens, wanted, steps_max, tasks = STAGES[name][stage]
    is_short = has_bfloat16()
    random = np.random.default_rng((SEED, stage))
    count = max(4, TOKENS_OF_A_STEP // (2 * tokens))
    right: dict[Task, float] = dict.fromkeys(tasks, 0.0)
    began_s = time.monotonic()
    for step in range(steps_max):
        warmth = min(1.0, (step + 1) / 50)
        if stage == len(STAGES[name]) - 1:
            warmth = min(warmth, 1.05 - step / steps_max)
        for stepper in steppers:
            for group in stepper.param_groups:
                group.setdefault("lr_of_start", group["lr"])
                group["lr"] = group["lr_of_start"] * warmth
        task = tasks[step % len(tasks)]
        inputs, answers, words = batch([sample(task, tokens, QUESTIONS, random) for _ in range(count)])
        with torch.autocast("cpu", torch.bfloat16, enabled=is_short):
            logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), answers.flatten(), ignore_index=IGNORED)
        if (words != IGNORED).any():
            loss = loss + TEXT_WEIGHT * torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), words.flatten(), ignore_index=IGNORED
            )
        for stepper in steppers:
            stepper.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        is_asked = answers != IGNORED
        accuracy = float((logits.argmax(-1)[is_asked] == answers[is_asked]).float().mean())
        right[task] += 0.1 * (accuracy - right[task])
        if step % 50 == 49:
            took_s = time.monotonic() - began_s
            told = " ".join(f"{each.value} {share:.2f}" for each, share in right.items())
            say(f"{tokens} tokens, step {step + 1}, {took_s:.0f} s, loss {loss.item():.3f}: {told}", flush=True)
        if right[Task.RECALL] > wanted:
            return


def main(arguments: Sequence[str]) -> int:
    """Train the sizes that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", choices=[*SIZES, []], metavar="SIZE", help=", ".join(SIZES))
    options = parser.parse_args(arguments)
    for name in options.sizes or SIZES:
        train(name)
    return 0


if __name__ == "__main__":
    if not MALLOC.keys() <= os.environ.keys():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "bench.paper.compression.train", *sys.argv[1:]],
            {**os.environ, **MALLOC},
        )
    sys.exit(main(sys.argv[1:]))
