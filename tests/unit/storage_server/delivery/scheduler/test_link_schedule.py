"""Both sides of a link on a played clock: caps, weights, channels, priorities, and what one leaves to the other."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.delivery.scheduler.chunkwise import IDLE_S, OLDEST_EACH, Chunkwise
from storage_server.delivery.scheduler.demand import Demand
from storage_server.delivery.scheduler.flow import AHEAD_MAX, Flow, LinkTenant
from storage_server.delivery.scheduler.held_rates import HeldRates
from storage_server.delivery.scheduler.link_schedule import LinkSchedule
from storage_server.delivery.scheduler.policies import Policy
from storage_server.delivery.scheduler.pool import PoolSettings
from storage_server.delivery.scheduler.serial import CATCH_UP_S
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.delivery.scheduler.tenant_meter import TenantMeter
from tests.support.scheduling import layers_of

RATE = 1e8
PAYLOAD = 100_000
PAYLOAD_S = PAYLOAD / RATE
FRACTION = 0.2
MOVES_MAX = 100_000
SLACK = PoolSettings(gather_s=0.0)
HELD = PoolSettings(Policy.EQUAL, gather_s=0.0, epoch_s_max=0.5)
CONSERVING = PoolSettings(Policy.EQUAL, is_work_conserving=True, gather_s=0.0)
every = pytest.mark.parametrize("pool", [SLACK, HELD, CONSERVING], ids=["slack", "held", "work-conserving"])
A, B = LinkTenant("A"), LinkTenant("B")


class Played:
    """A link on a played clock. Clients in `stopped` take nothing; all others take what goes to them at once."""

    def __init__(self, pool: PoolSettings = SLACK, channels: int = 64) -> None:
        some = SchedulerSettings(RATE, pool, chunkwise_fraction=FRACTION, chunkwise_deliveries_max=channels)
        self.schedule = LinkSchedule(some, RATE)
        self.now = 0.0
        self.sent: defaultdict[Flow, list[float]] = defaultdict(list)
        self.ended: list[Flow] = []
        self.stopped: set[Flow] = set()
        self._count = 0

    def chunkwise(self, tenant: LinkTenant, payloads: int = 1, *, stops: bool = False) -> Flow:
        """A request comes."""
        return self._join(tenant, Demand(PAYLOAD * payloads, 1), (PAYLOAD,) * payloads, stops, is_chunkwise=True)

    def layerwise(self, tenant: LinkTenant, layers: int, *, stops: bool = False) -> Flow:
        """A request comes."""
        return self._join(tenant, Demand(PAYLOAD, layers, 0.001), (PAYLOAD,), stops, is_chunkwise=False)

    def run(self, until_s: float = 1e9) -> None:
        """Play until then, or until nothing is under way."""
        for _ in range(MOVES_MAX):
            wake_s = self.schedule.wake_at()
            if wake_s > until_s or wake_s == math.inf:
                self.now = max(self.now, until_s)
                return
            self.now = max(self.now, wake_s)
            for flow in self.schedule.due(self.now):
                self.sent[flow].append(self.now)
                if flow.is_over:
                    self.ended.append(flow)
                if flow not in self.stopped:
                    self.schedule.note_sent(flow, self.now)
        raise AssertionError("it never ends")

    def read(self, flow: Flow) -> None:
        """The client reads again."""
        self.stopped.discard(flow)
        while flow.ahead_count:
            self.schedule.note_sent(flow, self.now)

    def bytes_of(self, *flows: Flow, begin_s: float = -math.inf) -> int:
        """What has gone of these since then."""
        return sum(PAYLOAD for flow in flows for at_s in self.sent[flow] if at_s > begin_s)

    def _join(
        self, tenant: LinkTenant, demand: Demand, payloads: tuple[int, ...], stops: bool, *, is_chunkwise: bool
    ) -> Flow:
        self._count += 1
        layers = layers_of(payloads, demand.layer_count)
        flow = Flow(self._count, tenant, demand, layers, self.now, is_chunkwise=is_chunkwise)
        if stops:
            self.stopped.add(flow)
        self.schedule.join(flow, self.now)
        return flow


def test_a_cap_holds_for_chunk_major_deliveries() -> None:
    """While the link is idle, for all of the tenant's requests together, and from the first payload on."""
    played, cap = Played(), 1e6
    flows = [played.chunkwise(LinkTenant("A", rate_max_bytes_per_s=cap), 100) for _ in range(3)]
    played.run(10.0)
    times = sorted(at_s for flow in flows for at_s in played.sent[flow])
    for first in range(len(times)):
        for last in range(first, len(times)):
            assert (last - first) * PAYLOAD <= cap * (times[last] - times[first] + CATCH_UP_S) + 1
    assert played.bytes_of(*flows) >= cap * 10.0 - PAYLOAD
    played.run()
    assert played.bytes_of(*flows) == 300 * PAYLOAD


def test_a_tenant_with_a_cap_that_is_used_up_holds_no_channel() -> None:
    """Others are as fast as without it, but for what it may send, and it ends all the same."""
    capped = LinkTenant("A", rate_max_bytes_per_s=1e6)
    played = Played(channels=2)
    slow = [played.chunkwise(capped, 5) for _ in range(5)]
    played.run(0.01)
    others = [played.chunkwise(B, 50) for _ in range(4)]
    played.run(0.3)
    assert played.ended[:4] == others
    assert max(played.sent[others[-1]]) <= 0.01 + 200 * PAYLOAD_S + 4 * PAYLOAD_S
    played.run()
    assert set(played.ended) == {*slow, *others}


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_tenants_weight_is_split_among_its_chunk_major_requests(weight: float) -> None:
    """However many they are, tenants share by weight, and the requests of one share evenly."""
    played = Played()
    many = [played.chunkwise(LinkTenant("A", weight), 1000) for _ in range(10)]
    one = played.chunkwise(B, 1000)
    played.run(0.4)
    assert played.bytes_of(*many) == pytest.approx(weight * played.bytes_of(one), abs=2 * weight * PAYLOAD)
    each = [played.bytes_of(flow) for flow in many]
    assert max(each) - min(each) <= 2 * PAYLOAD


def test_what_a_stopped_request_does_not_use_goes_to_its_tenants_others() -> None:
    played = Played()
    played.chunkwise(A, 1000, stops=True)
    reads, other = played.chunkwise(A, 1000), played.chunkwise(B, 1000)
    played.run(0.5)
    assert abs(played.bytes_of(reads) - played.bytes_of(other)) <= 3 * PAYLOAD


def test_channels_go_to_tenants_in_turn_and_to_a_tenants_requests_in_order() -> None:
    played = Played(channels=1)
    first, second, third = (played.chunkwise(A) for _ in range(3))
    other = played.chunkwise(B)
    played.run()
    assert played.ended == [first, second, other, third]


@pytest.mark.parametrize("priority", [0, 1])
def test_a_tenant_that_has_all_channels_makes_room_for_one_that_has_none(priority: int) -> None:
    """A tenant gives a channel up unless its priority is higher. The request that lost its channel goes on later."""
    played = Played(channels=4)
    many = [played.chunkwise(LinkTenant("A", priority=priority), 100) for _ in range(8)]
    played.run(0.01)
    one = played.chunkwise(B, 50)
    played.run()
    if priority:
        assert played.ended.index(one) >= 4
    else:
        assert played.ended[0] is one
        assert played.sent[one][-1] == pytest.approx(0.01 + 100 * PAYLOAD_S, abs=4 * PAYLOAD_S)
    assert set(played.ended) == {*many, one}


def test_higher_priority_has_channels_first_and_nobody_waits_for_ever() -> None:
    """One channel in `OLDEST_EACH` goes to the request that has waited longest."""
    played = Played(channels=1)
    low = [played.chunkwise(A) for _ in range(3)]
    high = [played.chunkwise(LinkTenant("HIGH", priority=7)) for _ in range(3 * OLDEST_EACH)]
    played.run()
    places = [played.ended.index(flow) for flow in low]
    assert places[0] == 0
    assert places[1:] == [OLDEST_EACH - 1, 2 * OLDEST_EACH - 1]
    assert [flow for flow in played.ended if flow in high] == high


def test_a_client_that_does_not_read_gives_its_channel_up() -> None:
    """After `IDLE_S` to the moment, and no sooner."""
    played = Played(channels=1)
    stopped, other = played.chunkwise(A, 10, stops=True), played.chunkwise(A)
    played.run(1.0)
    behind_s = AHEAD_MAX * PAYLOAD_S
    assert played.sent[stopped] == pytest.approx([PAYLOAD_S, behind_s])
    assert played.sent[other] == pytest.approx([behind_s + IDLE_S + PAYLOAD_S])
    assert (played.schedule.chunkwise_active_count, played.schedule.chunkwise_queued_count) == (0, 1)


def test_a_client_that_reads_again_is_the_first_of_its_tenant_to_get_a_channel() -> None:
    played = Played(channels=1)
    stopped = played.chunkwise(A, 10, stops=True)
    played.run(0.1)
    busy, waits = played.chunkwise(A, 100), played.chunkwise(A)
    played.run(0.15)
    played.read(stopped)
    played.run()
    assert played.ended == [busy, stopped, waits]


def test_a_client_that_reads_in_time_keeps_its_channel() -> None:
    played = Played(channels=1)
    slow, other = played.chunkwise(A, 4, stops=True), played.chunkwise(B)
    while not slow.is_over:
        played.run(played.now + IDLE_S * 0.9)
        played.schedule.note_sent(slow, played.now)
    played.run()
    assert played.ended == [slow, other]


def test_a_stopped_chunk_major_request_leaves_the_link_to_slack() -> None:
    played = Played()
    played.chunkwise(B, 1000, stops=True)
    flow = played.layerwise(A, 300)
    played.run(0.1)
    played.run(0.2)
    assert played.bytes_of(flow, begin_s=0.1) == pytest.approx(RATE * 0.1, abs=PAYLOAD)


def test_both_sides_have_their_part_while_both_send() -> None:
    played = Played()
    layers, chunks = played.layerwise(A, 1000), played.chunkwise(B, 1000)
    played.run(1.0)
    assert played.bytes_of(chunks) == pytest.approx(FRACTION * RATE, abs=2 * PAYLOAD)
    assert played.bytes_of(layers) == pytest.approx((1 - FRACTION) * RATE, abs=2 * PAYLOAD)


moves = st.tuples(
    st.sampled_from(["join", "join", "stop", "read", "leave", "run"]), st.integers(0, 9), st.floats(0.0, 0.1)
)
tenants = st.sampled_from(
    [
        A,
        B,
        LinkTenant("C", 0.1, priority=3),
        LinkTenant("D", 5.0, 1e6),
        LinkTenant("E", rate_max_bytes_per_s=1e7, priority=7),
    ]
)


@pytest.mark.slow
@given(st.integers(1, 3), st.lists(st.tuples(moves, tenants), max_size=30))
def test_every_chunk_major_request_ends_and_nothing_of_it_is_kept(
    channels: int, some: list[tuple[tuple[str, int, float], LinkTenant]]
) -> None:
    """Through stops, departures at any moment, caps and priorities."""
    played = Played(channels=channels)
    flows: list[Flow] = []
    for (what, index, for_s), tenant in some:
        flow = flows[index % len(flows)] if flows else None
        match what:
            case "join":
                flows.append(played.chunkwise(tenant, 1 + index))
            case "stop" if flow:
                played.stopped.add(flow)
            case "read" if flow:
                played.read(flow)
            case "leave" if flow:
                flows.remove(flow)
                played.schedule.leave(flow, played.now)
                played.schedule.leave(flow, played.now)
            case "run":
                played.run(played.now + for_s)
        schedule = played.schedule
        assert schedule.chunkwise_active_count <= channels
        assert len(schedule.flows()) == schedule.chunkwise_active_count + schedule.chunkwise_queued_count
    for flow in flows:
        played.read(flow)
    played.run()
    assert all(flow.is_over for flow in flows)
    assert played.schedule.flows() == []
    assert played.schedule.wake_at() == math.inf
    assert len(played.schedule._chunkwise._ready) == 0


def test_a_request_that_goes_on_behind_its_transport_waits_for_it_without_a_channel() -> None:
    """As it does when the rules change under way."""
    chunkwise = Chunkwise(1, RATE, TenantMeter())
    flow = Flow(1, A, Demand(10 * PAYLOAD, 1), layers_of((PAYLOAD,) * 10, 1), 0.0, is_chunkwise=True)
    flow.ahead_count = AHEAD_MAX
    chunkwise.join(flow, 0.0)
    assert (chunkwise.due(0.0), chunkwise.active_count, chunkwise.wake_at()) == ([], 0, math.inf)
    flow.ahead_count = 0
    chunkwise.note_sent(flow, 0.0)
    assert chunkwise.active_count == 1


def test_the_meter_forgets_what_has_no_effect() -> None:
    meter, tenant = TenantMeter(), LinkTenant("A", rate_max_bytes_per_s=1e6)
    meter.charge(B, 1000, 0.0)
    meter.charge(tenant, 1_000_000, 0.0)
    meter.forget(0.9)
    assert meter.free_s(tenant) == pytest.approx(1.0 - CATCH_UP_S)
    meter.forget(1.1)
    assert len(meter) == 0
    assert meter.free_s(tenant) == meter.free_s(B) == -math.inf


@pytest.mark.parametrize("is_work_conserving", [False, True])
def test_only_work_conserving_rates_are_taken_from_who_does_not_read(is_work_conserving: bool) -> None:
    """From the epoch on that begins then, until the one that begins when it reads again."""
    rates = HeldRates(Policy.EQUAL, 0.0, RATE, is_work_conserving=is_work_conserving)
    layers = layers_of((PAYLOAD,), 1000)
    stopped, other = (Flow(number, LinkTenant(str(number)), Demand(PAYLOAD, 1000), layers, 0.0) for number in (1, 2))
    rates.share([stopped, other], 0.0)

    def play(until_s: float, *reads: Flow) -> None:
        now = 0.0
        while (now := max(now, rates.wake_at())) <= until_s:
            for flow in rates.due(now):
                if flow in reads:
                    flow.ahead_count -= 1
                    rates.resume(flow, now)

    play(0.04, other)
    assert not rates.wants_epoch
    assert rates.used_bytes_per_s == pytest.approx(RATE)
    play(0.1, other)
    assert rates.wants_epoch is is_work_conserving
    assert rates.used_bytes_per_s == pytest.approx(RATE / 2)
    rates.share([stopped, other], 0.1)
    assert other.rate_bytes_per_s == pytest.approx(RATE if is_work_conserving else RATE / 2)
    stopped.ahead_count = 0
    rates.resume(stopped, 0.2)
    assert rates.wants_epoch is is_work_conserving
    rates.share([stopped, other], 0.2)
    assert stopped.rate_bytes_per_s == other.rate_bytes_per_s == pytest.approx(RATE / 2)
    assert rates.used_bytes_per_s == pytest.approx(RATE)
    for flow in (stopped, other):
        rates.remove(flow, 0.3)
    assert (len(rates), rates.wake_at()) == (0, math.inf)


@every
def test_a_cap_holds_for_both_orders_together(pool: PoolSettings) -> None:
    played, cap = Played(pool), 1e6
    tenant = LinkTenant("A", rate_max_bytes_per_s=cap)
    flows = [played.layerwise(tenant, 100), played.chunkwise(tenant, 100)]
    played.run(5.0)
    assert played.bytes_of(*flows) <= cap * (5.0 + CATCH_UP_S) + 3 * PAYLOAD
    assert played.bytes_of(*flows) >= cap * 5.0 - 2 * PAYLOAD
    played.run()
    assert played.bytes_of(*flows) == 200 * PAYLOAD


def test_slack_serves_both_orders_of_a_tenant_with_a_cap() -> None:
    played = Played()
    tenant = LinkTenant("A", rate_max_bytes_per_s=1e6)
    layers, chunks = played.layerwise(tenant, 1000), played.chunkwise(tenant, 1000)
    played.run(10.0)
    assert min(played.bytes_of(layers), played.bytes_of(chunks)) >= 0.3 * 1e6 * 10.0


@every
def test_layer_major_requests_that_are_not_read_leave_the_link_to_chunk_major_ones(pool: PoolSettings) -> None:
    """And have it again when they are read."""
    played = Played(pool)
    layers = [played.layerwise(A, 1000, stops=True) for _ in range(3)]
    chunks = played.chunkwise(B, 10_000)
    played.run(1.0)
    played.run(2.0)
    assert played.bytes_of(chunks, begin_s=1.0) == pytest.approx(RATE, abs=2 * PAYLOAD)
    for flow in layers:
        played.read(flow)
    played.run(3.0)
    assert played.bytes_of(chunks, begin_s=2.0) == pytest.approx(FRACTION * RATE, rel=0.05)
    assert played.bytes_of(*layers, begin_s=2.0) >= 0.9 * (1 - FRACTION) * RATE


@every
def test_a_layer_major_tenant_with_a_cap_leaves_the_rest_to_chunk_major_ones(pool: PoolSettings) -> None:
    played = Played(pool)
    layers = played.layerwise(LinkTenant("A", rate_max_bytes_per_s=0.1 * RATE), 1000)
    chunks = played.chunkwise(B, 10_000)
    played.run(2.0)
    assert played.bytes_of(layers) == pytest.approx(0.1 * RATE * 2.0, rel=0.05)
    assert played.bytes_of(chunks) >= 0.85 * RATE * 2.0
    assert played.bytes_of(layers, chunks) <= RATE * (2.0 + 2 * CATCH_UP_S)


@every
@pytest.mark.parametrize("pause_s", [0.005, 0.03, 0.2])
def test_clients_that_pause_make_no_more_go_than_the_link_carries(pool: PoolSettings, pause_s: float) -> None:
    """Each side makes up for at most `CATCH_UP_S`, however often its clients pause, and keeps its part."""
    played = Played(pool)
    layers = [played.layerwise(LinkTenant(str(number)), 10_000, stops=True) for number in range(20)]
    chunks = played.chunkwise(B, 10_000)
    while played.now < 3.0:
        played.run(played.now + pause_s)
        for flow in layers:
            while flow.ahead_count:
                played.schedule.note_sent(flow, played.now)
    sent = played.bytes_of(*layers, chunks)
    assert sent <= RATE * (3.0 + 2 * CATCH_UP_S) + 20 * PAYLOAD
    assert played.bytes_of(chunks) >= 0.95 * FRACTION * RATE * 3.0


def test_work_conserving_rates_of_who_does_not_read_go_to_the_others_and_come_back() -> None:
    played = Played(CONSERVING)
    stopped, reads = played.layerwise(A, 10_000, stops=True), played.layerwise(B, 10_000)
    played.run(0.04)
    assert stopped.rate_bytes_per_s == reads.rate_bytes_per_s
    played.run(0.2)
    assert reads.rate_bytes_per_s == pytest.approx((1 - FRACTION) * RATE)
    played.read(stopped)
    played.run(0.25)
    assert stopped.rate_bytes_per_s == reads.rate_bytes_per_s
