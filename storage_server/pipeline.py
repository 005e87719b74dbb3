"""The story of one descriptor: plan, mode, schedule, then gather and send payload after payload."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from descriptors.descriptor import Descriptor, OnMissing
from descriptors.errors import ChunkUnavailable
from descriptors.storage_api import DeliveryOutcome, DeliveryStart
from storage_server.gather.plan import DeliveryPlan, Payload, plan_delivery
from storage_server.gather.read import gather
from storage_server.gather.staging import Slot, StagingPool, Window
from storage_server.scheduler.admission import Admission
from storage_server.scheduler.mode import choose_mode
from storage_server.settings import StorageSettings
from storage_server.store.embedded import EmbeddedStore
from storage_server.store.extents import Extent
from storage_server.threads import to_end
from storage_server.transport.transfer import Transfer

MakeTransfer = Callable[[DeliveryPlan], Transfer]
Gate = Callable[[str, Payload], Awaitable[None]]
"""Called with request id and payload before each gather; tests hold layers back with it."""


class Pipeline:
    """Carries descriptors out over one store, one staging pool and one set of gather threads."""

    def __init__(self, settings: StorageSettings, store: EmbeddedStore, staging: StagingPool) -> None:
        self._settings = settings
        self._store = store
        self._staging = staging
        self._admission = Admission(settings.deliveries_max)
        self._gatherers = ThreadPoolExecutor(settings.gather_threads, "gather")
        self.gate: Gate | None = None

    def close(self) -> None:
        """Wait for running gathers."""
        self._gatherers.shutdown()

    async def run(
        self, bucket: str, descriptor: Descriptor, request_id: str, make_transfer: MakeTransfer
    ) -> DeliveryOutcome:
        """Deliver what `descriptor` names.

        Raises ChunkUnavailable (nothing sent yet, or announced as failed), ServerError(TargetUnreachable, SlowDown).
        However it ends, nothing is in flight, and memory, pins and rate are given back.
        """
        layout = descriptor.layout
        prefix_only = descriptor.on_missing is OnMissing.PREFIX
        async with (
            self._admission.admit() as grant,
            self._store.reads.open_prefix(
                bucket, descriptor.chunk_keys, layout.chunk_bytes, prefix_only=prefix_only
            ) as chunks,
        ):
            payload_bytes = layout.payload_bytes(len(chunks))
            mode = choose_mode(descriptor.delivery, payload_bytes, self._settings.theta_bytes)
            plan = plan_delivery(mode, layout, len(chunks), self._settings.aggregation_bytes)
            start = DeliveryStart(request_id, mode, len(chunks), payload_bytes)
            transfer = make_transfer(plan)
            try:
                await transfer.start(start, grant)
                await self._send_all(plan, chunks, transfer, request_id)
                return DeliveryOutcome(start, await transfer.finish())
            except ChunkUnavailable as missing:
                await transfer.fail(missing.layer or 0, missing.index or 0)
                raise
            finally:
                await to_end(asyncio.ensure_future(transfer.close()))

    async def _send_all(
        self, plan: DeliveryPlan, chunks: list[list[Extent]], transfer: Transfer, request_id: str
    ) -> None:
        """Gather payload n+1 while payload n is sent: one task fills slots ahead of the sender."""
        window = self._staging.window(self._settings.window_bytes // self._settings.aggregation_bytes)
        filled: asyncio.Queue[tuple[Payload, Slot] | None] = asyncio.Queue(maxsize=2)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._fill(plan, chunks, window, filled, request_id))
                while (item := await filled.get()) is not None:
                    await transfer.send(*item)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            while not filled.empty():
                if (item := filled.get_nowait()) is not None:
                    item[1].release()

    async def _fill(
        self,
        plan: DeliveryPlan,
        chunks: list[list[Extent]],
        window: Window,
        filled: asyncio.Queue[tuple[Payload, Slot] | None],
        request_id: str,
    ) -> None:
        loop = asyncio.get_running_loop()
        for payload in plan.payloads():
            if self.gate is not None:
                await self.gate(request_id, payload)
            slot = await window.take()
            try:
                await to_end(
                    loop.run_in_executor(self._gatherers, gather, self._store.files, chunks, payload, slot.view)
                )
                await filled.put((payload, slot))
            except BaseException:
                slot.release()
                raise
        await filled.put(None)
