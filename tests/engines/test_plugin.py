"""vLLM finds the connector and the tier by their names alone, where the wheel is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engines.environment import engine_python, engine_variables
from tests.integration.test_wheel import installed_wheel

pytestmark = [pytest.mark.environments, pytest.mark.timeout(300)]
SCRIPT = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm import plugins
for _ in range(2):  # each process of vLLM may load them, and more than once
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
found = KVConnectorFactory.get_connector_class_by_name("ObjectCacheConnector")
print(found.__module__, found.__name__)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
print(OffloadingSpecFactory.get_spec_cls({"spec_name": "ObjectCacheTieringSpec"}).__name__)
print(SecondaryTierFactory.get_tier_class({"type": "ObjectCacheTier"}).__name__)
import nixl_client
print(nixl_client.__file__)
"""


def test_the_wheel_brings_the_connectors_name(tmp_path: Path) -> None:
    target = installed_wheel(tmp_path)
    environment = {**os.environ, **engine_variables(), "PYTHONPATH": str(target)}
    done = subprocess.run(
        [str(engine_python()), "-P", "-c", SCRIPT],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    connector, spec, tier, file = done.stdout.strip().splitlines()[-4:]
    assert (spec, tier) == ("ObjectCacheTieringSpec", "ObjectCacheTier")
    assert connector == "nixl_client.connectors.vllm.connector ObjectCacheConnector"
    assert file == str(target / "nixl_client" / "__init__.py")
