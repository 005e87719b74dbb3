"""How far deliveries are: layers in time and late, stalls, and what is told of many deliveries."""

from __future__ import annotations

from descriptors.notices import Mode
from descriptors.status import DELIVERIES_MAX, ENDED_MAX
from storage_server.delivery.progress import Deliveries, Progress


def progress(name: str = "r") -> Progress:
    return Progress(name, "bucket", "shm", 1_000.0, 10.0)


def test_a_layer_is_late_where_the_client_has_computed_all_before_it() -> None:
    """A layer takes 2 s to compute. The second comes 1 s before it is needed, the third 3 s after, the last at once."""
    delivery = progress()
    delivery.planned(Mode.LAYER_MAJOR, 4, 400, 2.0)
    for now_s in (11.0, 12.0, 18.0, 18.0):
        delivery.group_sent(now_s)
    told = delivery.status(20.0)
    assert (told.groups, told.stalled_s) == ("rrlr", 3.0)
    assert (told.elapsed_s, told.outcome, told.group_count) == (10.0, "", 4)


def test_nobody_knows_stalls_without_a_compute_time() -> None:
    delivery = progress()
    delivery.planned(Mode.LAYER_MAJOR, 2, 400, None)
    delivery.group_sent(11.0)
    delivery.group_sent(500.0)
    assert (delivery.status(500.0).groups, delivery.status(500.0).stalled_s) == ("rr", None)


def test_chunks_are_not_waited_for_one_by_one() -> None:
    delivery = progress()
    delivery.planned(Mode.CHUNK_MAJOR, 1, 400, 0.1)
    delivery.group_sent(500.0)
    assert (delivery.status(500.0).groups, delivery.status(500.0).stalled_s) == ("r", 0.0)


def test_a_delivery_that_has_ended_keeps_its_time() -> None:
    delivery = progress()
    delivery.ended("done", 12.5)
    assert (delivery.status(900.0).elapsed_s, delivery.status(900.0).outcome) == (2.5, "done")


def test_the_latest_are_told_those_under_way_first() -> None:
    deliveries = Deliveries()
    for index in range(2 * ENDED_MAX):
        with deliveries.running(progress(f"ended {index}")):
            pass
    with deliveries.running(progress("first")), deliveries.running(progress("second")):
        names = [each.request_id for each in deliveries.status(11.0)]
    assert names[:3] == ["second", "first", f"ended {2 * ENDED_MAX - 1}"]
    assert len(names) == 2 + ENDED_MAX


def test_a_status_tells_a_bounded_number() -> None:
    deliveries = Deliveries()
    held = [deliveries.running(progress(str(index))) for index in range(2 * DELIVERIES_MAX)]
    for each in held:
        each.__enter__()
    assert len(deliveries.status(11.0)) == DELIVERIES_MAX
