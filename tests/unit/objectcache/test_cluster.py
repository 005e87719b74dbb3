"""A storage server's part in a cluster, as its options and its config file have it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from objectcache.cli.cluster import own_keys
from objectcache.cli.config import Config
from storage_server.home.own_keys import SETTLE_S
from storage_server.settings import StorageSettings, UpstreamSettings


@pytest.mark.parametrize(("lease_s", "settle_s"), [(2, SETTLE_S), (10, SETTLE_S), (60, 90.0)])
async def test_copies_are_trusted_only_when_each_lease_of_before_has_ended(
    tmp_path: Path, lease_s: int, settle_s: float
) -> None:
    options = Namespace(cluster="etcd://127.0.0.1:1/kv", name="a", weight=1.0, data=tmp_path)
    config = Config.model_validate({"internals": {"cluster": {"lease_s": lease_s}}})
    upstream = UpstreamSettings("http://127.0.0.1:1", "key", "secret")
    own = own_keys(options, config, StorageSettings(tmp_path, upstream=upstream))
    assert own is not None
    assert own.settle_s == settle_s
