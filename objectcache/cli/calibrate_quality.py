"""`objectcache calibrate quality`: what codecs change in a model's answers, and how fast they are decoded."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from descriptors.chunk_flags import CONTENT_CLASS, CONTENT_CLASS_RULE
from objectcache.calibration.origin import describe_origin
from objectcache.calibration.samples import progress_bar
from objectcache.calibration.shown_quality import shown_qualities
from objectcache.calibration.text import aligned, six_digits
from objectcache.cli.calibrate_run import DONE, config_of, failure, print_unwritten, target_of, write_json
from objectcache.cli.config import Config
from objectcache.cli.config_compression import DEFAULT_CODECS
from objectcache.cli.config_file import check_edit, edit_file
from objectcache.cli.config_text import Table, table_lines, with_table
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import decode, encode
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.planning.forms import TIER_CODECS

CODECS, CLASSES = ("compression", "codecs"), ("compression", "classes")
TEXTS_MAX, CONTEXT_TOKENS, QUESTION_TOKENS = 32, 1024, 64
SMOKE_TEXTS, SMOKE_TOKENS = 2, 192
SHAPE = LayerShape(64, 1024, Element.BFLOAT16)
RUN_SHAPE = LayerShape(256, 1024, Element.BFLOAT16)
"""For codecs that drop tokens, which take no shorter chunks."""


def calibrate_quality(options: argparse.Namespace) -> int:
    """The exit status: 0 done; 1 could not be measured. Raises ConfigError."""
    config = config_of(options)
    target = target_of(options)
    path = CODECS if options.content_class is None else (*CLASSES, options.content_class)
    if target is not None:  # before the minutes of measuring
        check_edit(target, lambda text: with_table(text, path, {"kivi4-1": {"quality": 1.0}}))
    try:
        rows = measured(options)
    except (OSError, ValueError, RuntimeError) as error:
        return failure(f"{options.quality}: {error}")
    head = ["codec", "bytes", "worst error", "mean error", "same answers", "quality", "KL", "perplexity over exact"]
    cells = [
        [row["codec"], f"{row['bytes']:.3f}", f"{row['worst_error']:.3f}", f"{row['mean_error']:.3f}",
         f"{row['agreement']:.4f}", f"{row['quality']:.4f}", f"{row['kl']:.5f}",
         f"{row['perplexity_over_exact']:.4f}"]
        for row in rows
    ]  # fmt: skip
    print("\n".join(aligned(head, cells)))
    print(
        "\nquality: same answers; of a codec that these texts do not show to be better than a smaller one, that one's"
    )
    write_json(
        options,
        {**describe_origin(), "model": options.quality, "content_class": options.content_class, "codecs": rows},
    )
    qualities = {row["codec"]: six_digits(row["quality"]) for row in rows}
    written: Table = qualities
    if options.content_class is None:
        written = codecs_table(config, qualities, decode_rates(1 if options.smoke else 5))
    if target is not None:
        edit_file(target, lambda text: with_table(text, path, written))
        print(f"\n{target}: [{'.'.join(path)}] is written")
    else:
        print_unwritten(table_lines(path, written))
    return DONE


def codecs_table(
    config: Config, qualities: Mapping[str, float], rates: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """The tables under `[compression.codecs]`: what was measured; else what the file had, or the defaults."""
    before = {name: each.quality for name, each in config.compression.codecs.items()}
    if not before and not qualities:
        before = {codec.value: figures.quality for codec, figures in DEFAULT_CODECS.items()}
    names = [codec.value for codec in TIER_CODECS if codec.value in qualities or codec.value in before]
    return {
        name: {
            "quality": six_digits(qualities.get(name, before.get(name, 1.0))),
            "decoded_bytes_per_s": six_digits(rates[name]),
        }
        for name in names
    }


def decode_rates(rounds: int) -> dict[str, float]:
    """Bytes of exact KV that one core decodes in a second, by codec: the median."""
    found = {}
    for codec in TIER_CODECS:
        shape = RUN_SHAPE if codec.drops_tokens else SHAPE
        exact = np.empty(shape.nbytes, dtype=np.uint8)
        values = np.random.default_rng(1).standard_normal(2 * shape.half_elements, dtype=np.float32)
        from_floats(values, shape.element, exact)
        out = np.empty_like(exact)
        encoded = encode(exact, shape, codec)
        taken = []
        for _ in range(rounds * 20):
            began_s = time.perf_counter()
            decode(encoded, shape, out)
            taken.append(time.perf_counter() - began_s)
        found[codec.value] = shape.nbytes / float(np.median(taken))
    return found


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each codec. Raises OSError, ValueError, RuntimeError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from objectcache.calibration.compute.layer import present_device
    from objectcache.calibration.quality import text_quality

    model = AutoModelForCausalLM.from_pretrained(options.quality, dtype=torch.float32)
    model.train(False)
    model.to(torch.device(present_device().value))  # type: ignore[arg-type]  # what transformers says of itself
    tokenizer = AutoTokenizer.from_pretrained(options.quality)
    tokens = SMOKE_TOKENS if options.smoke else CONTEXT_TOKENS + QUESTION_TOKENS
    count = SMOKE_TEXTS if options.smoke else TEXTS_MAX
    ids = tokenizer(options.texts.read_text(errors="replace"), return_tensors="pt").input_ids[0]
    texts = cut(ids, tokens, count)
    with progress_bar(len(texts) * len(TIER_CODECS), "quality") as advance:
        found = text_quality(model, texts, TIER_CODECS, min(QUESTION_TOKENS, tokens // 3), advance)
    rows = [_row(codec, *found[codec]) for codec in TIER_CODECS]
    same = {codec.value: found[codec][0].same.reshape(len(texts), -1).mean(axis=1) for codec in TIER_CODECS}
    qualities = shown_qualities(same, {row["codec"]: row["bytes"] for row in rows})
    return [{**row, "quality": qualities[row["codec"]]} for row in rows]


def cut(ids: Any, tokens: int, count: int) -> Sequence[Any]:
    """Up to `count` texts of so many tokens, spread over all of them. Raises ValueError where there is none."""
    whole = len(ids) // tokens
    if not whole:
        raise ValueError(f"the texts have {len(ids)} tokens, and {tokens} are needed")
    starts = np.linspace(0, whole - 1, min(count, whole)).astype(int)
    return [ids[start * tokens : (start + 1) * tokens] for start in starts]


def _row(codec: Codec, answers: Any, made: Any) -> dict[str, Any]:
    return {
        "codec": codec.value, "bytes": made.encoded_bytes / made.exact_bytes, "worst_error": max(made.errors),
        "mean_error": sum(made.errors) / len(made.errors), "agreement": float(answers.same.mean()),
        "kl": float(answers.kl.mean()), "perplexity": answers.perplexity,
        "perplexity_over_exact": answers.perplexity / answers.exact_perplexity,
    }  # fmt: skip


def texts_problem(texts: Path, content_class: str | None) -> str | None:
    """The problem of the options; None where there is none."""
    if content_class is not None and not CONTENT_CLASS.fullmatch(content_class):
        return f"--class has {CONTENT_CLASS_RULE}"
    return None if texts.is_file() else f"{texts}: no such file"
