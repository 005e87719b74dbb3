"""The `objectcache bench` command: one sub-command for each experiment."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from bench.experiments.aggregate.run import AGGREGATE
from bench.experiments.concurrency import CONCURRENCY
from bench.experiments.engine.run import ENGINE
from bench.experiments.growth import GROWTH
from bench.experiments.lmcache import LMCACHE_CHUNKS
from bench.experiments.s3.run import S3
from bench.experiments.sglang import SGLANG_PAGES
from bench.experiments.upstream import UPSTREAM
from bench.paper.cluster.run import CLUSTER
from bench.paper.compression.replacing import REPLACING
from bench.paper.compression.run import COMPRESSION
from bench.paper.device.copies import COPIES
from bench.paper.device.recompute import RECOMPUTE
from bench.paper.ladder.run import LADDER
from bench.paper.orchestrator.run import ORCHESTRATOR
from bench.paper.overlap.run import OVERLAP
from bench.paper.scheduler.run import SCHEDULER
from bench.paper.tiers.run import TIERS
from bench.paper.ttft.run import TTFT

EXPERIMENTS = (
    AGGREGATE, S3, LADDER, CONCURRENCY, SCHEDULER, TIERS, UPSTREAM, CLUSTER, ORCHESTRATOR, COMPRESSION, TTFT, OVERLAP,
    RECOMPUTE, COPIES, ENGINE, SGLANG_PAGES, LMCACHE_CHUNKS, GROWTH, REPLACING,
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark; its exit status: 0 done and every byte right, 1 failed, 2 wrong use."""
    parser = argparse.ArgumentParser(
        prog="objectcache bench", description="Measure; each figure comes with what it is a ratio of."
    )
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for experiment in EXPERIMENTS:
        experiment.add(commands)
    for benchmark in commands.choices.values():
        benchmark.usage = f"{benchmark.prog} [options]"
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are ended on the way out
    status: int = options.command(options)
    return status
