"""The chunks that a delivery has of the DRAM tier, and the forms in which it brings them: as they lie in memory, but of
so many runs at most. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from descriptors.layer_forms import EXACT, RUNS_MAX, FormRun, LayerForms
from descriptors.layout import ChunkLayout
from storage_server.compression.forms import Encoded
from storage_server.planning.extent import Extent
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


def with_forms(chunks: Chunks, lent: Lent, layout: ChunkLayout) -> tuple[LayerForms, Chunks, Lent]:
    """The forms, and the extents and addresses as they are delivered: an encoded chunk has as many bytes as its form.
    Encoded chunks past the greatest number of runs are read from their home.
    """
    if lent.encoded is None:
        return exact_forms(layout, len(chunks)), chunks, lent
    addresses, delivered = list(lent.addresses), list[Sequence[Extent]]()
    runs: list[tuple[str, int, int]] = []
    errors: list[tuple[float, float]] = []
    at = 0
    for chunk in chunks:
        form: Encoded | None = lent.encoded[at]
        codec, nbytes = (EXACT, layout.per_layer_chunk_bytes) if form is None else (form.codec.value, form.layer_bytes)
        is_new_run = not runs or runs[-1][::2] != (codec, nbytes)
        if form is not None and is_new_run and len(runs) >= RUNS_MAX:
            form, codec, nbytes = None, EXACT, layout.per_layer_chunk_bytes
            addresses[at] = None
            is_new_run = runs[-1][0] != EXACT
        if form is None:
            delivered.append(chunk)
            errors.append((0.0, 0.0))
        else:
            delivered.append([replace(chunk[0], nbytes=form.nbytes)])
            errors.append((form.worst_error, form.mean_error))
        if is_new_run:
            runs.append((codec, 0, nbytes))
        runs[-1] = codec, runs[-1][1] + 1, nbytes
        at += len(chunk)
    worst, mean = max(each[0] for each in errors), sum(each[1] for each in errors) / len(errors)
    return LayerForms(tuple(FormRun(*run) for run in runs), worst, mean), delivered, replace(lent, addresses=addresses)
