"""Another S3 service as the home of objects."""

from __future__ import annotations

from storage_server.home.objects import UpstreamObjects
from storage_server.home.s3.connection import Upstream
from storage_server.home.service import OnChanged
from storage_server.home.uploads import UpstreamUploads
from storage_server.settings import UpstreamSettings


class S3Service:
    """Implements storage_server.home.service.Service."""

    def __init__(self, settings: UpstreamSettings, object_bytes_max: int) -> None:
        self._upstream = Upstream(settings)
        self.objects = UpstreamObjects(self._upstream, object_bytes_max)
        self.uploads = UpstreamUploads(self._upstream, self.objects, object_bytes_max)

    @property
    def failed_count(self) -> int:
        """How many requests the service did not answer, or was too busy for."""
        return self._upstream.failed_count

    @property
    def unread_count(self) -> int:
        """There are no journals."""
        return 0

    @property
    def bad_record_count(self) -> int:
        """There are no journals."""
        return 0

    def on_changed(self, tell: OnChanged) -> None:
        """An S3 service does not say what others change: `chunk_revalidate_s` is for that."""

    async def start(self) -> None:
        """Make the pool of connections."""
        await self._upstream.start()

    async def close(self) -> None:
        """Close every connection."""
        await self._upstream.close()
