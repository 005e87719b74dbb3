"""python -m demo: a model answers a question about a document whose KV cache ObjectCache delivers layer by layer.

Exit status 0 when the logits agree with a full prefill and swapped chunks are noticed, else 1.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM

from demo.measure import Answer, ServingNode, Spread, computing_on, median_run, medians, prefill
from demo.model import (
    CHUNK_TOKENS,
    FIRST_QUESTION,
    SECOND_QUESTION,
    as_tokens,
    first_tokens,
    logits_of_last,
    make_model,
    read_document,
)
from demo.report import Agreement, Findings, Timings
from demo.storage import Endpoint, put_objects, serving
from demo.timeline import draw
from descriptors.descriptor import Delivery
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import MIB
from nixl_client.client import Client, Transport
from nixl_client.connectors.transformers import KvShape, chunks_from_cache
from objectcache.adapters.nixl_agent import is_available, leave
from objectcache.calibration.origin import describe_commit, describe_machine

BUCKET = "kv-cache"
NAMESPACE = Namespace(model="demo-llama", dtype="float32", block_tokens=CHUNK_TOKENS).text()


@dataclass(frozen=True, slots=True)
class Effort:
    """How much the demo does: chunks of the document, and measured runs."""

    chunk_count: int
    recompute_runs: int
    fetch_runs: int


FULL = Effort(chunk_count=256, recompute_runs=3, fetch_runs=9)
QUICK = Effort(chunk_count=32, recompute_runs=1, fetch_runs=1)


@dataclass(frozen=True, slots=True)
class Request:
    """The second request: its question, the keys of its whole chunks, and the logits it must give: those of a full
    prefill, and those of the same forward pass over the same KV kept in memory.
    """

    question: list[int]
    keys: list[str]
    full_prefill: torch.Tensor
    in_memory: torch.Tensor


def main(arguments: list[str]) -> int:
    """Run the demo; its exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too, lines and progress bars stay in order
    with (
        torch.inference_mode(),
        tempfile.TemporaryDirectory(prefix="objectcache-demo-") as data_dir,
        serving(Path(data_dir)) as endpoint,
    ):
        findings = _run(endpoint, QUICK if options.quick else FULL)
    agreement, timings = findings.agreement, findings.timings
    print(f"\nLogits of the last token\n{agreement.text()}\n\nTime to the first token\n{timings.text()}\n")
    draw(options.out, findings.layer_major, findings.chunk_major, timings.eq3_ttft_s, findings.title())
    print(f"timeline: {options.out}")
    if options.json is not None:
        result = {**describe_commit(), "machine": describe_machine(), **findings.to_fields()}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
        print(f"figures: {options.json}")
    is_good = agreement.is_right_accepted and agreement.is_wrong_refused
    print("the fetched prefix is right, and wrong ones are noticed" if is_good else "FAILED: see the logits above")
    return 0 if is_good else 1


def _run(endpoint: Endpoint, effort: Effort) -> Findings:
    """The whole story, on a running server."""
    cores = torch.get_num_threads()
    model = make_model()
    shape = KvShape.of(model.config, torch.float32, CHUNK_TOKENS)
    document = read_document(effort.chunk_count)
    print(f"ObjectCache serves S3 on {endpoint.url}")
    print(_describe(shape, model.config.num_attention_heads, len(document)))

    print("\nFirst request: the document and a question. Its KV is cut into chunks and put with boto3.")
    stored_keys, cache = _store_first_request(endpoint, model, document)

    print(f"\nSecond request: the document and another question. First without a cache, on {cores} cores:")
    request, recompute = _prepare_second_request(model, document, cache, effort.recompute_runs)
    with _client(endpoint) as client, computing_on(max(1, cores - 1)):
        buffer = torch.empty(shape.layout.delivery_bytes(effort.chunk_count), dtype=torch.uint8)
        transport = client.register_buffer(buffer)
        matched = client.lookup(request.keys)
        print(f"\nThen with it: {matched} of its {len(request.keys)} chunks are stored. {_arrival(transport)}")
        print(f"The model computes on {torch.get_num_threads()} of {cores} cores meanwhile.")
        node = ServingNode(model, client, shape, buffer)
        agreement = _compare(node, request, stored_keys, effort.chunk_count)
        layer_major, chunk_major, apart = _measure(node, request, effort.fetch_runs)
    timings = Timings(
        recompute=recompute,
        chunk_major=Spread.of([answer.ttft_s for answer in chunk_major]),
        layer_major=Spread.of([answer.ttft_s for answer in layer_major]),
        transfer_s=medians([answer.transfer_s for answer in apart]),
        compute_s=medians([answer.compute_s for answer in apart]),
    )
    picture = median_run(layer_major), median_run(chunk_major)
    return Findings(len(document), len(request.question), shape, transport, cores, agreement, timings, *picture)


def _client(endpoint: Endpoint) -> Client:
    return Client(
        endpoint.url,
        BUCKET,
        access_key=endpoint.access_key,
        secret_key=endpoint.secret_key,
        transport=Transport.UCX if is_available() else Transport.AUTO,
    )


def _store_first_request(
    endpoint: Endpoint, model: LlamaForCausalLM, document: list[int]
) -> tuple[list[str], DynamicCache]:
    """Prefill document and first question, and store every whole chunk; their keys, and the cache."""
    tokens = document + as_tokens(FIRST_QUESTION)
    with tqdm(total=len(model.model.layers), desc="prefill", unit="layer") as bar:
        _, cache, _ = prefill(model, tokens, bar.update)
    keys = chunk_keys(NAMESPACE, tokens, CHUNK_TOKENS)
    put_objects(endpoint, BUCKET, keys, chunks_from_cache(cache, CHUNK_TOKENS))
    return keys, cache


def _prepare_second_request(
    model: LlamaForCausalLM, document: list[int], first_cache: DynamicCache, runs: int
) -> tuple[Request, Spread]:
    """The second request with the logits it must give, and how long a full prefill takes after a warm-up."""
    question = as_tokens(SECOND_QUESTION)
    tokens = document + question
    with tqdm(total=(runs + 1) * len(model.model.layers), desc=f"full prefill, {runs + 1} times", unit="layer") as bar:
        full_prefill, _, _ = prefill(model, tokens, bar.update)
        recompute = Spread.of([prefill(model, tokens, bar.update)[2] for _ in range(runs)])
    with computing_on(max(1, torch.get_num_threads() - 1)):
        in_memory = logits_of_last(model, question, first_tokens(first_cache, len(document)))
    return Request(question, chunk_keys(NAMESPACE, tokens, CHUNK_TOKENS), full_prefill, in_memory), recompute


def _compare(node: ServingNode, request: Request, stored_keys: list[str], chunk_count: int) -> Agreement:
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


def _measure(node: ServingNode, request: Request, runs: int) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Layer-major, chunk-major, and layer-major with transfer and compute apart: in turn, after a warm-up of each."""
    ways = (
        lambda: node.answer_as_layers_arrive(request.keys, request.question, Delivery.LAYER_MAJOR),
        lambda: node.answer_as_layers_arrive(request.keys, request.question, Delivery.CHUNK_MAJOR),
        lambda: node.answer_after_transfer(request.keys, request.question),
    )
    answers: tuple[list[Answer], ...] = ([], [], [])
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


def _describe(shape: KvShape, query_heads: int, tokens: int) -> str:
    mib = tokens // shape.chunk_tokens * shape.layout.chunk_bytes / MIB
    return (
        f"Model: Llama, {shape.num_layers} layers, {query_heads} query and {shape.kv_heads} KV heads of "
        f"{shape.head_dim}, seeded random weights, float32\n"
        f"Document: {tokens} tokens (a byte each); its KV is {tokens // shape.chunk_tokens} chunks of "
        f"{shape.chunk_tokens} tokens, {mib:.0f} MiB"
    )


def _arrival(transport: Transport) -> str:
    if transport is Transport.UCX:
        return "Layers arrive by one-sided UCX writes."
    return "NIXL is not installed or not served: layers arrive over http."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description="ObjectCache with a real model.")
    parser.add_argument("--quick", action="store_true", help="a short prefix and one run of each")
    parser.add_argument("--out", type=Path, default=Path("out/demo-timeline.png"), help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
