"""Imports point one way, and decisions know no input or output (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.tree import repository

ROOT = repository()
ADAPTERS, CODECS, ORCHESTRATOR = "objectcache.adapters", "objectcache.kv_codecs", "objectcache.orchestrator"
CALIBRATION, COMMAND, DEMO = "objectcache.calibration", "objectcache.cli", "objectcache.demo"
PRODUCT = {
    "descriptors", "gateway", "nixl_client", "storage_server", "objectcache", ADAPTERS, CODECS, ORCHESTRATOR,
    CALIBRATION, COMMAND, DEMO,
}  # fmt: skip
OURS = {*PRODUCT, "bench"}
MAY_IMPORT = {
    "descriptors": set(),
    ADAPTERS: {"descriptors"},
    "gateway": {"descriptors", ADAPTERS, CODECS},
    CODECS: {ADAPTERS},
    "storage_server": {"descriptors", ADAPTERS, CODECS},
    "nixl_client": {"descriptors", ADAPTERS, CODECS},
    ORCHESTRATOR: {"descriptors", ADAPTERS, "nixl_client"},
    CALIBRATION: {"descriptors", ADAPTERS, "nixl_client", "storage_server", CODECS},
    DEMO: {"descriptors", ADAPTERS, "nixl_client", CALIBRATION},
    COMMAND: PRODUCT - {"objectcache"},
    "objectcache": {"descriptors", "nixl_client", COMMAND},
}
STAGES = {
    "storage_server": (
        "planning", "delivery/scheduler", "cache/policies", "settings", "delivery/gather", "kernel", "cache", "home",
        "agents", "delivery", "moves", "service",
    ),
    "gateway": (
        "s3", "settings", "trace", "metrics", "recent", "pages", "body", "form_upload", "storage_client", "cluster",
        "call", "operations", "handlers", "app",
    ),
    ORCHESTRATOR: (
        "rules", "settings", "simulation", "answers", "body_pieces", "under_way", "receipts", "sayings", "events_feed",
        "engine_calls", "engine_watchers", "engine_blocks", "engine", "roster", "tokenizer", "reading_process",
        "readers", "tokens", "store_lookups", "metadata_file", "metadata_blocks", "metadata",
        "registry", "restoring", "writing", "response_cache", "gate",
        "relay", "router", "orders", "access", "bodies", "exchange", "passing_on", "dispatch", "meter",
        "token_checks", "waiting_for_engines", "fleet", "prefill", "service", "answering", "administration",
        "pages", "app", "process",
    ),
    "nixl_client": (
        "options", "lossy", "transports", "session", "fetch", "objects", "client", "device_tier", "connectors",
    ),
}  # fmt: skip
"""The rooms of a package, front to back: none imports a later one."""
PURE_FOLDERS = (
    "descriptors",
    "gateway/s3",
    "storage_server/planning",
    "storage_server/delivery/scheduler",
    "storage_server/cache/policies",
    *(
        str(path.relative_to(ROOT))
        for top in ("objectcache", "storage_server", "nixl_client")
        for path in (ROOT / top).rglob("rules")
    ),
    "objectcache/kv_codecs",
)
PURE_MODULES = (
    "objectcache/adapters/breaker.py",
    "objectcache/adapters/deadlines.py",
    "objectcache/adapters/nixl_memory.py",
    "objectcache/adapters/nixl_metadata.py",
    "objectcache/adapters/reading_pace.py",
    "objectcache/adapters/slow_bodies.py",
    "objectcache/calibration/compute/cost_model.py",
    "objectcache/calibration/compute/shapes.py",
    "objectcache/calibration/content.py",
    "objectcache/calibration/fitting.py",
    "objectcache/calibration/knee.py",
    "objectcache/calibration/link.py",
    "objectcache/calibration/form_losses.py",
    "objectcache/calibration/intervals.py",
    "objectcache/calibration/shown_quality.py",
    "objectcache/calibration/text.py",
    "objectcache/calibration/theta.py",
    "gateway/cluster/forms.py",
    "gateway/cluster/hedging.py",
    "gateway/cluster/split.py",
    "objectcache/adapters/document_budget.py",
    "gateway/recent.py",
    "gateway/settings.py",
    "nixl_client/connectors/compute_fit.py",
    "nixl_client/connectors/late.py",
    "nixl_client/connectors/lmcache/chunks.py",
    "nixl_client/connectors/vllm/grid.py",
    "nixl_client/connectors/vllm/ledger.py",
    "nixl_client/connectors/vllm/naming.py",
    "nixl_client/connectors/vllm/steps.py",
    "nixl_client/connectors/vllm/worker_ledger.py",
    "nixl_client/fetch/delivery_state.py",
    "nixl_client/options.py",
    "nixl_client/connectors/vllm/published.py",
    "objectcache/cli/banner.py",
    "objectcache/cli/config_errors.py",
    "objectcache/cli/config_former.py",
    "objectcache/cli/config_memory.py",
    "objectcache/cli/config_reference.py",
    "objectcache/cli/config_text.py",
    "objectcache/orchestrator/response_cache.py",
    "objectcache/orchestrator/simulation.py",
    "storage_server/settings.py",
)
"""Pure modules that stand beside what carries their decisions out."""
IMPURE_MODULES = {"aiohttp", "asyncio", "boto3", "http", "os", "socket", "sqlite3", "subprocess", "threading", "time"}


def files_of(place: str) -> list[Path]:
    """The modules of a path, or of a package by its name without those of packages within it."""
    where = ROOT / place
    if where.is_file():
        return [where]
    files = (ROOT / place.replace(".", "/")).rglob("*.py")
    return sorted(path for path in files if place not in PRODUCT or package_of(module_of(path)) == place)


def package_of(module: str) -> str:
    """The package of ours that a module is of; another module's first name."""
    found = [package for package in OURS if module == package or module.startswith(f"{package}.")]
    return max(found, key=len, default=module.partition(".")[0])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its name."""
    tops = {package.partition(".")[0] for package in OURS}
    return {module_of(path): path for top in tops for path in (ROOT / top).rglob("*.py")}


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules, ours by their full names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in modules() else node.module for name in whole}
    return frozenset(names)


def reached(module: str) -> Iterator[tuple[str, ...]]:
    """A way to every module of ours that importing this one imports, itself first."""
    seen, ways = {module}, [(module,)]
    while ways:
        way = ways.pop()
        yield way
        for name in sorted(imported(modules()[way[-1]])):
            if name in modules() and name not in seen:
                seen.add(name)
                ways.append((*way, name))


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_process_packages_import_the_shared_language_and_never_each_other(package: str) -> None:
    """So that a process can be read, tested and replaced without the others."""
    for path in files_of(package):
        others = {package_of(name) for name in imported(path)} & OURS - {package}
        assert others <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {others - MAY_IMPORT[package]}"


@pytest.mark.parametrize("package", sorted(PRODUCT))
def test_the_product_does_without_benchmarks(package: str) -> None:
    """They are not in its wheel, so that no function may import them either when it is called."""
    for path in files_of(package):
        assert not {name.partition(".")[0] for name in imported(path)} & {"bench"}, path.relative_to(ROOT)


@pytest.mark.parametrize("package", sorted(PRODUCT))
def test_processes_that_are_started_import_nothing_from_the_folder_they_are_in(package: str) -> None:
    """`python -m` looks into the current folder first, where others may have put a module of any name; -P does not."""
    for path in files_of(package):
        for found in re.finditer(r"sys\.executable,\s*(\S+)", path.read_text()):
            assert found[1] == '"-P",', f"{path.relative_to(ROOT)}: {found[0]}"


def test_descriptors_need_only_the_standard_library_numpy_and_pydantic() -> None:
    """The shared language must not drag a framework into anyone who speaks it."""
    for path in files_of("descriptors"):
        tops = {name.partition(".")[0] for name in imported(path)} - {"descriptors"}
        assert tops <= sys.stdlib_module_names | {"numpy", "pydantic", "pydantic_core"}, path.name


@pytest.mark.parametrize("place", [*PURE_FOLDERS, *PURE_MODULES])
def test_decisions_know_no_socket_file_thread_or_clock(place: str) -> None:
    """Nor does anything that they import, however far away. Time is an argument, so exact numbers can be tested."""
    for path in files_of(place):
        for way in reached(module_of(path)):
            tops = {name.partition(".")[0] for name in imported(modules()[way[-1]])}
            assert not tops & IMPURE_MODULES, f"{' imports '.join(way)} imports {tops & IMPURE_MODULES}"


def says_pure(module: str) -> bool:
    """Whether the docstring says "Pure" without an exception."""
    text = " ".join((ast.get_docstring(ast.parse(modules()[module].read_text())) or "").split())
    return re.search(r"\bPure\b(?! but)", text) is not None


@pytest.mark.slow
def test_a_module_that_says_that_it_is_pure_is_held_to_it() -> None:
    """Otherwise its docstring goes on to say so after an import has made it untrue. Benches are held to nothing."""
    held = {module_of(path) for place in (*PURE_FOLDERS, *PURE_MODULES) for path in files_of(place)}
    saying = {name for name in modules() if name.partition(".")[0] != "bench" and says_pure(name)}
    assert saying - held == set()


def stage_of(package: str, module: str) -> str:
    """The stage that names the module most closely: a room may have an inner one that comes before it."""
    rest = module.removeprefix(f"{package}.").replace(".", "/")
    found = [stage for stage in STAGES[package] if rest == stage or rest.startswith(f"{stage}/")]
    assert found, f"{module} is in no stage"
    return max(found, key=len)


@pytest.mark.parametrize("package", sorted(STAGES))
def test_later_rooms_are_not_imported_by_earlier_ones(package: str) -> None:
    """The package is read front to back; every module is in one of its rooms."""
    stages = STAGES[package]
    rooms = {package, *(f"{package}.{stage.rpartition('/')[0]}" for stage in stages if "/" in stage)}
    for path in files_of(package):
        module = module_of(path)
        if module in rooms:
            continue
        position = stages.index(stage_of(package, module))
        for name in imported(path):
            if name in modules() and name.startswith(f"{package}.") and name not in rooms:
                later = stages.index(stage_of(package, name))
                assert later <= position, f"{module} ({stages[position]}) imports {name} ({stages[later]})"


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others() -> None:
    """Raises CycleError, which names the modules."""
    graph = {name: {other for other in imported(path) if other in modules()} for name, path in modules().items()}
    TopologicalSorter(graph).prepare()
