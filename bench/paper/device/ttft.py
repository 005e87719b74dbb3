"""Figure 13 on a device: a model, a prompt for each context, a server for each chunk size, and rounds. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.experiment import WrongUse, need_nixl, published
from bench.core.show import Json
from bench.paper.device.bed import DeviceBedSettings, DeviceRun, filled_bed
from bench.paper.device.command import CONTEXT_SMOKE, Landing, model_of
from bench.paper.device.model import LOGITS_ERROR_MAX, Accelerator, Model, Subject, make_subject
from bench.paper.tables import TOKEN_LAYER_BYTES, context_tokens
from bench.paper.ttft.results import Case, Row, Scale, Task, judged, measure_cells
from descriptors.units import gbps_from_bytes_per_s
from nixl_client.client import Transport
from objectcache.calibration.content import VerificationError

LANDINGS = {
    Landing.HOST: "pinned host memory, from where layers are copied up in a stream of their own",
    Landing.DEVICE: "the device's memory; only the systems from local DRAM copy from pinned host memory",
}


def measure_on_device(
    options: Any, hit_rates: Sequence[float], accelerator: Accelerator, origin: Mapping[str, Any]
) -> Json:
    """`bench ttft --device`, with its options. Wrong bytes end it, and they and wrong logits are the result's
    `problem`. Raises WrongUse, FAILURES, and as `filled_bed`.
    """
    transport, landing = options.transport, options.landing
    if landing is Landing.DEVICE and transport is not Transport.UCX:
        raise WrongUse("--landing device needs --transport ucx: nothing else writes into a device's memory")
    need_nixl(transport is Transport.UCX, "--transport shm")
    shape, vocabulary = model_of("llama-3.1-8b", options.smoke)
    scale = Scale(shape.token_layer_bytes / TOKEN_LAYER_BYTES)
    bed = DeviceBedSettings(scale, transport, landing, options.gather_s, options.folder)
    contexts = CONTEXT_SMOKE if options.smoke else options.contexts
    link = options.link_bytes_per_s or None
    runs = options.runs or (1 if options.smoke else 3)
    cells: list[Row] = []
    baselines: list[Row] = []
    problem = None
    model = Model(shape, vocabulary, accelerator, options.seed, max(map(context_tokens, contexts)))
    try:
        for context in contexts:
            tokens = context_tokens(context)
            cached = {hit_rate: round(tokens * hit_rate) for hit_rate in hit_rates}
            subject = make_subject(model, tokens, max(cached.values()), options.seed)
            resident_s = {hit_rate: subject.resident_s(count) for hit_rate, count in cached.items()}
            resident = {"resident_s": {str(hit_rate): seconds for hit_rate, seconds in resident_s.items()}}
            baselines.append({"context": context, **subject.baseline(), **resident})
            for grain in options.chunk_tokens:
                cases = [Case(context, hit_rate, grain, seconds) for hit_rate, seconds in resident_s.items()]
                tasks = [Task(case, system, link) for case in cases for system in options.systems]
                cells += _measure_chunks(bed, tasks, subject, runs)
    except VerificationError as error:
        problem = str(error)
    logits = judged_logits(cells)
    if problem is None and not logits["ok"]:
        problem = "wrong logits"
    found = judged(cells, link, None, scale)
    settings = {
        "bed": bed,
        "shape": shape,
        "vocabulary": vocabulary,
        "systems": options.systems,
        "contexts": contexts,
        "hit_rates": hit_rates,
        "chunk_tokens": options.chunk_tokens,
        "link_bytes_per_s": link,
        "runs": runs,
        "seed": options.seed,
    }
    return published(
        "ttft",
        origin,
        settings,
        problem,
        device=accelerator.title,
        notes=_notes(model, bed, link),
        targets=found["targets"][:1],  # Eq. 3's bound is for a link whose rate is given
        logits=logits,
        baselines=baselines,
        overhead=found["overhead"],
        figures={"13": found["figures"]["13"]},
        cells=cells,
    )


def judged_logits(cells: Sequence[Row]) -> Row:
    """The greatest error of all runs, of which NaN is the greatest; None and right without a run."""
    errors = [error for cell in cells for error in cell["logits_errors"]]
    error_max = max(errors, key=lambda error: (error != error, error)) if errors else None
    is_right = error_max is None or error_max <= LOGITS_ERROR_MAX
    return {"error_max": error_max, "limit": LOGITS_ERROR_MAX, "ok": is_right}


def _measure_chunks(bed: DeviceBedSettings, tasks: Sequence[Task], subject: Subject, runs: int) -> list[Row]:
    """Every system goes once uncounted over the longest prefix, which is the shortest to compute: the model itself is
    warm by now.
    """
    longest = max((task.case for task in tasks), key=lambda case: case.chunk_count)
    warming, title = [task for task in tasks if task.case is longest], f"{longest.context}, G={longest.chunk_tokens}"
    with filled_bed(subject, longest, bed) as filled:
        return measure_cells(filled.run, tasks, runs, title, bed.scale, warming, _compared)


def _compared(runs: Sequence[DeviceRun]) -> Row:
    return {
        "logits_errors": [run.logits_error for run in runs],
        "are_first_tokens_same": [run.is_first_token_same for run in runs],
    }


def _notes(model: Model, bed: DeviceBedSettings, link_bytes_per_s: float | None) -> list[str]:
    """What a reader must know."""
    shape = model.shape
    said = [
        f"{shape.num_layers} layers, hidden {shape.hidden}, {shape.heads} heads, {shape.kv_heads} KV heads of "
        f"{shape.head_dim}, intermediate {shape.intermediate}, vocabulary {model.vocabulary}, bfloat16, random "
        "weights; the prefill of the tokens that missed is computed, every attention waiting for its layer",
        f"the server writes over {bed.transport.value} into {LANDINGS[bed.landing]}",
        "opt-local-LW copies the cache's own order; all others bring chunks' order, put in order by a kernel beside "
        "the model's",
        "TTFT is from the request until the host knows the first token; resident: the prefix's KV was on the device, "
        "recompute: there was no cached KV",
        "chunks are in the DRAM tier of a server on the same host; ratios are medians of those within a round, "
        "extremes in brackets",
        "every bit of the prefix on the device is compared with the KV it was stored from; the last token's logits "
        f"with those of the whole prompt: |difference| / |expected| at most {LOGITS_ERROR_MAX:g}",
    ]
    if link_bytes_per_s is not None:
        said.append(f"the server's scheduler holds it to {gbps_from_bytes_per_s(link_bytes_per_s):g} Gbps")
    return said
