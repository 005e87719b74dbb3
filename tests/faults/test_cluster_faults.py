"""A few cells of the matrix; `make cluster-faults` runs all of them."""

from __future__ import annotations

import shutil

import pytest

from tests.faults.cluster_faults import Fault, Moment, Role, run
from tests.support.networks import NoNetworksError

SOME = {
    (Moment.HTTP, Role.GATEWAY, Fault.KILLED),
    (Moment.UCX, Role.STORAGE_SERVER, Fault.STOPPED),
    (Moment.PUT, Role.STORAGE_SERVER, Fault.KILLED),
    (Moment.JOIN, Role.ETCD, Fault.STOPPED),
    (Moment.HTTP, Role.STORAGE_SERVER, Fault.CUT_OFF),
    (Moment.PUT, Role.HOME, Fault.CUT_OFF),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_a_cluster_keeps_its_promises_whoever_fails(fault: Fault) -> None:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    try:
        found = run((fault,), lambda *cell: cell in SOME)
    except NoNetworksError as error:
        pytest.skip(str(error))
    assert len(found) == 2
