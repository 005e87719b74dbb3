"""Imports point one way (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"adapters", "bench", "demo", "descriptors", "gateway", "nixl_client", "objectcache", "storage_server"}
MAY_IMPORT = {
    "descriptors": set(),
    "adapters": {"descriptors"},
    "gateway": {"descriptors", "adapters"},
    "storage_server": {"descriptors", "adapters"},
    "nixl_client": {"descriptors", "adapters"},
    "objectcache": OURS - {"demo", "nixl_client"},
}
PURE = (
    "descriptors",
    "gateway/addressing.py",
    "gateway/aws_chunked.py",
    "gateway/conditions.py",
    "gateway/copy_headers.py",
    "gateway/credentials.py",
    "adapters/deadlines.py",
    "gateway/markup.py",
    "gateway/object_headers.py",
    "gateway/parameters.py",
    "gateway/payload_form.py",
    "gateway/request.py",
    "gateway/routing.py",
    "gateway/settings.py",
    "gateway/sigv4.py",
    "gateway/tags.py",
    "gateway/upload.py",
    "gateway/xml.py",
    "gateway/xml_in.py",
    "gateway/xml_lifecycle.py",
    "gateway/xml_tree.py",
    "gateway/xml_uploads.py",
    "nixl_client/connectors/given_options.py",
    "nixl_client/connectors/lmcache/naming.py",
    "nixl_client/connectors/lmcache/plan.py",
    "nixl_client/connectors/vllm/ledger.py",
    "nixl_client/connectors/vllm/naming.py",
    "nixl_client/connectors/vllm/plan.py",
    "nixl_client/connectors/vllm/steps.py",
    "nixl_client/connectors/vllm/store_book.py",
    "nixl_client/ledger.py",
    "storage_server/agents.py",
    "storage_server/gather/plan.py",
    "storage_server/gather/rows.py",
    "storage_server/put_plan.py",
    "storage_server/scheduler/chunkwise.py",
    "storage_server/scheduler/deadline_queue.py",
    "storage_server/scheduler/demand.py",
    "storage_server/scheduler/equal_share.py",
    "storage_server/scheduler/flow.py",
    "storage_server/scheduler/held_rates.py",
    "storage_server/scheduler/link_schedule.py",
    "storage_server/scheduler/mode.py",
    "storage_server/scheduler/policies.py",
    "storage_server/scheduler/pool.py",
    "storage_server/scheduler/profiles.py",
    "storage_server/scheduler/round_robin.py",
    "storage_server/scheduler/serial.py",
    "storage_server/scheduler/settings.py",
    "storage_server/scheduler/slack.py",
    "storage_server/scheduler/slack_plan.py",
    "storage_server/scheduler/slack_steps.py",
    "storage_server/scheduler/steady_clock.py",
    "storage_server/scheduler/tenant_meter.py",
    "storage_server/store/block_checksums.py",
    "storage_server/store/body_hashes.py",
    "storage_server/store/compaction_plan.py",
    "storage_server/store/listing.py",
    "storage_server/store/reading.py",
    "storage_server/store/rows.py",
    "storage_server/tiers/residency.py",
)
IMPURE_MODULES = {"aiohttp", "asyncio", "boto3", "http", "os", "socket", "sqlite3", "subprocess", "threading", "time"}
STORAGE_STAGES = [
    "store",
    "tiers",
    "gather",
    "scheduler",
    "transport",
    "registrar",
    "pipeline",
    "object_moves",
    "object_transfers",
    "service",
    "http_api",
]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_process_packages_import_the_shared_language_and_never_each_other(package: str) -> None:
    """So that a process can be read, tested and replaced without the others."""
    for path in (ROOT / package).rglob("*.py"):
        tops = {name.partition(".")[0] for name in imported(path)} & OURS - {package}
        assert tops <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {tops - MAY_IMPORT[package]}"


def test_descriptors_need_only_the_standard_library_numpy_and_pydantic() -> None:
    """The shared language must not drag a framework into anyone who speaks it."""
    for path in (ROOT / "descriptors").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imported(path)} - {"descriptors"}
        assert tops <= sys.stdlib_module_names | {"numpy", "pydantic", "pydantic_core"}, path.name


@pytest.mark.parametrize("place", PURE)
def test_decisions_know_no_socket_file_thread_or_clock(place: str) -> None:
    """Time is an argument; what is pure can be tested with exact numbers."""
    where = ROOT / place
    for path in [where] if where.is_file() else where.rglob("*.py"):
        tops = {name.partition(".")[0] for name in imported(path)}
        assert not tops & IMPURE_MODULES, f"{path.relative_to(ROOT)} imports {tops & IMPURE_MODULES}"


def test_later_stages_of_the_storage_server_are_not_imported_by_earlier_ones() -> None:
    """The pipeline is read front to back."""
    for position, stage in enumerate(STORAGE_STAGES):
        where = ROOT / "storage_server" / stage
        files = list(where.rglob("*.py")) if where.is_dir() else [where.with_suffix(".py")]
        later = {f"storage_server.{name}" for name in STORAGE_STAGES[position + 1 :]}
        for path in files:
            wrong = {name for name in imported(path) if any(name == x or name.startswith(f"{x}.") for x in later)}
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"
