"""The effect of each codec on each task, on models that were trained here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from bench.paper.compression.choice import EXACT
from bench.paper.compression.tasks import IGNORED, Sample, Task, sample
from bench.paper.compression.train import load_model
from objectcache.calibration.quality import (
    ScoredAnswers,
    States,
    answer_logits,
    coded,
    compared,
    joined,
    prefix_states,
)
from storage_server.planning.forms import TIER_CODECS

DEPTHS = 4
"""Answers are told apart by the quarter of the context that they lie in."""
BATCH = 64
"""Contexts that a model reads at once."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Samples of one task as one batch."""

    contexts: torch.Tensor
    questions: torch.Tensor
    labels: torch.Tensor
    samples: tuple[Sample, ...]


def asked(task: Task, contexts: int, tokens: int, questions: int, seed: int, number: int = 0) -> Asked:
    """Batch `number` of held-out samples."""
    random = np.random.default_rng((seed, list(Task).index(task), number))
    samples = tuple(sample(task, tokens, questions, random) for _ in range(contexts))
    length = max(len(each.questions) for each in samples)
    asking = np.zeros((contexts, length), dtype=np.int64)
    labels = np.full((contexts, length), IGNORED, dtype=np.int64)
    for row, each in enumerate(samples):
        asking[row, : len(each.questions)] = each.questions
        labels[row, : len(each.labels)] = each.labels
    return Asked(
        torch.from_numpy(np.stack([each.context for each in samples])), torch.from_numpy(asking),
        torch.from_numpy(labels), samples,
    )  # fmt: skip


def forms(states: States) -> Mapping[str, tuple[States, float, float]]:
    """The KV in each form, with the part of its exact bytes that it takes, and its worst error."""
    found: dict[str, tuple[States, float, float]] = {EXACT: (states, 1.0, 0.0)}
    for codec in TIER_CODECS:
        made = coded(states, codec)
        found[codec.value] = made.states, made.encoded_bytes / made.exact_bytes, max(made.errors)
    return found


def batch_count(contexts: int) -> int:
    """The batches of at least 2 contexts: an even number, so that each half has as many."""
    return max(2, contexts // BATCH // 2 * 2)


def measured(
    sizes: Sequence[str], contexts: int, tokens: int, questions: int, seed: int, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """A row for each model, task and form. `halves` are the accuracies on the two halves of the samples: policies know
    the first, and are scored by the second. `rights` are the parts of right tokens of each answer. Contexts that fill
    no even number of batches are left out.
    """
    rows = []
    for size in sizes:
        model = load_model(size)
        for task in Task:
            read: list[Asked] = []
            found: dict[str, list[ScoredAnswers]] = {}
            made: dict[str, tuple[float, float]] = {}
            for number in range(batch_count(contexts)):
                batch = asked(task, min(BATCH, contexts // 2), tokens, questions, seed, number)
                read.append(batch)
                states = prefix_states(model, batch.contexts)
                exact = answer_logits(model, states, batch.questions, tokens)
                for name, (form, part, error) in forms(states).items():
                    logits = exact if name == EXACT else answer_logits(model, form, batch.questions, tokens)
                    found.setdefault(name, []).append(compared(logits, exact, batch.labels))
                    made[name] = part, max(error, made.get(name, (0.0, 0.0))[1])
                advance(1)
            rows += [_row(size, task, name, *made[name], read, answers) for name, answers in found.items()]
    return rows


def _row(
    size: str, task: Task, form: str, part: float, error: float, read: Sequence[Asked], answers: Sequence[ScoredAnswers]
) -> dict[str, Any]:
    found, half = joined(answers), len(answers) // 2
    spans = _spans(read)
    return {
        "model": size, "task": task.value, "form": form, "bytes": part, "worst_error": error,
        "score": _score(task, found, read), "accuracy": found.accuracy,
        "perplexity": found.perplexity, "perplexity_exact": found.exact_perplexity, "kl": float(found.kl.mean()),
        "agreement": float(found.same.mean()), "answers": len(spans),
        "by_depth": _by_depth(found, spans),
        "halves": [joined(each).accuracy for each in (answers[:half], answers[half:])],
        "rights": [float(found.right[start:end].mean()) for start, end, _ in spans],
    }  # fmt: skip


Span = tuple[int, int, float]
"""An answer: its first token among all answered ones, the token behind it, and its depth."""


def _spans(read: Sequence[Asked]) -> list[Span]:
    spans: list[Span] = []
    at = 0
    for each in chain.from_iterable(batch.samples for batch in read):
        is_asked = each.labels != IGNORED
        starts = np.flatnonzero(is_asked & ~np.concatenate(([False], is_asked[:-1])))
        ends = np.flatnonzero(is_asked & ~np.concatenate((is_asked[1:], [False]))) + 1
        for start, end, depth in zip(starts, ends, each.depths, strict=True):
            spans.append((at, at + int(end - start), depth))
            at += int(end - start)
    return spans


def _score(task: Task, found: ScoredAnswers, read: Sequence[Asked]) -> float:
    """The task's own score: ROUGE-L for extraction, whole bodies for code, whole answers for the rest."""
    right = [found.right[start:end] for start, end, _ in _spans(read)]
    if task is not Task.EXTRACTION:
        return float(np.mean([each.all() for each in right]))
    wanted = np.concatenate([batch.labels[batch.labels != IGNORED].numpy() for batch in read])
    return float(np.mean([rouge_l(found.predicted[a:b].tolist(), wanted[a:b].tolist()) for a, b, _ in _spans(read)]))


def rouge_l(found: Sequence[int], wanted: Sequence[int]) -> float:
    """F1 of the longest common subsequence."""
    lengths = [[0] * (len(wanted) + 1) for _ in range(len(found) + 1)]
    for i, one in enumerate(found):
        for j, other in enumerate(wanted):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if one == other else max(lengths[i][j + 1], lengths[i + 1][j])
    common = lengths[-1][-1]
    return 2 * common / (len(found) + len(wanted)) if found or wanted else 1.0


def _by_depth(found: ScoredAnswers, spans: Sequence[Span]) -> list[float | None]:
    shares: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for start, end, depth in spans:
        shares[min(DEPTHS - 1, int(depth * DEPTHS))].append(bool(found.right[start:end].all()))
    return [float(np.mean(each)) if each else None for each in shares]
