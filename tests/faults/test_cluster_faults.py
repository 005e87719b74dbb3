"""Two cells of the matrix; `make cluster-faults` runs all of them."""

from __future__ import annotations

import shutil

import pytest

from tests.faults.cluster_faults import Fault, Moment, Role, run
from tests.support.networks import NoNetworksError

SOME = {
    (Moment.HTTP, Role.GATEWAY, Fault.KILLED),
    (Moment.PUT, Role.STORAGE_SERVER, Fault.KILLED),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_keeps_its_promises_when_servers_are_killed() -> None:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    try:
        found = run((Fault.KILLED,), lambda *cell: cell in SOME)
    except NoNetworksError as error:
        pytest.skip(str(error))
    assert len(found) == 2
