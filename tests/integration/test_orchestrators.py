"""Several orchestrators that share a registry of engines in a real etcd."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.beds.canned_engines import CannedSettings
from objectcache.adapters.etcd import Etcd
from objectcache.orchestrator import orders
from objectcache.orchestrator.registry import EtcdRegistry
from objectcache.orchestrator.router import Pin
from objectcache.orchestrator.rules import prefix_index
from objectcache.orchestrator.rules.admission import Tenant
from objectcache.orchestrator.settings import OrchestratorSettings
from tests.support.etcd import EtcdServer, etcd_server
from tests.support.orchestrators import ADMIN_TOKEN, canned, orchestrated
from tests.support.waiting import until

FAST = CannedSettings(token_us=10.0, output_s=0.0)
PROMPT = list(range(1, 257))


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path / "etcd") as server:
        yield server


def registry(server: EtcdServer) -> EtcdRegistry:
    return EtcdRegistry(Etcd([server.url], call_s=30.0), "kv")


async def test_an_engine_that_one_registers_is_joined_by_all(etcd: EtcdServer) -> None:
    async with (
        canned(2, FAST) as engines,
        orchestrated([], registry=registry(etcd)) as one,
        orchestrated([], registry=registry(etcd)) as other,
    ):
        for name, engine in zip("ab", engines, strict=True):
            joined = await one.ask("POST", "/_orchestrator/engines", {"url": engine.url, "name": name})
            assert joined.status == 201
        for bed in (one, other):
            known = bed.orchestrator.engines
            await until(
                lambda known=known: {name for name, each in known.items() if each.status().value == "up"} == {"a", "b"}
            )
        assert (await other.complete(PROMPT)).status == 200
        assert (await other.ask("POST", "/_orchestrator/engines/a/drain")).status == 200
        await until(lambda: one.orchestrator.engines["a"].status().value == "draining")
        assert {(await one.complete([at, *PROMPT])).engine for at in range(3)} == {"b"}
        assert (await other.ask("DELETE", "/_orchestrator/engines/b")).status == 200
        await until(lambda: set(one.orchestrator.engines) == {"a"})
        await until(lambda: set(other.orchestrator.engines) == {"a"})


@pytest.mark.slow
async def test_pins_and_quotas_are_followed_by_all(etcd: EtcdServer) -> None:
    """Also by one that comes later."""
    settings = OrchestratorSettings(admin_token=ADMIN_TOKEN, tenants={"key": Tenant("search")})
    headers = {"Authorization": "Bearer key"}
    async with (
        canned(2, FAST) as engines,
        orchestrated(engines, settings, registry=registry(etcd)) as one,
        orchestrated(engines, settings, registry=registry(etcd)) as other,
    ):
        names = list(one.orchestrator.engines)
        for wrong in ({"engine": []}, {"engine": "nobody"}, {"engine": names[1], "until": True}, {}):
            assert (await one.ask("PUT", f"/_orchestrator/pins/{'ab' * 16}", wrong)).status == 400
        assert (await one.ask("PUT", "/_orchestrator/pins/xyz", {"engine": names[1]})).status == 400
        pin = {"engine": names[1], "until": None}
        assert (await one.ask("PUT", f"/_orchestrator/pins/{'ab' * 16}", pin)).status == 200
        assert (await one.ask("PUT", "/_orchestrator/quotas/search", {"weight": 5.0})).status == 200
        async with orchestrated(engines, settings, registry=registry(etcd)) as late:
            for bed in (other, late):
                orders = bed.orchestrator.orders
                await until(lambda orders=orders: orders.pins == {"ab" * 16: Pin(names[1], None)})
                await until(lambda orders=orders: orders.tenant(Tenant("search")).weight == 5.0)
        assert (await other.ask("DELETE", f"/_orchestrator/pins/{'ab' * 16}")).status == 200
        await until(lambda: one.orchestrator.orders.pins == {})
        etcd.send(signal.SIGKILL)
        etcd.kill()
        refused = await one.ask("PUT", "/_orchestrator/quotas/search", {"weight": 9.0})
        assert refused.status == 503
        assert one.orchestrator.orders.tenant(Tenant("search")).weight == 5.0
        assert (await one.complete(PROMPT, headers=headers)).status == 200
        etcd.start()


async def test_a_pin_sends_prompts_that_begin_so_to_its_engine_until_it_is_over(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever orchestrator they come to, and whoever holds them."""
    async with (
        canned(2, FAST) as engines,
        orchestrated(engines, registry=registry(etcd)) as one,
        orchestrated(engines, registry=registry(etcd)) as other,
    ):
        home = (await one.complete(PROMPT)).engine
        away = next(engine.url for engine in engines if engine.url != home)
        prefix = (await one.ask("POST", "/_orchestrator/route", {"prompt": PROMPT})).json()["prefix"]
        assert (await one.ask("PUT", f"/_orchestrator/pins/{prefix}", {"engine": away})).status == 200
        await until(lambda: prefix in other.orchestrator.orders.pins)
        for bed in (one, other):
            assert {(await bed.complete([*PROMPT, at])).engine for at in range(4)} == {away}
        assert (await one.complete([7, *PROMPT])).status == 200  # begins in another way
        over = {"engine": home, "until": 1.0}
        assert (await one.ask("PUT", f"/_orchestrator/pins/{prefix}", over)).status == 200
        assert (await one.complete(PROMPT)).engine in {home, away}
        assert (await one.ask("PUT", f"/_orchestrator/pins/{'0' * 32}", {"engine": home})).status == 200
        await until(lambda: set(other.orchestrator.orders.pins) == {prefix, "0" * 32})
        monkeypatch.setattr(orders, "PINS_MAX", 2)
        assert (await one.ask("PUT", f"/_orchestrator/pins/{'1' * 32}", {"engine": home})).status == 200
        await until(lambda: set(other.orchestrator.orders.pins) == {"0" * 32, "1" * 32})  # the one that is over
        assert (await one.ask("POST", "/_orchestrator/route", {"prompt": [1, 2]})).json()["prefix"] is None


async def test_a_session_goes_on_at_another_orchestrator_on_the_engine_that_holds_it(etcd: EtcdServer) -> None:
    """Sessions are not shared: the engines' events tell every orchestrator who holds what."""
    async with (
        canned(3, FAST) as engines,
        orchestrated(engines, registry=registry(etcd)) as one,
        orchestrated(engines, registry=registry(etcd)) as other,
    ):
        for number in range(6):
            prompt = [number, *PROMPT]
            headers = {"X-Session-Id": f"session {number}"}
            index = other.orchestrator.index
            known = {engine.url: index.held_count(engine.url) for engine in engines}
            first = await one.complete(prompt, headers=headers)
            held = known[first.engine] + len(prompt) // 16
            await until(lambda index=index, name=first.engine, held=held: index.held_count(name) >= held)
            asked = {"model": "", "prompt": [*prompt, *range(300, 320)]}
            route = await other.ask("POST", "/_orchestrator/route", asked)
            assert route.json()["engine"] == first.engine


async def test_orders_that_make_no_sense_are_left_out(etcd: EtcdServer) -> None:
    client = Etcd([etcd.url])
    await client.start()
    for name, value in (
        ("pins/x", b"garbage"), ("pins/y", b'{"engine": 5}'), ("quotas/search", b'{"weight": -1}'),
        ("quotas/nobody", b"{}"), ("pins/good", b'{"engine": "a", "until": null}'),
    ):  # fmt: skip
        await client.put(f"kv/{name}", value)
    await client.close()
    settings = OrchestratorSettings(admin_token=ADMIN_TOKEN, tenants={"key": Tenant("search")})
    async with orchestrated([], settings, registry=registry(etcd), is_waiting=False) as bed:
        assert bed.orchestrator.orders.pins == {"good": Pin("a", None)}
        assert bed.orchestrator.orders.tenant(Tenant("search")) == Tenant("search")


@pytest.mark.slow
async def test_while_etcd_is_gone_the_engines_stay_and_registrations_are_refused(etcd: EtcdServer) -> None:
    async with canned(1, FAST) as engines, orchestrated([], registry=registry(etcd)) as bed:
        await bed.ask("POST", "/_orchestrator/engines", {"url": engines[0].url, "name": "a"})
        await until(lambda: "a" in bed.orchestrator.engines)
        await until(lambda: bed.orchestrator.engines["a"].status().value == "up")
        etcd.send(signal.SIGKILL)
        etcd.kill()
        assert (await bed.complete(PROMPT)).status == 200
        refused = await bed.ask("POST", "/_orchestrator/engines", {"url": "http://127.0.0.1:9", "name": "b"})
        assert refused.status == 503
        assert set(bed.orchestrator.engines) == {"a"}
        etcd.start()
        again = await bed.ask("POST", "/_orchestrator/engines", {"url": "http://127.0.0.1:9", "name": "b"})
        assert again.status == 201
        await until(lambda: set(bed.orchestrator.engines) == {"a", "b"})


async def test_entries_that_are_no_engines_are_left_out(etcd: EtcdServer) -> None:
    client = Etcd([etcd.url])
    await client.start()
    for name, value in (("x", b"garbage"), ("y", b"{}"), ("z", b'{"url": 5}'), ("w", b"[" * 20_000)):
        await client.put(f"kv/engines/{name}", value)
    await client.put("kv/engines/good", b'{"url": "http://127.0.0.1:9"}')
    await client.close()
    async with orchestrated([], registry=registry(etcd), is_waiting=False) as bed:
        await until(lambda: set(bed.orchestrator.engines) == {"good"})


async def test_engines_beyond_the_most_that_can_be_known_leave_the_others_followed(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of them joins once there is a place for it."""
    monkeypatch.setattr(prefix_index, "ENGINES_MAX", 1)
    client = Etcd([etcd.url])
    await client.start()
    async with orchestrated([], registry=registry(etcd), is_waiting=False) as bed:
        await client.put("kv/engines/a", b'{"url": "http://127.0.0.1:9"}')
        await until(lambda: set(bed.orchestrator.engines) == {"a"})
        await client.put("kv/engines/b", b'{"url": "http://127.0.0.1:10"}')
        await client.put("kv/engines/a", b'{"url": "http://127.0.0.1:9", "is_draining": true}')
        await until(lambda: bed.orchestrator.engines["a"].status().value == "draining")
        assert set(bed.orchestrator.engines) == {"a"}
        await client.delete("kv/engines/a")
        await until(lambda: set(bed.orchestrator.engines) == {"b"})
    await client.close()
