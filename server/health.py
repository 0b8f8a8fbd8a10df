"""Whether the daemon serves, and if not why not: one state for HTTP and for gRPC's health service."""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2

from kvstore import wire

MODES = {  # of a store, and what they mean while the daemon is ready
    "host_only": "the disk cannot be written: new blocks stay in memory only",
    "degraded": "a background task failed and is being started again",
}
SERVICES = ("", wire.SERVICE)


class Health:
    """Starting, ready, draining. A disk that cannot be written leaves it ready: HOST still serves."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.why_not: str | None = "starting: the store is being opened"

    @property
    def ready(self) -> bool:
        """Whether calls are accepted."""
        return self.why_not is None

    async def serve(self) -> None:
        """Calls are accepted from now on."""
        self.why_not = None
        for service in SERVICES:
            await self.servicer.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def fail(self, why: str) -> None:
        """No more calls are accepted, for the daemon has failed and is about to end."""
        self.why_not = why
        for service in SERVICES:
            await self.servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def drain(self) -> None:
        """No more calls are accepted, for good."""
        if self.why_not is None:
            self.why_not = "draining: the daemon shuts down"
        await self.servicer.enter_graceful_shutdown()
