"""The table of codecs: what each makes of a model's KV, and how fast, on one core. And the wire: when a layer
is there and decoded, against when the exact one is there.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.beds.kv_peers.install import LMCACHE
from bench.beds.ours import Servers
from bench.beds.processes import BaselineError
from bench.core.rounds import paired, sampled
from bench.paper.compression.sizes import SIZES
from bench.paper.compression.tasks import Task, sample
from bench.paper.compression.texts import asked_texts, smollm2_folder
from bench.paper.compression.train import load_model
from descriptors.descriptor import Accept, Delivery
from descriptors.layout import ChunkLayout
from nixl_client.client import Client
from objectcache.calibration.quality import States, prefix_states
from objectcache.calibration.real_model import load_real_model
from objectcache.calibration.samples import spread
from objectcache.calibration.servers import BUCKET
from objectcache.kv_codecs.elements import Bytes, Element
from objectcache.kv_codecs.encoding import decode, decode_many, encode
from objectcache.kv_codecs.layer import KIVI, Codec, LayerShape
from objectcache.kv_codecs.loss import loss

LMCACHE_SCRIPT = Path(__file__).parent / "lmcache_codec.py"
ALL = (Codec.LOSSLESS, *KIVI, Codec.FP8)
SHAPE = LayerShape(64, 1024, Element.BFLOAT16)
"""A chunk's layer of a model with 8 KV heads of 128 elements."""
CONTEXT_TOKENS = 256


def kv_of(model: str, chunks: int, seed: int) -> Bytes:
    """Layers of SHAPE, uint8 of shape (chunks, S), out of the KV of a model: heads of layers from all over it, side by
    side until a token has SHAPE.width elements. Raises WrongUse without the model.
    """
    per_context = CONTEXT_TOKENS // SHAPE.tokens
    need = -(-chunks // per_context)
    contexts = _trained_contexts(model, seed) if model in SIZES else _real_contexts(need)
    wide = torch.stack([_wide(contexts) for _ in range(need)])
    wide = wide[..., : SHAPE.width].reshape(need, 2, per_context, SHAPE.tokens, SHAPE.width).transpose(1, 2)
    data = wide.reshape(need * per_context, -1)[:chunks].bfloat16().contiguous()
    return data.view(torch.uint8).numpy()


def _wide(contexts: Iterator[States]) -> torch.Tensor:
    """Keys and values of one context, or of several whose tokens are too small: (2, tokens, SHAPE.width or more)."""
    taken: list[torch.Tensor] = []
    while sum(each.shape[2] for each in taken) < SHAPE.width:
        layers = next(contexts)
        layer_width = layers[0][0].shape[1] * layers[0][0].shape[3]
        layers = layers[:: max(1, len(layers) * layer_width // SHAPE.width)]
        taken.append(
            torch.stack(
                [torch.cat([layer[part][0].transpose(0, 1).flatten(1) for layer in layers], dim=1) for part in (0, 1)]
            )
        )
    return torch.cat(taken, dim=2)


def _trained_contexts(model: str, seed: int) -> Iterator[States]:
    loaded, random = load_model(model), np.random.default_rng(seed)
    for task in itertools.cycle(Task):
        yield prefix_states(loaded, torch.from_numpy(sample(task, CONTEXT_TOKENS, 1, random).context)[None])


def _real_contexts(count: int) -> Iterator[States]:
    real = load_real_model(str(smollm2_folder()), "cpu")
    for probe in asked_texts(real.tokenizer, count, CONTEXT_TOKENS, 0):
        yield prefix_states(real.model, torch.tensor([probe.context]))


def table(data: Bytes, runs: int) -> list[dict[str, Any]]:
    """Ratio, error and rates of each codec, and of LMCache's where it is installed. Rates are of exact bytes."""
    rows = []
    for codec in ALL:
        encoded = [encode(layer, SHAPE, codec) for layer in data]
        joined, places, out = np.frombuffer(b"".join(encoded), dtype=np.uint8), _places(encoded), np.empty_like(data)
        decode_all(encoded, joined, places, codec, out)
        if codec is Codec.LOSSLESS and not np.array_equal(out, data):
            raise AssertionError("lossless bytes came back changed")
        errors = [loss(*pair, SHAPE) for pair in zip(data, out, strict=True)]
        rows.append(
            {
                "codec": codec.value, "ratio": data.nbytes / len(joined),
                "error_keys": float(np.mean([each.keys for each in errors])),
                "error_values": float(np.mean([each.values for each in errors])),
                "encode_bytes_per_s": spread(_rates(lambda c=codec: [encode(each, SHAPE, c) for each in data[:16]],  # type: ignore[misc]
                                                    data[:16].nbytes, runs)),
                "decode_bytes_per_s": spread(_rates(
                    lambda c=codec, e=encoded, j=joined, p=places, o=out: decode_all(e, j, p, c, o),  # type: ignore[misc]
                    data.nbytes, runs)),
            }
        )  # fmt: skip
    return rows + torch_rows(data, runs) + lmcache_rows(data, runs)


def decode_all(encoded: Sequence[bytes], joined: Bytes, places: np.ndarray, codec: Codec, out: Bytes) -> None:
    """Decode all layers. Raises AssertionError where one is not right."""
    if codec is Codec.LOSSLESS:  # its layers have sizes of their own
        for data, place in zip(encoded, out, strict=True):
            decode(data, SHAPE, place)
    elif decode_many(joined, places, codec, SHAPE, out.reshape(-1)) != -1:
        raise AssertionError(f"{codec.value}: an encoded layer is damaged")


def torch_rows(data: Bytes, runs: int) -> list[dict[str, Any]]:
    """torch's conversion to FP8 and back, without scales: the least that a codec of 8 bits costs there."""
    torch.set_num_threads(1)
    exact = torch.from_numpy(data).view(torch.bfloat16)
    half = exact.to(torch.float8_e4m3fn)
    back = half.to(torch.bfloat16)
    return [
        {
            "codec": "torch float8_e4m3fn, no scales", "ratio": 2.0, **_errors(data, back.view(torch.uint8).numpy()),
            "encode_bytes_per_s": spread(_rates(lambda: exact.to(torch.float8_e4m3fn), data.nbytes, runs)),
            "decode_bytes_per_s": spread(_rates(lambda: half.to(torch.bfloat16), data.nbytes, runs)),
        }
    ]  # fmt: skip


def lmcache_rows(data: Bytes, runs: int) -> list[dict[str, Any]]:
    """LMCache's codec for CPUs, values in FP8 and keys as they are, where `bench lmcache` has its environment."""
    if not LMCACHE.is_installed:
        return []
    with tempfile.TemporaryDirectory(prefix="objectcache-codec-") as folder:
        np.save(Path(folder) / "layers.npy", data)
        command = [
            str(LMCACHE.python),
            "-P",
            str(LMCACHE_SCRIPT),
            folder,
            str(SHAPE.tokens),
            str(SHAPE.width),
            str(runs),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            raise BaselineError(f"LMCache's codec: {done.stderr[-500:]}")
        told = json.loads(done.stdout.splitlines()[-1])
        back = np.load(Path(folder) / "decoded.npy")
    return [
        {
            "codec": "LMCache asym_k16_v8", "ratio": data.nbytes / told["encoded_bytes"], **_errors(data, back),
            "encode_bytes_per_s": spread([data.nbytes / each for each in told["encode_s"]]),
            "decode_bytes_per_s": spread([data.nbytes / each for each in told["decode_s"]]),
        }
    ]  # fmt: skip


def _errors(data: Bytes, back: Bytes) -> dict[str, float]:
    errors = [loss(*pair, SHAPE) for pair in zip(data, np.ascontiguousarray(back).reshape(data.shape), strict=True)]
    return {
        "error_keys": float(np.mean([each.keys for each in errors])),
        "error_values": float(np.mean([each.values for each in errors])),
    }


def _places(encoded: Sequence[bytes]) -> np.ndarray:
    sizes = np.array([len(each) for each in encoded])
    return np.stack([np.cumsum(sizes) - sizes, np.arange(len(encoded)) * SHAPE.nbytes], axis=1)


def _rates(work: Callable[[], object], nbytes: int, runs: int) -> list[float]:
    work()
    found = []
    for _ in range(runs):
        began_s = time.perf_counter()
        work()
        found.append(nbytes / (time.perf_counter() - began_s))
    return found


LAYERS, COUNT = 16, 64
LAYOUT = ChunkLayout(LAYERS, SHAPE.tokens, SHAPE.nbytes)
CODEC = Codec.KIVI4


def wire(data: Bytes, links_gbps: Sequence[float], runs: int, folder: Path | None) -> list[dict[str, Any]]:
    """At each rate of the link: a prefix whose layers come encoded and are decoded, against one that comes exactly, by
    turns, both out of the server's memory. Seconds to the first layer, and to the last.
    """
    found = []
    chunks = np.tile(np.resize(data, (LAYERS, SHAPE.nbytes)), (COUNT, 1)).reshape(COUNT, -1)
    chunks = np.stack([np.roll(chunk.reshape(LAYERS, -1), at, axis=0).reshape(-1) for at, chunk in enumerate(chunks)])
    expected = _decoded(chunks)
    for gbps in links_gbps:
        bytes_per_s = gbps * 1e9 / 8
        config = (
            f"[storage]\ndram_bytes = {4 * chunks.nbytes}\n[scheduler]\nlink_bytes_per_s = {bytes_per_s:.0f}\n"
            f"[compression]\npolicy = 'adaptive'\nalpha_s = 0\nmemory_bytes_per_s = {bytes_per_s:.0f}\n"
            f"home_bytes_per_s = {bytes_per_s / 2:.0f}\n"
        )
        with ExitStack() as stack:
            server = Servers(stack, folder, "compression").serve(config)
            client = stack.enter_context(
                Client(server.url, BUCKET, access_key=server.access_key, secret_key=server.secret_key, transport="shm")
            )
            found.append({"link_gbps": gbps, **_at_rate(client, chunks, expected, runs)})
    return found


def _decoded(chunks: np.ndarray) -> np.ndarray:
    encoded = [encode(layer, SHAPE, CODEC) for layer in chunks.reshape(-1, SHAPE.nbytes)]
    out = np.empty(chunks.size, dtype=np.uint8)
    decode_many(np.frombuffer(b"".join(encoded), dtype=np.uint8), _places(encoded), CODEC, SHAPE, out)
    return out.reshape(chunks.shape)


def _at_rate(client: Client, chunks: np.ndarray, expected: np.ndarray, runs: int) -> Mapping[str, Any]:
    buffer = client.allocate_buffer(LAYOUT.delivery_bytes(COUNT))
    accept = Accept((CODEC.value,), "bfloat16")
    keys = {name: [f"{number:02x}{at:062x}" for at in range(COUNT)] for number, name in enumerate(("exact", "encoded"))}
    changed = chunks.copy()
    changed[:, 0] ^= 1  # otherwise both names have the same bytes, and share them
    client.put_chunks(keys["exact"], list(changed))
    client.put_chunks(keys["encoded"], list(chunks))

    def fetch(name: str) -> tuple[float, float, int]:
        wanted = changed if name == "exact" else expected
        began_s = time.perf_counter()
        running = client.fetch(
            keys[name], LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR, accept=accept if name == "encoded" else None
        )
        times_s = []
        for layer in range(LAYERS):
            running.wait_layer(layer, 120)
            times_s.append(time.perf_counter() - began_s)
        forms = running.wait(120).forms
        encoded = 0 if forms is None else forms.encoded_count
        layers = wanted.reshape(COUNT, LAYERS, -1).transpose(1, 0, 2)
        if encoded in (0, COUNT) and not np.array_equal(
            buffer.reshape(layers.shape), changed_of(name, encoded, layers, chunks)
        ):
            raise AssertionError(f"{name}: other bytes")
        return times_s[0], times_s[-1], encoded

    deadline_s = time.monotonic() + 120
    while fetch("encoded")[2] < COUNT:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the server has not encoded all chunks")
        time.sleep(0.5)
    for _ in range(2):
        fetch("exact")
        time.sleep(1.0)
    taken = sampled({name: lambda _, n=name: fetch(n) for name in keys}, runs, "wire")  # type: ignore[misc]
    return {
        "first_layer_s": {name: spread([each[0] for each in rows]) for name, rows in taken.items()}, "last_layer_s":
        {name: spread([each[1] for each in rows]) for name, rows in taken.items()}, "exact_over_encoded":
        spread(paired([each[1] for each in taken["exact"]], [each[1] for each in taken["encoded"]])), "bytes": {"exact":
        LAYOUT.delivery_bytes(COUNT), "encoded": LAYERS * COUNT * len(encode(chunks[0][: SHAPE.nbytes], SHAPE, CODEC))},
    }  # fmt: skip


def changed_of(name: str, encoded: int, layers: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """The layers that are right: of "encoded" all are decoded, or all are exact yet."""
    if name == "exact" or encoded:
        return layers
    return chunks.reshape(COUNT, LAYERS, -1).transpose(1, 0, 2)
