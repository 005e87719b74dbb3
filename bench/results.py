"""Measure the results of docs/results again: `python -m bench.results [NAME ...]`, or all of them.

    --list       how old the published results are
    --publish    put what was measured into docs/results and docs/images, and its figures into the documents

Results are of one commit only if nothing is changed meanwhile, so what is measured goes to out/results first. A result
that is there already, of these files, is not measured again: a run that was ended goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import RESULTS, ROOT
from bench.figures import main as write_figures
from objectcache.calibration.origin import describe_commit, python_path

MEASURED, IMAGES = ROOT / "out" / "results", ROOT / "docs" / "images"


@dataclass(frozen=True, slots=True)
class Run:
    """The command that measures a result, as arguments of Python, and the place of its charts in docs/images: a file,
    or a folder. What needs a GPU is left as it is where there is none.
    """

    command: str
    chart: str | None = None
    needs_gpu: bool = False


MOTO = "--moto .venv-clients/services/bin/python"
UNSCALED = "-m objectcache bench ttft --figures 13 --contexts 64K --hits 50 -G 64 --scale 1 --link-gbps 0"
RUNS = {
    "aggregate": Run("-m objectcache bench aggregate", "aggregate.png"),
    "aggregate-ucx": Run("-m objectcache bench aggregate --states dram --transports ucx,shm --peers none --runs 9"),
    "descriptor-n3584": Run(
        "-m objectcache bench aggregate -N 3584 -S 256 -G 16 --states dram --transports shm --peers none"
    ),
    "concurrency": Run("-m objectcache bench concurrency", "concurrency.png"),
    "growth": Run("-m objectcache bench growth --folder /dev/shm", "growth.png"),
    "replacing": Run("-m objectcache bench replacing", "replacing.png"),
    "ladder": Run("-m objectcache bench ladder", "ladder"),
    "scheduler-live": Run("-m objectcache bench scheduler --parts live --time-scale 0.5", "."),
    "scheduler-cost": Run("-m objectcache bench scheduler --parts cost"),
    "scheduler-simulated": Run("-m objectcache bench scheduler --parts simulation,random,trace,scale", "."),
    "ttft": Run("-m objectcache bench ttft --runs 3", "ttft"),
    "ttft-4k-at-once": Run("-m objectcache bench ttft --figures 13 --contexts 4K -G 64 --gather-s 0"),
    "ttft-64k-page-cache": Run(f"{UNSCALED} --state page_cache"),
    "ttft-64k-cold": Run(f"{UNSCALED} --state cold"),
    "overlap": Run("-m objectcache bench overlap --transport shm", "overlap.png"),
    "engine": Run("-m objectcache bench engine --runs 7", "engine.png"),
    "engine-advised": Run("-m objectcache bench engine --advised --contexts 4K --hits 87.5 --runs 7"),
    "engine-tier": Run("-m objectcache bench engine --tier --contexts 2K,4K,8K,16K --hits 98.4375 --runs 7"),
    "engine-beside": Run("-m objectcache bench engine --beside --contexts 8K --hits 96.875 --runs 5"),
    "lmcache": Run("-m objectcache bench lmcache", "lmcache.png"),
    "engine-stated": Run("-m objectcache bench engine --stated --contexts 4K --runs 7"),
    "s3": Run("-m objectcache bench s3 --seconds 0.5"),
    "tiers": Run("-m objectcache bench tiers", "."),
    "tiers-ablation": Run("-m objectcache bench tiers --parts table_5"),
    "upstream": Run(f"-m objectcache bench upstream {MOTO}", "upstream.png"),
    "orchestrator": Run("-m objectcache bench orchestrator --parts model,cost,simulated", "orchestrator.png"),
    "orchestrator-shared": Run("-m objectcache bench orchestrator --parts shared --folder /dev/shm"),
    "orchestrator-live": Run("-m objectcache bench orchestrator --parts live,serving --folder /dev/shm"),
    "compression": Run("-m objectcache bench compression --parts codecs,wire,decision"),
    "compression-engine": Run("-m objectcache bench compression --parts engine --folder /dev/shm"),
    "compression-live": Run("-m objectcache bench compression --parts live --runs 7 --folder /dev/shm"),
    "compression-quality": Run("-m objectcache bench compression --parts quality,figure_2", "compression.png"),
    "compression-real": Run("-m objectcache bench compression --parts real"),
    "compression-gpu": Run("-m objectcache bench compression --parts device --runs 9", needs_gpu=True),
    "ttft-gpu": Run("-m objectcache bench ttft --device cuda --contexts 4K,64K --hits 50,87.5 -G 64", needs_gpu=True),
    "recompute-gpu": Run(
        "-m objectcache bench recompute --models llama-3.1-8b,deepseek-r1-7b -G 16,512",
        "recompute.png",
        needs_gpu=True,
    ),
    "copies-gpu": Run("-m objectcache bench copies", needs_gpu=True),
    "cluster": Run("-m objectcache bench cluster", "cluster.png"),
    "crash": Run("-m tests.faults.crash --rounds 200"),
    "cluster-faults": Run("-m tests.faults.cluster_faults"),
    "calibrate": Run("-m objectcache calibrate theta", "calibrate.png"),
    "demo": Run("-m objectcache demo --plot out/demo-timeline.png"),
}


def main(arguments: Sequence[str]) -> int:
    """0: done. 1: a measurement failed, or met wrong bytes. 2: the checkout has changes."""
    parser = argparse.ArgumentParser(prog="python -m bench.results", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(RUNS)}; default: all")
    parser.add_argument("--list", action="store_true", help="how old the published results are")
    parser.add_argument("--publish", action="store_true", help="put what was measured into docs")
    options = parser.parse_args(arguments)
    names = options.names or list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"no such result: {', '.join(sorted(unknown))}")
    if options.list:
        for name in names:
            print(f"{name:24}{described(RESULTS / f'{name}.json')}")
        return 0
    if options.publish:
        return publish(names)
    if describe_commit()["has_local_changes"] is not False:
        print("bench.results: the checkout has changes: commit them first", file=sys.stderr)
        return 2
    MEASURED.mkdir(parents=True, exist_ok=True)
    return max(measure(name) for name in names)


def described(file: Path) -> str:
    """The commit of a result, and how many files other than documents have changed since. The commit may have been
    written again since, so it is looked for by its tree.
    """
    result = _read(file)
    if result is None:
        return "not measured"
    tree = str(result.get("tree") or result["commit"])
    changed = subprocess.run(
        ["git", "diff", "--name-only", tree, "HEAD", "--", ".", ":!docs", ":!*.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    since = f"{len(changed.stdout.split())} files changed since" if changed.returncode == 0 else "not in this history"
    return f"{str(result['commit'])[:7]}, {since}"


def measure(name: str) -> int:
    """Measure one result, unless it is there; 1 where that fails."""
    run, file = RUNS[name], MEASURED / f"{name}.json"
    measured = _read(file)
    if measured is not None and measured.get("tree") == describe_commit()["tree"]:
        print(f"{name}: measured already", flush=True)
        return 0
    if run.needs_gpu and not has_gpu():
        print(f"{name}: needs a GPU, and there is none: not measured", flush=True)
        return 0
    command = [sys.executable, *run.command.split(), "--json", str(file)]
    if run.chart is not None:
        is_file = run.chart.endswith(".png")
        command += ["--plot", str(MEASURED / (f"{name}.png" if is_file else name))]
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return min(1, subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode)


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


def publish(names: Sequence[str]) -> int:
    """Copy results and charts; 1 where one has wrong bytes or is of a checkout with changes."""
    for name in names:
        result = _read(MEASURED / f"{name}.json")
        if result is None:
            continue
        if result.get("has_local_changes") or result.get("problem") is not None or result.get("failure") is not None:
            print(f"{name}: not published: of a changed checkout, or wrong", file=sys.stderr)
            return 1
        shutil.copy(MEASURED / f"{name}.json", RESULTS)
        chart = RUNS[name].chart
        if chart is not None:
            _copy_charts(name, chart)
    return write_figures([])


def _copy_charts(name: str, chart: str) -> None:
    if chart.endswith(".png"):
        shutil.copy(MEASURED / f"{name}.png", IMAGES / chart)
    else:
        shutil.copytree(MEASURED / name, IMAGES / chart, dirs_exist_ok=True)


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
