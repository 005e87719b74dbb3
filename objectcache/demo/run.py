"""The demo: a model answers a question about a document whose KV ObjectCache delivers layer by layer."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

from descriptors.descriptor import Delivery
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import MIB
from nixl_client.client import Client, Transport
from nixl_client.connectors.transformers import KvShape, chunks_from_cache
from objectcache.adapters.nixl_agent import is_available
from objectcache.calibration.origin import describe_commit, describe_machine
from objectcache.calibration.servers import LocalServer, LocalServerError, running_server
from objectcache.demo.measure import ModelAnswer, RunTimes, ServingNode, computing_on, median_run, medians, prefill
from objectcache.demo.model import (
    CHUNK_TOKENS,
    FIRST_QUESTION,
    SECOND_QUESTION,
    ModelRefusedError,
    Subject,
    decode,
    first_tokens,
    logits_of_last,
    pretrained,
    read_document,
    seeded,
)
from objectcache.demo.report import Agreement, Findings, Said, Timings
from objectcache.demo.storage import put_objects
from objectcache.demo.timeline import draw
from objectcache.demo.weights import NoWeightsError, models_folder, smollm2

BUCKET = "kv-cache"


class DemoError(Exception):
    """The demo cannot run; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much the demo measures."""

    recompute_runs: int
    fetch_runs: int


FULL = Effort(recompute_runs=2, fetch_runs=9)
QUICK = Effort(recompute_runs=1, fetch_runs=1)
QUICK_CHUNKS = 32
"""The prefix of the seeded model."""


@dataclass(frozen=True, slots=True)
class SecondRequest:
    """The second request: its question, the keys of the chunks before it, and what it must give: the logits and the
    answer of a full prefill, and the logits of the same forward pass over the same KV kept in memory.
    """

    question: list[int]
    keys: list[str]
    full_prefill: torch.Tensor
    in_memory: torch.Tensor
    answer: list[int]


def run(source: str | None, *, is_quick: bool, picture: Path, figures: Path | None) -> int:
    """Run the demo on a model's folder (None: SmolLM2), or with `is_quick` on seeded weights; the exit status: 0 where
    the loaded prefix gives the model's own answer and swapped chunks are noticed, else 1. Raises DemoError.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too, lines and progress bars stay in order
    try:
        subject = _subject(source, is_quick)
        with (
            torch.inference_mode(),
            running_server(None, ("--ucx", "--log-level", "error"), makes_bucket=False) as server,
        ):
            findings = _run(server, subject, QUICK if is_quick else FULL)
    except (ModelRefusedError, NoWeightsError) as error:
        raise DemoError(f"{error}. `--model FOLDER` takes a model that you have") from None
    except LocalServerError as error:
        raise DemoError(str(error)) from None
    timings = findings.timings
    said = findings.said.text(timings, findings.delivered_bytes, findings.transport)
    print(f"\nLogits of the last token\n{findings.agreement.text()}\n\nTime to the first token\n{timings.text()}\n")
    draw(picture, findings.layer_major, findings.chunk_major, timings.eq3_ttft_s, findings.title())
    print(f"timeline: {picture}")
    if figures is not None:
        result = {**describe_commit(), "machine": describe_machine(), **findings.to_fields()}
        figures.write_text(json.dumps(result, indent=2) + "\n")
        print(f"figures: {figures}")
    print(f"\n{said}")
    print("the fetched prefix is right, and wrong ones are noticed" if findings.is_good else "FAILED: see above")
    return 0 if findings.is_good else 1


def _subject(source: str | None, is_quick: bool) -> Subject:
    if is_quick:
        return seeded(QUICK_CHUNKS)
    return pretrained(str(smollm2(models_folder())) if source is None else source, read_document())


def _run(server: LocalServer, subject: Subject, effort: Effort) -> Findings:
    """The whole story, on a running server."""
    cores = torch.get_num_threads()
    shape = KvShape.of(subject.model.config, torch.float32, CHUNK_TOKENS)
    print(f"ObjectCache serves S3 on {server.url}")
    print(_describe(subject, shape))

    print("\nFirst request: the document and a question. Its KV is cut into chunks and put with boto3.")
    stored_keys, cache, first_answer = _store_first_request(server, subject)
    print(f"{FIRST_QUESTION}\n  computed: {subject.text_of(first_answer)}")

    print(f"\nSecond request: the document and another question. First without a cache, on {cores} cores:")
    request, recompute = _prepare_second_request(subject, cache, effort.recompute_runs)
    with _client(server) as client, computing_on(max(1, cores - 1)):
        buffer = torch.empty(shape.layout.delivery_bytes(subject.chunk_count), dtype=torch.uint8)
        transport = client.register_buffer(buffer)
        matched = client.lookup(request.keys)
        print(f"\nThen with it: {matched} of {len(request.keys)} chunks before it are stored. {_arrival(transport)}")
        print(f"The model computes on {torch.get_num_threads()} of {cores} cores meanwhile.")
        node = ServingNode(subject, client, shape, buffer)
        agreement = _compare(node, request, stored_keys, subject.chunk_count)
        loaded = node.whole_answer(request.keys, request.question).tokens
        layer_major, chunk_major, apart = _measure(node, request, effort.fetch_runs)
    timings = Timings(
        recompute=recompute,
        chunk_major=RunTimes.of([answer.ttft_s for answer in chunk_major]),
        layer_major=RunTimes.of([answer.ttft_s for answer in layer_major]),
        transfer_s=medians([answer.transfer_s for answer in apart]),
        compute_s=medians([answer.compute_s for answer in apart]),
    )
    return Findings(
        model=subject.name,
        document_tokens=len(subject.document),
        question_tokens=len(subject.question),
        shape=shape,
        transport=transport,
        cores=cores,
        said=Said(SECOND_QUESTION, subject.text_of(request.answer), subject.text_of(loaded)),
        agreement=agreement,
        timings=timings,
        layer_major=median_run(layer_major),
        chunk_major=median_run(chunk_major),
    )


def _client(server: LocalServer) -> Client:
    return Client(
        server.url,
        BUCKET,
        access_key=server.access_key,
        secret_key=server.secret_key,
        transport=Transport.UCX if is_available() else Transport.AUTO,
    )


def _namespace(subject: Subject) -> Namespace:
    return Namespace(model=subject.name, dtype="float32", block_tokens=CHUNK_TOKENS)


def _store_first_request(server: LocalServer, subject: Subject) -> tuple[list[str], DynamicCache, list[int]]:
    """Prefill document and first question, and store every whole chunk; their keys, the cache, and the answer."""
    tokens = subject.first_prompt
    with tqdm(total=len(subject.layers), desc="prefill", unit="layer") as bar:
        logits, cache, _ = prefill(subject, tokens, bar.update)
    keys = chunk_keys(_namespace(subject), tokens, CHUNK_TOKENS)
    try:
        chunks = chunks_from_cache(cache, CHUNK_TOKENS)
    except ValueError as error:
        raise ModelRefusedError(f"{subject.name} is not cached by its layers: {error}") from None
    put_objects(server, BUCKET, keys, chunks)
    return keys, cache, decode(subject, logits, cache)


def _prepare_second_request(subject: Subject, first_cache: DynamicCache, runs: int) -> tuple[SecondRequest, RunTimes]:
    """The second request with what it must give, and how long a full prefill takes after a warm-up."""
    tokens = subject.second_prompt
    with tqdm(total=(runs + 1) * len(subject.layers), desc=f"full prefill, {runs + 1} times", unit="layer") as bar:
        full_prefill, cache, _ = prefill(subject, tokens, bar.update)
        recompute = RunTimes.of([prefill(subject, tokens, bar.update)[2] for _ in range(runs)])
    answer = decode(subject, full_prefill, cache)
    with computing_on(max(1, torch.get_num_threads() - 1)):
        before = first_tokens(first_cache, len(subject.document))
        in_memory = logits_of_last(subject.model, subject.question, before)
    keys = chunk_keys(_namespace(subject), subject.document, CHUNK_TOKENS)
    return SecondRequest(subject.question, keys, full_prefill, in_memory, answer), recompute


def _compare(node: ServingNode, request: SecondRequest, stored_keys: list[str], chunk_count: int) -> Agreement:
    """Answer on the right prefix both ways, then on two wrong ones."""

    def logits(keys: list[str], delivery: Delivery = Delivery.LAYER_MAJOR) -> torch.Tensor:
        return node.answer_as_layers_arrive(keys, request.question, delivery).logits

    def difference(found: torch.Tensor) -> float:
        return float((found - request.full_prefill).abs().max())

    layer_major = logits(request.keys)
    chunk_major = logits(request.keys, Delivery.CHUNK_MAJOR)
    # the first chunk behind the prefix holds the first question
    foreign = logits(_swapped(stored_keys, chunk_count - 1, chunk_count)[:chunk_count])
    inside = logits(_swapped(stored_keys, chunk_count // 4, chunk_count // 2)[:chunk_count])
    return Agreement(
        layer_major_difference=difference(layer_major),
        chunk_major_difference=difference(chunk_major),
        is_layer_major_bit_equal=torch.equal(layer_major, request.in_memory),
        is_chunk_major_bit_equal=torch.equal(chunk_major, request.in_memory),
        foreign_chunk_difference=difference(foreign),
        swapped_inside_difference=difference(inside),
        is_swapped_inside_bit_equal=torch.equal(inside, request.in_memory),
    )


def _measure(
    node: ServingNode, request: SecondRequest, runs: int
) -> tuple[list[ModelAnswer], list[ModelAnswer], list[ModelAnswer]]:
    """Layer-major, chunk-major, and layer-major with transfer and compute apart: in turn, after a warm-up of each."""
    ways: tuple[Callable[[], ModelAnswer], ...] = (
        lambda: node.answer_as_layers_arrive(request.keys, request.question, Delivery.LAYER_MAJOR),
        lambda: node.answer_as_layers_arrive(request.keys, request.question, Delivery.CHUNK_MAJOR),
        lambda: node.answer_after_transfer(request.keys, request.question),
    )
    answers: tuple[list[ModelAnswer], ...] = ([], [], [])
    for run in tqdm(range(runs + 1), desc="fetch and answer, 3 ways", unit="run"):
        for way, collected in zip(ways, answers, strict=True):
            answer = way()
            if run > 0:
                collected.append(answer)
    layer_major, chunk_major, apart = answers
    return layer_major, chunk_major, apart


def _swapped(keys: list[str], left: int, right: int) -> list[str]:
    swapped = list(keys)
    swapped[left], swapped[right] = keys[right], keys[left]
    return swapped


def _describe(subject: Subject, shape: KvShape) -> str:
    mib = subject.chunk_count * shape.layout.chunk_bytes / MIB
    weights = f"{subject.weights}, " if subject.weights else ""
    return (
        f"Model: {subject.name}, {shape.num_layers} layers, {subject.model.config.num_attention_heads} query and "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, {weights}float32\n"
        f"Document: {len(subject.document):,} tokens; its KV is {subject.chunk_count} chunks of "
        f"{shape.chunk_tokens} tokens, {mib:.0f} MiB"
    )


def _arrival(transport: Transport) -> str:
    if transport is Transport.UCX:
        return "Layers arrive by one-sided UCX writes."
    return "NIXL is not installed or not served: layers arrive over http."
