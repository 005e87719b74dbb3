"""`bench compression`: the command, and sections and chart of its result."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.core import options
from bench.core.experiment import Experiment, WrongUse, published
from bench.core.plots import Chart, Kind, draw
from bench.core.rounds import Side, Target
from bench.core.show import Json, Section, table, targets
from bench.paper.compression.choice import (
    EXACT,
    SAME_POLICY,
    Codecs,
    Machine,
    decision_us,
    greedy_over_bound,
    requests,
    run,
    ways,
)
from bench.paper.compression.live_report import REMARK as LIVE_REMARK
from bench.paper.compression.live_report import live_section, live_targets
from bench.paper.compression.sizes import WEIGHTS
from bench.paper.compression.tasks import Task
from bench.paper.device.command import need_torch
from objectcache.calibration.intervals import MeanInterval
from objectcache.calibration.samples import progress_bar, spread
from objectcache.calibration.shown_quality import shown_qualities
from objectcache.kv_codecs.elements import Bytes
from objectcache.kv_codecs.layer import Codec

REMARKS = (
    "Codecs: on one core, rates are of exact bytes; KV of SmolLM2-135M-Instruct (on GPUs of a trained model), heads of "
    "some layers side by side until a token has 1,024 elements. KIVI is C both ways; FP8 and lossless are numpy and "
    "zlib.",
    "Quality: two Llamas of 0.4 and 1.0 million parameters, trained from scratch on these tasks; contexts of 256 "
    "tokens in chunks of 64, KV in bfloat16; to codecs that drop tokens the context is one chunk. Answers are the most "
    "likely token at each place given the right ones before it. So small a model says little about a large one: "
    "measure your own (docs/guides/compression.md).",
    "Choice: simulated. DRAM, disk and processor each serve one request after the other; contexts of 1 GiB, DRAM "
    "20 GB/s, disk 1 GB/s, 3 s to compute a context again; DRAM : disk : all contexts as 100 : 400 : 1,000. Encoding "
    "and moving cost nothing there, since they are done behind. Whoever decides, a context is computed when it is "
    "asked for the first time. Policies know the qualities of one half of the samples, and are scored by the other. "
    "Before anything counts, there are 20 requests for each context, from which ours learns how often each is used.",
    LIVE_REMARK,
    "Engine: vLLM on a CPU with SmolLM2-135M-Instruct in bfloat16; texts of 1,024 tokens in chunks of 256 are asked "
    "about by Zipf's law, and always loaded. The link is played: its rate is such that a text takes 0.5 s exactly.",
    "Real: SmolLM2-135M-Instruct and Gemma 3 270M, dequantised from files of 4 to 8 bits, in float32 on one machine; "
    "texts are of the documentation of Python, with four facts put into each; means and 95 % intervals over the texts. "
    "They are real and tiny, and the texts are of one kind.",
    "Streaming and keydiff drop tokens: they are forms for readers that attend to fewer of them; vLLM is not one.",
)


class Part(Enum):
    """The parts of the run."""

    CODECS = "codecs"
    WIRE = "wire"
    DECISION = "decision"
    QUALITY = "quality"
    FIGURE_2 = "figure_2"
    LIVE = "live"
    ENGINE = "engine"
    DEVICE = "device"
    REAL = "real"


WITHOUT_DEVICES = tuple(part for part in Part if part not in (Part.DEVICE, Part.REAL, Part.LIVE))
WITHOUT_ENGINES = tuple(part for part in WITHOUT_DEVICES if part is not Part.ENGINE)


@dataclass(frozen=True, slots=True)
class CompressionBenchSettings:
    """The sizes of the run."""

    parts: tuple[Part, ...] = options.choice("--parts", Part, WITHOUT_DEVICES, WITHOUT_ENGINES)
    device: str = options.setting("--device", "cuda", "cpu", choices=("cuda", "cpu"), text="of the part device")
    device_chunks: tuple[int, ...] = options.sized((64, 512), (8,))
    models: tuple[str, ...] = options.sized(("smaller", "small"), ("smaller",))
    kv_model: str = options.sized("SmolLM2-135M-Instruct", "smaller")
    chunks: int = options.sized(64, 8)
    real_texts: int = options.sized(16, 2)
    real_context_tokens: int = options.sized(1024, 256)
    real_continuation_tokens: int = options.sized(128, 32)
    links_gbps: tuple[float, ...] = options.sized((1.0, 2.5, 5.0, 10.0), (1.0,))
    contexts: int = options.count("--contexts", 512, 4, text="contexts of each task")
    context_tokens: int = options.sized(256, 128)
    questions: int = options.sized(32, 8)
    entries: int = options.count("--entries", 300, 30, text="contexts that are asked for")
    request_count: int = options.count("--requests", 6000, 200, text="scored requests of each case")
    history_uses: int = options.sized(20, 3)
    histories: tuple[int, ...] = options.sized((5, 20, 60), (1, 3))
    kept_entries: int = options.sized(100_000, 2_000)
    decisions: int = options.sized(20_000, 500)
    engine_texts: int = options.sized(24, 4)
    engine_text_tokens: int = options.sized(1024, 256)
    engine_requests: int = options.sized(48, 8)
    engine_memory_share: float = options.sized(0.25, 0.25)
    engine_load_s: float = options.sized(0.5, 0.1)
    live_contexts: int = options.sized(24, 6)
    live_context_tokens: int = options.sized(512, 128)
    live_continuation_tokens: int = options.sized(64, 16)
    live_known_texts: int = options.sized(12, 2)
    live_memory_shares: tuple[float, ...] = options.sized((0.1, 0.25, 0.5), (0.35,))
    live_load_s: float = options.sized(0.15, 0.05)
    live_pause_s: float = options.sized(0.03, 0.01)
    live_warm_uses: int = options.sized(4, 2)
    live_requests: int = options.sized(24, 8)
    live_alphas_s: tuple[float, ...] = options.sized((0.25, 1.0), (0.25,))
    rates: tuple[float, ...] = options.sized((0.2, 0.5, 0.8), (0.5,))
    alphas_s: tuple[float, ...] = options.sized((0.5, 2.0, 8.0), (2.0,))
    runs: int = options.runs(5)
    seed: int = options.seed()
    folder: Path | None = options.folder()


SKEW = 0.9
HALF_LIFE_USES = 20
"""A use counts half after so many requests for each context."""
TASKS = tuple(task.value for task in Task)


def measure_compression(settings: CompressionBenchSettings, origin: Mapping[str, Any]) -> Json:
    """The parts that are asked for. Raises WrongUse, FAILURES."""
    parts, problem = settings.parts, None
    if Part.DEVICE in parts:
        need_torch("--parts device", settings.device)
    for name in settings.models:
        if not (WEIGHTS / f"{name}.safetensors").exists():
            raise WrongUse(f"{name} is not trained: python -m bench.paper.compression.train {name}")
    from bench.paper.compression.codecs import kv_of, wire
    from bench.paper.compression.codecs import table as codec_table
    from bench.paper.compression.engine import EngineCase, end_to_end
    from bench.paper.compression.quality import batch_count, measured

    found: dict[str, Any] = {}
    try:
        if {Part.CODECS, Part.WIRE, Part.DEVICE} & set(parts):  # a machine with a GPU may not reach PyPI
            model = settings.models[0] if Part.DEVICE in parts else settings.kv_model
            data = kv_of(model, settings.chunks, settings.seed)
        if Part.CODECS in parts:
            found["codecs"] = codec_table(data, settings.runs)
        if Part.WIRE in parts:
            with tempfile.TemporaryDirectory(prefix="objectcache-wire-", dir=settings.folder) as name:
                found["wire"] = wire(data, settings.links_gbps, settings.runs, Path(name))
        if Part.DEVICE in parts:
            found |= _on_device(data, settings)
        if Part.LIVE in parts:
            found |= _live(settings)
    except AssertionError as error:
        problem = str(error) or "decoded bytes are not what they should be"
    if Part.REAL in parts:
        found |= _real(settings)
    if Part.DECISION in parts:
        found["decision_us"] = spread(decision_us(settings.kept_entries, settings.decisions, settings.seed))
    if {Part.QUALITY, Part.FIGURE_2} & set(parts):
        total = len(settings.models) * len(Task) * batch_count(settings.contexts)
        with progress_bar(total, "quality") as advance:
            rows = measured(
                settings.models, settings.contexts, settings.context_tokens, settings.questions, settings.seed, advance
            )
        found["quality"] = [{name: value for name, value in row.items() if name != "rights"} for row in rows]
    if Part.FIGURE_2 in parts:
        found["figure_2"] = _figure_2(settings, rows)
        found["histories"] = _histories(settings, rows)
        found["hit_rates"] = [
            {
                "rate_per_s": row["rate_per_s"], "alpha_s": row["alpha_s"], "case": row["case"],
                **{name: way["dram_hit_rate"] for name, way in row["ways"].items()},
            }
            for row in found["figure_2"] if row["case"] == "mixed"
        ]  # fmt: skip
        found["greedy_over_bound"] = spread([greedy_over_bound(seed, 400) for seed in range(settings.runs)])
    if Part.ENGINE in parts:
        case = EngineCase(
            settings.engine_texts, settings.engine_text_tokens, settings.engine_memory_share, settings.engine_load_s
        )
        found["engine"] = end_to_end(case, settings.engine_requests, settings.runs, settings.seed, settings.folder)
    return published(
        "compression", origin, settings, problem, remarks=list(REMARKS),
        targets=[target.json("case", "side", "reason") for target in _targets(found)], **found,
    )  # fmt: skip


def _on_device(data: Bytes, settings: CompressionBenchSettings) -> dict[str, Any]:
    from bench.paper.compression.device import CODECS, device_rows
    from objectcache.calibration.compute.layer import Device, describe_device

    with progress_bar(len(CODECS) * len(settings.device_chunks), settings.device) as advance:
        rows = []
        for row in device_rows(data, settings.device_chunks, settings.device, settings.runs):
            rows.append(row)
            advance(1)
    return {"device": describe_device(Device(settings.device)), "on_device": rows}


def _real(settings: CompressionBenchSettings) -> dict[str, Any]:
    from bench.paper.compression.real import FOLDERS, REAL_FORMS, real_rows

    with progress_bar(len(FOLDERS) * settings.real_texts * REAL_FORMS, "real models") as advance:
        found = real_rows(
            tuple(FOLDERS),
            settings.real_texts,
            settings.real_context_tokens,
            settings.real_continuation_tokens,
            advance,
        )
    return {"real": found.forms, "ranges": found.ranges, "chains": found.chains}


def _live(settings: CompressionBenchSettings) -> dict[str, Any]:
    from bench.paper.compression.live import LiveCase, live

    case = LiveCase(
        contexts=settings.live_contexts, context_tokens=settings.live_context_tokens,
        continuation_tokens=settings.live_continuation_tokens, known_texts=settings.live_known_texts,
        memory_shares=settings.live_memory_shares, load_s=settings.live_load_s, pause_s=settings.live_pause_s,
        warm_uses=settings.live_warm_uses, request_count=settings.live_requests, alphas_s=settings.live_alphas_s,
    )  # fmt: skip
    total = len(case.memory_shares) * case.way_count * case.requests_of(settings.runs)
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-live-", dir=settings.folder) as name,
        progress_bar(total, "live") as advance,
    ):
        rows, qualities = live(case, settings.runs, settings.seed, Path(name), advance)
    return {"live": rows, "live_qualities": qualities}


def _codecs(rows: Sequence[Mapping[str, Any]], model: str, machine: Machine) -> Codecs:
    """Sizes, times and qualities of each form, as measured on a model. A form's quality is its accuracy over that on
    exact KV, at most 1; what policies know of it is what the samples of their half show.
    """
    mine = [row for row in rows if row["model"] == model]
    nbytes = {row["form"]: round(row["bytes"] * machine.context_bytes) for row in mine}
    halves: list[dict[str, dict[str, float]]] = [{}, {}]
    for task in TASKS:
        of_task = {row["form"]: row for row in mine if row["task"] == task}
        exact = float(np.mean(of_task[EXACT]["rights"][: len(of_task[EXACT]["rights"]) // 2]))
        scored = of_task[EXACT]["halves"][1]
        encoded = {form: row for form, row in of_task.items() if form != EXACT}
        scores = {form: np.array(row["rights"][: len(row["rights"]) // 2]) for form, row in encoded.items()}
        shown = shown_qualities(scores, {form: row["bytes"] for form, row in encoded.items()})
        for form, row in of_task.items():
            halves[0].setdefault(task, {})[form] = min(1.0, shown.get(form, exact) / max(1e-9, exact))
            halves[1].setdefault(task, {})[form] = min(1.0, row["halves"][1] / max(1e-9, scored))
    decode_s = {form: 0.0 if form == EXACT or Codec(form).drops_tokens else DECODE_S for form in nbytes}
    return Codecs(nbytes, decode_s, halves[0], halves[1])


DECODE_S = 0.01
"""Only a layer's decoding is not hidden behind the loading of the next: a fraction of a context's."""


def _figure_2(settings: CompressionBenchSettings, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    machine = Machine()
    found = []
    cases = [*((task,) for task in TASKS), TASKS]
    with progress_bar(len(settings.rates) * len(settings.alphas_s) * len(cases), "figure 2") as advance:
        for model in settings.models[:1]:
            codecs = _codecs(rows, model, machine)
            for rate in settings.rates:
                for alpha_s in settings.alphas_s:
                    for case in cases:
                        found.append(
                            _case(settings, model, codecs, machine, rate, alpha_s, case, settings.history_uses)
                        )
                        advance(1)
    return found


def _histories(settings: CompressionBenchSettings, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The part of the oracle's gain by how often each context was asked for before anything counts."""
    machine, model = Machine(), settings.models[0]
    codecs = _codecs(rows, model, machine)
    cases = [*((task,) for task in TASKS), TASKS]
    rate, alpha_s = median(settings.rates), median(settings.alphas_s)
    found = []
    with progress_bar(len(settings.histories) * len(cases), "histories") as advance:
        for uses in settings.histories:
            taken: dict[str, Any] = {"uses": uses, "rate_per_s": rate, "alpha_s": alpha_s}
            for case in cases:
                made = _case(settings, model, codecs, machine, rate, alpha_s, case, uses)
                taken[made["case"]] = made["of_oracle"]
                advance(1)
            found.append(taken)
    return found


def _case(
    settings: CompressionBenchSettings, model: str, codecs: Codecs, machine: Machine, rate: float, alpha_s: float,
    case: Sequence[str], history_uses: int,
) -> dict[str, Any]:  # fmt: skip
    """`history_uses` times as many requests as there are contexts come before those that count."""
    classes = [case[number % len(case)] for number in range(settings.entries)]
    warm = history_uses * settings.entries
    asked = requests(settings.entries, warm + settings.request_count, rate, SKEW, settings.seed)
    outcomes = {
        name: run(cache, asked, classes, codecs, machine, alpha_s, warm)
        for name, cache in ways(classes, codecs, machine, alpha_s, HALF_LIFE_USES * settings.entries / rate, SKEW)
    }
    whole = {name: asdict(each["all"]) for name, each in outcomes.items()}
    others = {name: each["utility_s"] for name, each in whole.items() if name not in ("ours", "oracle")}
    single = {name: utility_s for name, utility_s in others.items() if name.endswith(SAME_POLICY)}
    fixed = {name: utility_s for name, utility_s in others.items() if name not in single}
    best, best_single = (max(found, key=found.__getitem__) for found in (fixed, single))
    gain = {name: whole[name]["utility_s"] - fixed[best] for name in ("ours", "oracle")}
    over = {name: whole[name]["utility_s"] - single[best_single] for name in ("ours", "oracle")}
    scale = abs(alpha_s - fixed[best])
    return {
        "model": model, "rate_per_s": rate, "alpha_s": alpha_s, "case": "mixed" if len(case) > 1 else case[0],
        "ways": whole, "best_fixed": best, "gain_s": gain["ours"], "oracle_gain_s": gain["oracle"],
        "of_oracle": gain["ours"] / gain["oracle"] if gain["oracle"] > 0.02 * scale else None,
        "worse_than_fixed": max(0.0, -gain["ours"]) / scale if scale else 0.0,
        "best_single": best_single, "gain_over_single_s": over["ours"],
        "of_oracle_over_single": over["ours"] / over["oracle"] if over["oracle"] > 0.02 * scale else None,
        "ttft_over": whole[best]["ttft_s"] / whole["ours"]["ttft_s"],
        "by_task": {
            name: {key: outcomes[key][name].utility_s for key in ("ours", "oracle", best)}
            for name in outcomes["ours"] if name != "all"
        },
    }  # fmt: skip


def _targets(found: Mapping[str, Any]) -> Iterator[Target]:
    for row in found.get("codecs", ()):
        if row["codec"] == "kivi4-1":
            yield Target("decoding 4 bits on one core, bytes/s", 4e9, row["decode_bytes_per_s"])
    for row in found.get("wire", ()):
        case = f"link of {row['link_gbps']:g} Gbps"
        side = Side.MORE_THAN if row["link_gbps"] < 10 else Side.AT_LEAST
        limit = 1.0 if row["link_gbps"] < 10 else 0.0
        if limit:
            yield Target(
                "exact over encoded, time to the last layer", limit, row["exact_over_encoded"], side, case=case
            )
    if "decision_us" in found:
        yield Target("a decision among 100,000 entries, µs", 50, found["decision_us"], Side.AT_MOST)
    if "greedy_over_bound" in found:
        yield Target("the optimizer's utility over the bound of any placement", 0.99, found["greedy_over_bound"])
    if "figure_2" in found:
        for case in sorted({row["case"] for row in found["figure_2"]}):
            for key, what in (("of_oracle", "fixed choice"), ("of_oracle_over_single", "single codec, our policy")):
                mine = [row[key] for row in found["figure_2"] if row["case"] == case and row[key] is not None]
                reason = None if mine else f"the oracle gains less than 2 % over the best {what}"
                value = spread(mine) if mine else None
                yield Target(f"of the oracle's gain over the best {what}", 0.8, value, case=case, reason=reason)
        worst = max(row["worse_than_fixed"] for row in found["figure_2"])
        yield Target("worse than the best fixed choice, at most anywhere", 0.02, worst, Side.AT_MOST)
    if "live" in found:
        yield from live_targets(found["live"])


def show(result: Json) -> dict[str, Section]:
    """A section for each part."""
    sections: dict[str, Section] = {}
    if "codecs" in result:
        sections["codecs"] = (
            table(
                result["codecs"],
                "codec = codec | ratio = ratio:.2 | error of keys = error_keys:.4 | of values = error_values:.4",
                "encode GB/s = encode_bytes_per_s:GB/s | decode GB/s = decode_bytes_per_s:GB/s",
            ),
        )
    if "wire" in result:
        sections["wire"] = (
            table(
                result["wire"],
                "Gbps = link_gbps | first layer ms, exact = first_layer_s.exact:ms",
                "encoded = first_layer_s.encoded:ms | last layer ms, exact = last_layer_s.exact:ms",
                "encoded = last_layer_s.encoded:ms | exact over encoded = exact_over_encoded:.2",
            ),
        )
    if "on_device" in result:
        sections["device"] = _device_section(result)
    if "quality" in result:
        sections["quality"] = (_quality_table(result["quality"]), _measures_table(result["quality"]))
    if "real" in result:
        sections["real"] = _real_section(result["real"])
        sections["ranges"] = _range_section(result["ranges"])
        sections["chains"] = _chain_section(result["chains"])
    if "engine" in result:
        sections["engine"] = _engine_section(result["engine"])
    if "figure_2" in result:
        sections["choice"] = _choice_section(result["figure_2"])
    if "live" in result:
        sections["live"] = live_section(result["live"])
    if "histories" in result:
        columns = " | ".join(f"{name} = {name}:.2" for name in (*TASKS, "mixed"))
        sections["histories"] = (table(result["histories"], f"requests for each context before = uses | {columns}"),)
    sections["targets"] = (targets(result["targets"]), *result["remarks"])
    return sections


def _device_section(result: Json) -> Section:
    return (
        table(
            result["on_device"],
            "codec = codec | chunks in a layer = chunks | exact bytes of a layer = layer_bytes:size",
            "decode GB/s = decode_bytes_per_s:GB/s | copied up exactly, ms = arrival_s.exact:ms",
            "encoded and decoded, ms = arrival_s.encoded:ms | exact over encoded = exact_over_encoded:.2",
        ),
        f"{result['device']}: layers are copied out of pinned host memory; rates are of exact bytes.",
    )


def _real_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    found = [{**_as_texts(row), "curve": "yes" if row["is_on_curve"] else "no"} for row in rows]
    return (
        table(
            found, "model = model | form = codec | bytes = bytes:.3 | KL = kl",
            "perplexity over exact = perplexity_over_exact | top-1 agreement = agreement",
            "log-prob of a fact = recall_change | facts right = recall_right",
            "worst error = worst_error:.3 | on the curve = curve",
        ),
    )  # fmt: skip


def _range_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    return (
        table(
            [_as_texts(row) for row in rows], "model = model | 3 bits in which third of the layers = codec",
            "bytes = bytes:.3 | KL = kl | log-prob of a fact = recall_change",
        ),
    )  # fmt: skip


def _as_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its intervals as people read them."""
    forms = {
        "kl": ".5f",
        "perplexity_over_exact": ".4f",
        "agreement": ".4f",
        "recall_change": "+.3f",
        "recall_right": ".3f",
    }
    return {**row, **{name: MeanInterval(**row[name]).text(form) for name, form in forms.items()}}


def _chain_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    return (
        table(
            rows, "model = model | encoded = chain | tokens of a chunk = chunk_tokens | chunks = chunks",
            "greatest error told = told_max:.3 | real = real_max:.3 | within 0.12 as told = told_within:.2",
            "really = real_within:.2",
        ),
    )  # fmt: skip


def _engine_section(found: Mapping[str, Any]) -> Section:
    columns = ("ttft_p50_s", "ttft_p90_s", "dram_hit_rate", "lossy_share", "mean_error", "right")
    rows = [{"way": way, **{name: each[f"{name}_spread"] for name in columns}} for way, each in found["ways"].items()]
    over = {
        "p50": found["ttft_p50_over"],
        "p90": found["ttft_p90_over"],
        "pair": found["ttft_pair_over"],
        "agreement": found["agreement"],
    }
    return (
        table(
            rows, "lossy = way | TTFT ms, p50 = ttft_p50_s:ms | p90 = ttft_p90_s:ms | DRAM hits = dram_hit_rate:.2",
            "chunks that came encoded = lossy_share:.2 | mean error = mean_error:.3 | facts right = right:.3",
        ),
        table([over], "off over adaptive, TTFT p50 = p50:.2 | p90 = p90:.2 | median of pairs = pair:.2",
              "same answers = agreement:.3"),
    )  # fmt: skip


def _quality_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for form in dict.fromkeys(row["form"] for row in rows):
            mine = {row["task"]: row for row in rows if (row["model"], row["form"]) == (model, form)}
            first = next(iter(mine.values()))
            found.append(
                {
                    "model": model,
                    "form": form,
                    "bytes": first["bytes"],
                    **{name: row["score"] for name, row in mine.items()},
                }
            )
    columns = " | ".join(f"{name} = {name}:.3" for name in TASKS)
    return table(found, f"model = model | form = form | bytes = bytes:.3 | {columns}")


def _measures_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for form in dict.fromkeys(row["form"] for row in rows if row["form"] != EXACT):
            mine = [row for row in rows if (row["model"], row["form"]) == (model, form)]
            deep = next(row for row in mine if row["task"] == Task.PASSKEY.value)
            found.append(
                {
                    "model": model, "form": form, "error": max(row["worst_error"] for row in mine),
                    "perplexity": sum(row["perplexity"] / row["perplexity_exact"] for row in mine) / len(mine),
                    "kl": sum(row["kl"] for row in mine) / len(mine),
                    "agreement": sum(row["agreement"] for row in mine) / len(mine),
                    "depth": " ".join("-" if each is None else f"{each:.2f}" for each in deep["by_depth"]),
                }
            )  # fmt: skip
    return table(
        found, "model = model | form = form | worst error = error:.3 | perplexity over exact = perplexity:.3",
        "KL = kl:.4 | top-1 agreement = agreement:.4 | passkey by quarter of the context = depth",
    )  # fmt: skip


def _choice_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    found = [
        {
            "case": row["case"], "rate": row["rate_per_s"], "alpha": row["alpha_s"], "best": row["best_fixed"],
            **{
                f"{name}_{key}": row["ways"][way][measure]
                for name, way in (("fixed", row["best_fixed"]), ("ours", "ours"), ("oracle", "oracle"))
                for key, measure in (("ttft", "ttft_s"), ("quality", "quality"), ("hits", "dram_hit_rate"))
            },
            "of_oracle": row["of_oracle"], "single": row.get("best_single", "").removesuffix(SAME_POLICY),
            "over_single": row.get("of_oracle_over_single"),
        }
        for row in rows
    ]  # fmt: skip
    return (
        table(
            found, "content = case | requests/s = rate | alpha s = alpha | best fixed = best",
            "TTFT s = fixed_ttft:.2 | quality = fixed_quality:.3 | DRAM hits = fixed_hits:.2",
            "ours: TTFT = ours_ttft:.2 | quality = ours_quality:.3 | DRAM hits = ours_hits:.2",
            "oracle: TTFT = oracle_ttft:.2 | quality = oracle_quality:.3 | part of its gain = of_oracle:.2",
            "best single codec, our policy = single | part of the oracle's gain over that = over_single:.2",
        ),
    )  # fmt: skip


CHART = Chart(Kind.BARS, "case", "ttft_s", "TTFT, s", "way", across_title="what quality is worth")


def plot(result: Json, path: Path) -> None:
    """TTFT of the best fixed choice, of ours and of the oracle, on mixed contexts."""
    rows = [
        {
            "way": name, "case": f"{row['alpha_s']:g} s, {row['rate_per_s']:g}/s",
            "ttft_s": row["ways"][way]["ttft_s"],
        }
        for row in result.get("figure_2", ()) if row["case"] == "mixed"
        for name, way in (("best fixed", row["best_fixed"]), ("ours", "ours"), ("oracle", "oracle"))
    ]  # fmt: skip
    draw(CHART, rows, "compression: TTFT on mixed contexts", path)


COMPRESSION = Experiment(
    name="compression",
    help="codecs, encoded layers on the wire, what they cost in quality, and the choice among them",
    description="Measure codecs and encoded layers, what each codec costs in quality on trained models, and the choice "
    "of codec and tier for each context.",
    settings=CompressionBenchSettings,
    measure=measure_compression,
    show=show,
    plot=plot,
)
