"""The forms of a delivery's chunks, where the caller accepts encoded layers: for each chunk its codec, and the bytes
that each of its layers takes. Chunks of one form that follow each other are a run.

    exact;3;32768,kivi4-1;509;9240,error;0.0861;0.0712      three exact chunks, then 509 encoded ones; S is 32,768

At the end stand the errors of what is delivered: the worst of the chunks, and their mean. Where the caller bounds the
loss, the greatest loss of the chunks and its ground stand behind them: `loss;0.0058;calibrated`.

An encoded layer lies at the beginning of the S bytes that the exact one would have. In chunk-major mode the encoded
layers of a chunk lie one after the other at the beginning of the chunk's L*S bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

EXACT = "exact"
CODEC_NAME = re.compile(r"[a-z0-9._-]{1,32}\Z")
RUNS_MAX = 64
"""A server sends the chunks after so many runs in their exact form, as one more run: the text has to fit into a notice.
"""
MERGED_RUNS_MAX = 256
"""Runs of a delivery that several servers carry out: the text has to fit into a header."""
_ERROR, _LOSS = "error", "loss"


class LossBasis(Enum):
    """The ground of a delivery's loss, the weakest of its chunks: their models were calibrated; the loss is the
    greatest of all calibrated models; or a model is not calibrated, and its chunks came exactly therefore.
    """

    CALIBRATED = "calibrated"
    WORST = "worst"
    UNCALIBRATED = "uncalibrated"


_WEAKNESS = list(LossBasis)


def weakest(each: Iterable[LossBasis]) -> LossBasis:
    """The weakest ground, of one at least."""
    return max(each, key=_WEAKNESS.index)


class WrongFormsError(ValueError):
    """A text that tells no forms, or others than were asked for."""


@dataclass(frozen=True, slots=True)
class FormRun:
    """`chunk_count` chunks of one codec, each of whose layers takes `layer_bytes`."""

    codec: str
    chunk_count: int
    layer_bytes: int


@dataclass(frozen=True, slots=True)
class LayerForms:
    """The runs of a delivery in the order of its chunks, and the errors of its chunks: the greatest, and the mean. The
    greatest loss in nats a token, with its ground, is there where the caller bounds the loss.
    """

    runs: tuple[FormRun, ...]
    worst_error: float = 0.0
    mean_error: float = 0.0
    worst_loss: float = 0.0
    loss_basis: LossBasis | None = None

    @property
    def chunk_count(self) -> int:
        """k."""
        return sum(run.chunk_count for run in self.runs)

    @property
    def encoded_count(self) -> int:
        """How many chunks are encoded."""
        return sum(run.chunk_count for run in self.runs if run.codec != EXACT)

    @property
    def first_encoded(self) -> int:
        """The index of the first encoded chunk; k where all are exact."""
        index = 0
        for run in self.runs:
            if run.codec != EXACT:
                break
            index += run.chunk_count
        return index

    @property
    def is_exact(self) -> bool:
        """Whether all chunks are exact."""
        return not self.encoded_count

    @property
    def without_loss(self) -> LayerForms:
        """The same, for callers that do not bound the loss."""
        return replace(self, worst_loss=0.0, loss_basis=None)

    @property
    def layer_bytes(self) -> npt.NDArray[np.int64]:
        """The bytes of a layer of each chunk: int64 of shape (k,)."""
        sizes = np.array([run.layer_bytes for run in self.runs], dtype=np.int64)
        return np.repeat(sizes, [run.chunk_count for run in self.runs])


def forms_text(forms: LayerForms) -> str:
    """The text of a header or a notice; it is ASCII."""
    runs = [f"{run.codec};{run.chunk_count};{run.layer_bytes}" for run in forms.runs]
    told = [] if forms.loss_basis is None else [f"{_LOSS};{forms.worst_loss!r};{forms.loss_basis.value}"]
    return ",".join([*runs, f"{_ERROR};{forms.worst_error!r};{forms.mean_error!r}", *told])


def parse_forms(text: str) -> LayerForms:
    """The inverse of `forms_text`. Raises WrongFormsError."""
    *runs, errors = [tuple(part.split(";")) for part in text.split(",")]
    loss: tuple[str, ...] | None = None
    if runs and errors[0] == _LOSS:
        loss, errors = errors, runs.pop()
    if not 1 <= len(runs) <= MERGED_RUNS_MAX or any(len(part) != 3 for part in (*runs, errors)) or errors[0] != _ERROR:
        raise WrongFormsError(f"{text[:100]!r} tells no forms")
    try:
        found = tuple(FormRun(codec, int(count), int(nbytes)) for codec, count, nbytes in runs)
        forms = LayerForms(found, float(errors[1]), float(errors[2]))
        if loss is not None:
            _, nats, basis = loss
            forms = replace(forms, worst_loss=float(nats), loss_basis=LossBasis(basis))
    except ValueError:
        raise WrongFormsError(f"{text[:100]!r} has no numbers where there should be some") from None
    if not _can_be(forms):
        raise WrongFormsError(f"{text[:100]!r} has numbers that cannot be")
    return forms


def require_forms(forms: LayerForms | None, chunk_count: int, layer_bytes: int) -> LayerForms:
    """The forms, where they can be those of so many chunks whose exact layers have `layer_bytes`. Raises
    WrongFormsError: a member of a cluster may tell anything.
    """
    if forms is None or len(forms.runs) > MERGED_RUNS_MAX or not _can_be(forms) or forms.chunk_count != chunk_count:
        raise WrongFormsError("a member tells no forms of its chunks")
    for run in forms.runs:
        fits = run.layer_bytes == layer_bytes if run.codec == EXACT else run.layer_bytes <= layer_bytes
        if not fits or not CODEC_NAME.match(run.codec):
            raise WrongFormsError("a member tells forms that its chunks cannot have")
    return forms


def greatest_loss(each: Sequence[LayerForms]) -> tuple[float, LossBasis | None]:
    """The loss of a delivery whose parts tell these, with the weakest of their grounds; no ground where a part of
    encoded chunks tells none.
    """
    if any(forms.loss_basis is None and not forms.is_exact for forms in each):
        return 0.0, None
    told = [forms.loss_basis for forms in each if forms.loss_basis is not None]
    return max(forms.worst_loss for forms in each), weakest(told) if told else None


def _can_be(forms: LayerForms) -> bool:
    numbers_fit = all(run.chunk_count >= 1 and run.layer_bytes >= 1 for run in forms.runs)
    are_finite = all(map(math.isfinite, (forms.worst_error, forms.mean_error, forms.worst_loss)))
    return numbers_fit and are_finite and forms.worst_loss >= 0
