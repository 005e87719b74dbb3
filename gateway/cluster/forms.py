"""The forms of a delivery whose portions come from several members. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from descriptors.descriptor import Descriptor
from descriptors.layer_forms import (
    EXACT,
    MERGED_RUNS_MAX,
    FormRun,
    LayerForms,
    WrongFormsError,
    greatest_loss,
    require_forms,
)
from descriptors.placement import Indices


def merged_forms(
    positions: Sequence[Indices],
    told: Sequence[LayerForms | None],
    whole: Descriptor,
    *,
    bounds_loss: bool = False,
) -> LayerForms:
    """The forms of the whole's chunks, in their order, where each member has told those of its own, at `positions`.
    Raises WrongFormsError where a member tells none, or too few, or with `bounds_loss` no loss of encoded ones, and for
    more runs than a header takes.

        member 1: chunks 0 and 2, exact;  member 2: chunk 1, kivi4    ->    exact, kivi4, exact
    """
    kinds = [(EXACT, whole.per_layer_chunk_bytes)] * whole.chunk_count
    worst, total = 0.0, 0.0
    for own, forms in zip(positions, told, strict=True):
        forms = require_forms(forms, len(own), whole.per_layer_chunk_bytes)
        mine = ((run.codec, run.layer_bytes) for run in forms.runs for _ in range(run.chunk_count))
        for position, kind in zip(own.tolist(), mine, strict=True):
            kinds[position] = kind
        worst, total = max(worst, forms.worst_error), total + forms.mean_error * len(own)
    runs = tuple(FormRun(codec, len(list(same)), nbytes) for (codec, nbytes), same in groupby(kinds))
    if len(runs) > MERGED_RUNS_MAX:
        raise WrongFormsError(f"{len(runs)} runs of chunks of one form, at most {MERGED_RUNS_MAX} are told")
    merged = LayerForms(runs, worst, total / len(kinds))
    if not bounds_loss:
        return merged
    loss, basis = greatest_loss([forms for forms in told if forms is not None])
    if basis is None and not merged.is_exact:
        raise WrongFormsError("a member tells no loss of its chunks")
    return replace(merged, worst_loss=loss, loss_basis=basis)
