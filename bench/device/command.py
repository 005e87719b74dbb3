"""`objectcache bench recompute` and `copies`, and what `bench ttft --device` does, on the command line.

Imports torch only where a device is asked for: the other benches do without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.nixl_agent import NixlFailure, is_available
from bench.arguments import complain, number, writable
from bench.child import BaselineError
from bench.compute.shapes import ModelShape, shape
from bench.machine import describe_commit, describe_machine
from bench.overlap.grids import HIT_RATES
from bench.paper import TOKEN_LAYER_BYTES
from bench.server import BenchServerError
from bench.ttft.cases import CONTEXTS, Scale, System
from bench.ttft.plots import plot_figures
from bench.ttft.run import FigureName, Ttft, TtftSettings
from descriptors.errors import ObjectCacheError
from nixl_client.client import Transport

if TYPE_CHECKING:
    from bench.device.accelerator import Accelerator

DEVICES = ("cuda", "cpu")
LANDINGS = ("host", "device")
MODELS = ("llama-3.1-8b", "deepseek-r1-7b")
CONTEXT_SMOKE = "1K"
RUNS, RUNS_SMOKE = 3, 1
RECOMPUTE_CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
RECOMPUTE_CHUNK_TOKENS_SMOKE = (16, 64, 512)
RECOMPUTE_HIT_RATES_SMOKE = (0.5, 0.875)
ERRORS = (BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError, OSError, RuntimeError)
"""The last is torch's, CUDA's included."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a bench found: its text, its JSON, how to draw it, and whether everything was right."""

    table: str
    json: Mapping[str, Any]
    plot: Callable[[Path], None]
    is_right: bool


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Those of `bench ttft`."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="compute on it instead of playing windows: figure 13 with a real model, nothing scaled; cpu: --smoke only",
    )
    parser.add_argument(
        "--landing", choices=LANDINGS, default="host", help="what the server fills, with --device; default: host"
    )
    parser.add_argument("--systems", type=_systems, metavar="LIST", help="with --device; default: all of figure 13's")


def add_recompute(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "recompute",
        help="what coarse chunks cost at each hit boundary, on a GPU (tables A1, A2 and A6)",
        description="Prefill of what is left when a hit is cut to M - G tokens, with random weights of real shapes.",
    )
    parser.add_argument("--models", type=_some(MODELS), default=MODELS[:1], metavar="LIST", help=",".join(MODELS))
    parser.add_argument("--contexts", type=_some(CONTEXTS), metavar="LIST", help="default: 4K,64K")
    parser.add_argument(
        "-G", "--chunk-tokens", type=_chunk_tokens, metavar="LIST", help="ascending; default: 16,32,64,128,256,512"
    )
    parser.add_argument("--runs", type=number(1, 1000), metavar="K", help=f"counted rounds; default: {RUNS}")
    parser.add_argument("--seed", type=number(0, 1 << 62), default=1, help="default: 1")
    _add_common(parser)
    parser.set_defaults(command=_recompute)


def add_copies(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "copies",
        help="copies from pinned host memory to a GPU by block size (figure A3)",
        description="Blocks of 64 KiB to 64 MiB, each waited for by itself, and many at once; every byte compared.",
    )
    _add_common(parser)
    parser.set_defaults(command=_copies)


def run_on_device(options: argparse.Namespace, played: TtftSettings) -> int:
    """`bench ttft --device`; `played` is what the other options come to."""
    transport, landing = Transport(options.transport), options.landing
    if landing == "device" and transport is not Transport.UCX:
        return complain("--landing device needs --transport ucx: nothing else writes into a device's memory", 2)
    if transport is Transport.UCX and not is_available():
        return complain("NIXL is not installed: pip install 'objectcache[ucx]', or pass --transport shm", 2)
    return _on_device(options, lambda accelerator, origin: _ttft(options, played, accelerator, origin))


def _ttft(
    options: argparse.Namespace, played: TtftSettings, accelerator: Accelerator, origin: Mapping[str, Any]
) -> _Outcome:
    from bench.device.bed import DeviceBedSettings
    from bench.device.carrier import Landing
    from bench.device.report import device_json, tables
    from bench.device.ttft import DeviceTtftSettings, measure_device_ttft

    model, vocabulary = _shape("llama-3.1-8b", options.smoke)
    scale = Scale(model.token_layer_bytes / TOKEN_LAYER_BYTES)
    contexts = (CONTEXT_SMOKE,) if options.smoke else played.contexts
    link_bytes_per_s = None if options.link_gbps is None else played.link_bytes_per_s
    played = replace(
        played,
        bed=replace(played.bed, scale=scale),
        figures=(FigureName.OVERHEAD,),
        contexts=contexts,
        link_bytes_per_s=link_bytes_per_s,
        runs=options.runs or (RUNS_SMOKE if options.smoke else RUNS),
    )
    bed = played.bed
    settings = DeviceTtftSettings(
        bed=DeviceBedSettings(scale, bed.transport, Landing(options.landing), bed.gather_s, bed.folder),
        shape=model,
        vocabulary=vocabulary,
        systems=options.systems or tuple(System),
        contexts=contexts,
        hit_rates=played.hit_rates,
        chunk_tokens=played.chunk_tokens,
        link_bytes_per_s=link_bytes_per_s,
        runs=played.runs,
        seed=options.seed,
    )
    found = measure_device_ttft(settings, accelerator)

    def plot(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        plot_figures(played, Ttft(found.cells), folder)

    is_right = found.problem is None and found.are_logits_right
    return _Outcome(tables(settings, found), device_json(settings, played, found, origin), plot, is_right)


def _recompute(options: argparse.Namespace) -> int:
    return _on_device(options, lambda accelerator, origin: _recomputed(options, accelerator, origin))


def _recomputed(options: argparse.Namespace, accelerator: Accelerator, origin: Mapping[str, Any]) -> _Outcome:
    from bench.device.recompute import RecomputeSettings, measure_recompute
    from bench.device.recompute_report import plot_recompute, recompute_json, recompute_table

    models = [_shape(name, options.smoke) for name in options.models]
    settings = RecomputeSettings(
        shapes=tuple(model for model, _ in models),
        vocabularies={model.name: vocabulary for model, vocabulary in models},
        contexts=(CONTEXT_SMOKE,) if options.smoke else options.contexts or CONTEXTS,
        hit_rates=RECOMPUTE_HIT_RATES_SMOKE if options.smoke else HIT_RATES,
        chunk_tokens=options.chunk_tokens
        or (RECOMPUTE_CHUNK_TOKENS_SMOKE if options.smoke else RECOMPUTE_CHUNK_TOKENS),
        runs=options.runs or (RUNS_SMOKE if options.smoke else RUNS),
        seed=options.seed,
    )
    found = measure_recompute(settings, accelerator)
    return _Outcome(
        recompute_table(settings, found),
        recompute_json(settings, found, origin),
        lambda path: plot_recompute(settings, found, path),
        found.problem is None,
    )


def _copies(options: argparse.Namespace) -> int:
    return _on_device(options, lambda accelerator, origin: _copied(options, accelerator, origin))


def _copied(options: argparse.Namespace, accelerator: Accelerator, origin: Mapping[str, Any]) -> _Outcome:
    from bench.device.copies import SETTINGS_SMOKE, CopySettings, measure_copies
    from bench.device.copies_report import copies_json, copies_table, plot_copies

    settings = SETTINGS_SMOKE if options.smoke else CopySettings()
    found = measure_copies(settings, accelerator)
    return _Outcome(
        copies_table(found),
        copies_json(settings, found, origin),
        lambda path: plot_copies(found, path),
        found.problem is None,
    )


def _on_device(options: argparse.Namespace, measure: Callable[[Accelerator, Mapping[str, Any]], _Outcome]) -> int:
    """Refuse, measure, and publish."""
    problem = _problem(options)
    if problem is not None:
        return complain(problem, 2)
    from bench.compute.layer import Device
    from bench.device.accelerator import DeviceError, describe_software, opened

    origin = {**describe_commit(), "machine": {**describe_machine(), **describe_software()}}
    try:
        with opened(Device(options.device)) as accelerator:
            outcome = measure(accelerator, origin)
    except (DeviceError, *ERRORS) as error:
        return complain(str(error), 1)
    except MemoryError:
        return complain("not enough host memory: pass a shorter context", 1)
    print(outcome.table)
    if options.json is not None:
        options.json.write_text(json.dumps(outcome.json, indent=2) + "\n")
    if options.plot is not None:
        outcome.plot(options.plot)
    return 0 if outcome.is_right else 1


def _problem(options: argparse.Namespace) -> str | None:
    """What keeps these options from being carried out here."""
    if importlib.util.find_spec("torch") is None:
        return f"--device {options.device} needs torch: pip install 'objectcache[torch]'"
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install 'objectcache[plot]'"
    if options.device == "cpu" and not options.smoke:
        return "--device cpu only tries the code out: pass --smoke, or --device cuda"
    from bench.compute.layer import Device, is_present
    from bench.device.accelerator import torch_version

    if not is_present(Device(options.device)):
        return f"no CUDA device: torch {torch_version()} sees none here"
    return writable(options.json, options.plot)


def _shape(name: str, is_smoke: bool) -> tuple[ModelShape, int]:
    """The model's shape and vocabulary; for smoke runs as many layers, everything else tiny."""
    from bench.device.model import VOCABULARIES, VOCABULARY_SMALL

    model = shape(name)
    if not is_smoke:
        return model, VOCABULARIES[name]
    return replace(model, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128), VOCABULARY_SMALL


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="cpu: --smoke only; default: cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one run: does it work, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, raw samples included")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it; needs the extra 'plot'")


def _systems(text: str) -> tuple[System, ...]:
    """opt-local-LW is what the others are over: it comes first, asked for or not."""
    chosen = _some(tuple(system.value for system in System))(text)
    return tuple(system for system in System if system is System.OPT_LOCAL_LW or system.value in chosen)


def _some(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if len(set(names)) != len(names) or not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, with commas between")
        return names

    return parse


def _chunk_tokens(text: str) -> tuple[int, ...]:
    one = number(1, 512)
    grains = tuple(one(part) for part in text.split(","))
    if list(grains) != sorted(set(grains)) or len(grains) < 2:
        raise argparse.ArgumentTypeError("must be two or more, ascending")
    return grains
