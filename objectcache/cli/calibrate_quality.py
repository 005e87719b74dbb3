"""`objectcache calibrate quality`: what codecs change in a model's answers, and how fast they are decoded."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from descriptors.chunk_flags import CONTENT_CLASS, CONTENT_CLASS_RULE
from descriptors.prefix_keys import label
from descriptors.version import __version__
from nixl_client.connectors.vllm.naming import short_name
from objectcache.calibration.form_losses import FormLoss, cells, on_curve
from objectcache.calibration.loss_chart import draw_losses
from objectcache.calibration.measured_text import text_of
from objectcache.calibration.origin import describe_origin
from objectcache.calibration.probes import beginning_of, cut, encoder_of, probes
from objectcache.calibration.samples import progress_bar
from objectcache.calibration.shown_quality import shown_qualities
from objectcache.calibration.text import aligned, six_digits
from objectcache.cli.calibrate_run import DONE, config_of, failure, print_unwritten, target_of, write_json
from objectcache.cli.config import Config
from objectcache.cli.config_compression import DEFAULT_CODECS, read_losses
from objectcache.cli.config_file import check_edit, edit_file, replace_text
from objectcache.cli.config_text import Table, table_lines, with_table, with_values
from objectcache.kv_codecs.chains import chains_of, parse_chain
from objectcache.kv_codecs.elements import Element, from_floats
from objectcache.kv_codecs.encoding import decode, encode
from objectcache.kv_codecs.layer import Codec, LayerShape
from storage_server.planning.forms import TIER_CODECS
from storage_server.planning.losses import MeasuredLoss, ModelLosses
from storage_server.planning.losses_file import CALIBRATED_CODECS, TEXT_MAX, losses_bytes, with_model

CODECS, CLASSES = ("compression", "codecs"), ("compression", "classes")


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """How many texts, and the tokens of the context and of what follows it."""

    texts: int
    context: int
    continuation: int


SIZES, SMOKE_SIZES = ProbeSizes(16, 1024, 128), ProbeSizes(2, 256, 32)
CHUNK_TOKENS = 64
LEGEND = """KL: nats a token, from the answers on exact KV.
log-prob of a fact: how the log-probability of the right code changes, in nats, for facts that stand in the context.
quality: same answers; of a codec that these texts do not show to be better than a smaller one, that one's.
on the curve: no form as small loses less by KL and by facts; only these are written, and those that the file has."""
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
        check_edit(target, lambda text: with_values(text, "compression", {"losses": "losses.json"}))
    losses_file = losses_file_of(options, config)
    known = read_losses(losses_file) if losses_file is not None and losses_file.exists() else ()
    named = set(config.compression.codecs)
    try:
        every, of_texts, kv_shape = measured(options, sorted(named))
    except (OSError, ValueError, RuntimeError) as error:
        return failure(f"{options.quality}: {error}")
    losses = [each for each in every if len(parse_chain(each.codec)) == 1]
    chains = every[len(losses) :]
    encoded = losses[1:]
    same = {each.codec: np.array([one.agreement for one in each.samples]) for each in encoded}
    qualities = {
        name: six_digits(quality)
        for name, quality in shown_qualities(same, {each.codec: each.bytes_part for each in encoded}).items()
    }
    print("\n".join(aligned(*cells(losses, {**qualities, Codec.EXACT.value: 1.0}))))
    for each in chains:
        print(f"{each.codec}: KL {each.interval('kl').text('.5f')}, encoded one after the other")
    print(f"\n{len(losses[0].samples)} texts ({of_texts}), mean and 95 % interval over them. {LEGEND}")
    curve = on_curve(losses)
    rows = [
        {**each.row(), "quality": qualities.get(each.codec, 1.0), "is_on_curve": each.codec in curve} for each in losses
    ]
    write_json(
        options,
        {
            **describe_origin(), "model": options.quality, "content_class": options.content_class, "texts": of_texts,
            "codecs": rows, "chains": [each.row() for each in chains],
        },
    )  # fmt: skip
    if options.plot is not None:
        draw_losses(losses, options.plot, f"{options.quality}: what the forms lose")
    qualities = {name: quality for name, quality in qualities.items() if name in curve | named}
    written: Table = qualities
    if options.content_class is None:
        written = codecs_table(config, qualities, decode_rates(1 if options.smoke else 5))
    if target is not None:
        if losses_file is None or kv_shape is None or len(losses[0].samples) < 2:
            print("\nno losses are written: texts of a class, one text, or layers of different widths have none")
        else:
            model = model_losses(label(short_name(options.quality)), kv_shape, every, of_texts)
            replace_text(losses_file.resolve(), losses_bytes(with_model(known, model)).decode())
            edit_file(target, lambda text: with_values(text, "compression", {"losses": str(losses_file)}))
            print(f"\n{losses_file}: the losses of {model.model} are written")
        edit_file(target, lambda text: with_table(text, path, written))
        print(f"{target}: [{'.'.join(path)}] is written")
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


def losses_file_of(options: argparse.Namespace, config: Config) -> Path | None:
    """The losses file that the config file names, or one beside it. None where no file is to be written, and for texts
    of a class: a bound of the loss holds for every content.
    """
    if options.config is None or options.content_class is not None:
        return None
    beside: Path = options.config.resolve().with_name("losses.json")
    return config.compression.losses or beside


def model_losses(model: str, kv_shape: tuple[int, int], losses: Sequence[FormLoss], of_texts: str) -> ModelLosses:
    """The model as a losses file has it: its forms whose loss holds for every context, of two texts or more."""
    forms = {}
    for each in losses:
        chain = parse_chain(each.codec)
        if set(chain) <= set(CALIBRATED_CODECS):
            kl, recall = each.interval("kl"), each.interval("recall_change")
            forms[chain] = MeasuredLoss(kl.mean, kl.high, -recall.mean, -recall.low)
    text_count = len(losses[0].samples)
    layers, width = kv_shape
    return ModelLosses(
        model=model,
        num_layers=layers,
        width=width,
        element=Element.BFLOAT16,
        chunk_tokens=CHUNK_TOKENS,
        forms=forms,
        texts=of_texts[:TEXT_MAX],
        text_count=text_count,
        release=__version__,
    )


def measured(options: argparse.Namespace, named: Sequence[str]) -> tuple[list[FormLoss], str, tuple[int, int] | None]:
    """The losses of exact KV, of each codec, and for a losses file of chains of the `named` codecs or the default ones;
    the name of the texts; and the model's layers with their width, where it is the same for all. Codecs that drop
    tokens are measured where they are `named`. Raises OSError, ValueError, RuntimeError.
    """
    from objectcache.calibration.compute.layer import present_device
    from objectcache.calibration.model_quality import form_losses
    from objectcache.calibration.real_model import load_real_model

    text, of_texts = text_of(options.texts)
    real = load_real_model(options.quality, present_device().value)
    sizes = SMOKE_SIZES if options.smoke else SIZES
    context_tokens = min(sizes.context, (real.tokens_max - sizes.continuation) // CHUNK_TOKENS * CHUNK_TOKENS)
    encode, beginning = encoder_of(real.tokenizer), beginning_of(real.tokenizer)
    texts = cut(encode(text), context_tokens + sizes.continuation, sizes.texts)
    asked = probes(
        [text[: context_tokens + sizes.continuation] for text in texts], encode, beginning, context_tokens, 1
    )
    asked = [replace(each, continuation=each.continuation[: sizes.continuation]) for each in asked]
    codecs = [codec for codec in TIER_CODECS if not codec.drops_tokens or codec.value in named]
    if real.has_windows:  # a layer of theirs tells by a token's place in the cache what it attends to
        codecs = [codec for codec in codecs if not codec.drops_tokens]
    kept = [codec for codec in codecs if codec.value in named] or DEFAULT_CODECS
    chains = chains_of(kept) if options.config is not None and options.content_class is None else ()
    with progress_bar(len(asked) * (len(codecs) + len(chains)), "quality") as advance:
        return form_losses(real, asked, codecs, advance, chains), of_texts, real.kv_shape


def options_problem(options: argparse.Namespace) -> str | None:
    """The problem of the options; None where there is none."""
    texts, content_class = options.texts, options.content_class
    if content_class is not None and not CONTENT_CLASS.fullmatch(content_class):
        return f"--class has {CONTENT_CLASS_RULE}"
    return None if texts is None or texts.is_file() else f"{texts}: no such file"
