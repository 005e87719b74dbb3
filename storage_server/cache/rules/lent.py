"""The chunks that a delivery has of the DRAM tier, and the forms in which it brings them: as they lie in memory, but of
so many runs at most. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from descriptors.layer_forms import EXACT, RUNS_MAX, FormRun, LayerForms, weakest
from descriptors.layout import ChunkLayout
from objectcache.kv_codecs.chains import Chain
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Encoded, Reading, kept_form
from storage_server.planning.rows import Rows

Chunks = Sequence[Sequence[Extent]]


@dataclass(frozen=True, slots=True)
class Lent:
    """The extents of a prefix in memory: the address of each, None for those that are not there. `landings` are the
    addresses where those that come are to lie, 0 for the others; None where the tier takes no landings. They are filled
    in while the delivery is under way. `encoded` has the form of each extent that is not exact; None where all are.
    """

    addresses: list[int | None]
    landings: Rows | None = None
    encoded: list[Encoded | None] | None = None


def exact_forms(layout: ChunkLayout, chunk_count: int) -> LayerForms:
    """All chunks are exact."""
    return LayerForms((FormRun(EXACT, chunk_count, layout.per_layer_chunk_bytes),))


def with_forms(
    chunks: Chunks, lent: Lent, layout: ChunkLayout, reading: Reading | None = None
) -> tuple[LayerForms, Chunks, Lent]:
    """The forms, and the extents and addresses as they are delivered: an encoded chunk has as many bytes as its form.
    Losses are told where they are known of the reader's chunks. Chunks that memory has encoded are read from their home
    where their runs are more than can be told beside those of chunks that their home has encoded.
    """
    homes = [kept_form(chunk[0].form) if chunk[0].form else None for chunk in chunks]
    if lent.encoded is None and not any(homes):
        return _with_loss(exact_forms(layout, len(chunks)), (), reading), chunks, lent
    runs_left = _runs_from(homes, layout)
    addresses, delivered = list(lent.addresses), list[Sequence[Extent]]()
    runs: list[tuple[str, int, int]] = []
    errors: list[tuple[float, float]] = []
    encoded: dict[tuple[Chain, float], Encoded] = {}
    at = 0
    for index, chunk in enumerate(chunks):
        form: Encoded | None = None if lent.encoded is None else lent.encoded[at]
        if form is not None:
            is_new_run = not runs or runs[-1][::2] != _run_of(form, layout)
            if len(runs) + is_new_run + runs_left[index + 1] > RUNS_MAX + 1:
                form, addresses[at] = None, None
        in_memory, form = form, form or homes[index]
        codec, nbytes = _run_of(form, layout)
        if form is None:
            errors.append((0.0, 0.0))
        else:
            errors.append((form.worst_error, form.mean_error))
            encoded[form.chain, form.least_loss] = form
        delivered.append(chunk if in_memory is None else [replace(chunk[0], nbytes=in_memory.nbytes)])
        if not runs or runs[-1][::2] != (codec, nbytes):
            runs.append((codec, 0, nbytes))
        runs[-1] = codec, runs[-1][1] + 1, nbytes
        at += len(chunk)
    worst, mean = max(each[0] for each in errors), sum(each[1] for each in errors) / len(errors)
    forms = LayerForms(tuple(FormRun(*run) for run in runs), worst, mean)
    return _with_loss(forms, encoded.values(), reading), delivered, replace(lent, addresses=addresses)


def _with_loss(forms: LayerForms, encoded: Collection[Encoded], reading: Reading | None) -> LayerForms:
    """The forms with the greatest loss of the encoded chunks; exact ones have none. A loss that is not known is not
    told: the ground says so.
    """
    losses = None if reading is None else reading.losses
    if reading is None or losses is None:
        return forms
    told = [losses.told(form) for form in encoded]
    basis = losses.table.basis(losses.model, reading.shape, reading.num_layers)
    if told:
        basis = weakest(each.basis for each in told)
    return replace(
        forms, worst_loss=max((each.kl for each in told if math.isfinite(each.kl)), default=0.0), loss_basis=basis
    )


def _run_of(form: Encoded | None, layout: ChunkLayout) -> tuple[str, int]:
    """Codec, and bytes of a layer."""
    return (EXACT, layout.per_layer_chunk_bytes) if form is None else (form.codec.value, form.layer_bytes)


def _runs_from(homes: Sequence[Encoded | None], layout: ChunkLayout) -> list[int]:
    """For each chunk, and behind the last: the runs of the chunks from there on, as their home has them."""
    counts = [0]
    after: tuple[str, int] | None = None
    for form in reversed(homes):
        run = _run_of(form, layout)
        counts.append(counts[-1] + (run != after))
        after = run
    return counts[::-1]
