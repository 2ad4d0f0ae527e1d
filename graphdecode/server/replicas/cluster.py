"""Deployment of replicas on Ray, local or on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from graphdecode.config import EngineConfig, ReplicaConfig, ServerConfig
from graphdecode.config.settings import DOWNSCALING_FACTOR, target_requests
from graphdecode.errors import ArgumentError
from graphdecode.server.batch import ATTEMPTS, BatchRequest
from graphdecode.server.http import HttpError
from graphdecode.server.replicas.front import Front, LostError, make_front
from graphdecode.server.replicas.ray_channel import HttpChannel, Ingress, PrefixRouter, Route, as_lost_errors
from graphdecode.server.replicas.replica import Replica
from graphdecode.server.replicas.routing import prompt_blocks
from graphdecode.server.run import off_signals, on_signals
from graphdecode.server.service import Service

Transport = Literal["proxy", "direct", "calls"]  # to the replicas: Ray's proxies, HTTP, or calls of this process

_STORE_BYTES = 200 << 20  # of Ray's object store
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_COMMON_OPTIONS: dict[str, Any] = {
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 10.0,
    "logging_config": _LOGGING,
}
_MAX_REQUESTS = 2**31 - 1  # Ray's limit
_ATTEMPTS = 2  # to start a replica
_STATS_SECONDS = 1.0  # how often the router learns which engines serve
_PROXY_SECONDS = 10.0  # for a proxy to respond

log = logging.getLogger(__name__)


class Cluster:
    """The replicas of one model, in a Ray application that replaces another one of the same name."""

    def __init__(
        self,
        make_service: Callable[[], Service],
        settings: EngineConfig,
        config: ServerConfig,
        replicas: ReplicaConfig,
        transport: Transport,
        application: str = "graphdecode",
    ) -> None:
        self._make_service = make_service
        self._settings = settings
        self._replicas = replicas
        self._transport = transport
        self._application = application
        self._deployed_at: float | None = None  # by the clock of the cluster; None: not deployed
        self.config = config
        self.front: Front | None = None  # in this process, with the transport "direct"

    @property
    def draining(self) -> bool:
        """Whether the front of this process refuses new requests."""
        return self.front is not None and self.front.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        if self.front is not None:
            self.front.draining = draining

    @property
    def num_open(self) -> int:
        """Requests in flight in this process."""
        return self.front.num_open if self.front is not None else 0

    async def start(self) -> None:
        """Deploy, and wait until all replicas serve; raises `ArgumentError` for a wrong address, or too few devices."""
        await asyncio.to_thread(self._deploy)

    def _deploy(self) -> None:
        _join_ray(self._replicas)
        resources = self._resources()
        if self._replicas.ray_address is None:
            _check_devices(resources, self._replicas.bounds[0])
        address = {"host": self.config.host, "port": self.config.port}
        location = (
            "Disabled" if self._transport != "proxy" else "EveryNode" if self._replicas.ray_address else "HeadOnly"
        )
        replica = self._deployment(resources).bind(self._make_service, self._transport == "direct")
        ingress = serve.deployment(
            name="front",
            num_replicas=self._replicas.fronts,
            max_ongoing_requests=self.config.max_connections,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=self.config.drain_timeout_s,
            **_COMMON_OPTIONS,
        )(serve.ingress()(Ingress))
        try:
            serve.start(proxy_location=location, http_options=address, logging_config=_LOGGING)
            if self._transport == "proxy":
                self._check_proxy()  # before anything is replaced
            before = self._latest()
            try:
                if self._transport == "proxy":
                    serve.run(ingress.bind(replica, self.config), name=self._application)
                else:
                    serve.run(replica, name=self._application, route_prefix=None)
            finally:
                latest = self._latest()
                self._deployed_at = latest if latest != before else None
        except (RayError, RuntimeError) as error:  # its text has the errors of the replicas
            raise ArgumentError(f"the replicas cannot be started: {error}") from error

    def _check_proxy(self) -> None:
        """Check the address of the proxies: those of a cluster keep the address of an earlier command."""
        host, port = self.config.host, self.config.port
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=_PROXY_SECONDS)) as connection:
            try:
                connection.request("GET", "/-/healthz")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException) as error:
                raise ArgumentError(
                    f"no proxy of the cluster listens on {host} port {port}: Ray Serve keeps the address that it was "
                    f"first started with ({error})"
                ) from error

    def _latest(self) -> float | None:
        """Return when the application was last deployed, by any command; None: it is not deployed."""
        application = serve.status().applications.get(self._application)
        return None if application is None else application.last_deployed_time_s

    def _resources(self) -> dict[str, float]:
        devices = self._settings.tensor_parallel_size
        needs: dict[str, float] = {"CPU": devices * self._replicas.cpus_per_device}
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        if self._settings.device == "cuda" or (self._settings.device == "auto" and has_gpus):
            needs["GPU"] = devices
        return needs

    def _deployment(self, resources: dict[str, float]) -> Any:
        replicas, rows = self._replicas, self._settings.buckets.max_batch_size
        least, most = replicas.bounds
        size: dict[str, Any] = {"num_replicas": least}
        if replicas.autoscale is not None:
            target = target_requests(rows) if replicas.target_requests == "auto" else replicas.target_requests
            scaling = {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": target,
                "downscaling_factor": DOWNSCALING_FACTOR,
                "upscale_delay_s": replicas.upscale_delay_s,
                "downscale_delay_s": replicas.downscale_delay_s,
                "look_back_period_s": max(min(replicas.upscale_delay_s, 30.0), 1.0),
                "metrics_interval_s": 1.0,
            }
            size = {"autoscaling_config": scaling}
        return serve.deployment(
            name="replica",
            max_constructor_retry_count=_ATTEMPTS,
            max_ongoing_requests=min(rows + self.config.max_waiting, _MAX_REQUESTS),
            placement_group_bundles=[resources],
            ray_actor_options={"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)},
            request_router_config={
                "request_router_class": PrefixRouter,
                "request_router_kwargs": {"slack": replicas.slack, "policy": replicas.routing},
                "request_routing_stats_period_s": _STATS_SECONDS,
            },
            graceful_shutdown_timeout_s=self.config.drain_timeout_s,
            **_COMMON_OPTIONS,
            **size,
        )(Replica)

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve behind Ray's proxies until SIGTERM or Ctrl-C, and finish the requests in flight."""
        ending = asyncio.Event()
        try:
            await self.start()
            on_signals(lambda _: ending.set())
            on_ready()
            await ending.wait()
            log.warning("finishing the requests in flight; a second signal ends immediately")
            off_signals()  # Ray's processes end with this one
        finally:
            await asyncio.to_thread(self.close)

    def app(self) -> Starlette:
        """Return the front of this process, once the replicas were started."""
        app, self.front = make_front(HttpChannel(self._handle), self.config)
        return app

    @cached_property
    def _handle(self) -> DeploymentHandle:
        return serve.get_deployment_handle("replica", self._application)

    async def answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        """Return status and body of the response to a request of a batch, which is tried again if its replica ends."""
        route, handle = Route(prompt_blocks(request.body)), cast(Any, self._handle)
        for _ in range(ATTEMPTS):
            try:
                with as_lost_errors():
                    return await handle.whole.remote(request, route=route)  # type: ignore[no-any-return]
            except LostError as lost:
                log.warning("%r: %s", request.custom_id, lost)
        return 503, HttpError(503, f"{ATTEMPTS} replicas ended while processing it").body

    def close(self, *, force: bool = False) -> None:
        """End the replicas, and Ray if it was started here; a later deployment by another command stays."""
        if not ray.is_initialized():
            return
        joined = self._replicas.ray_address is not None
        if (joined or not force) and self._deployed_at is not None and self._latest() == self._deployed_at:
            serve.delete(self._application)
        ray.shutdown()


def _join_ray(replicas: ReplicaConfig) -> None:
    """Join a cluster, or start a local Ray that listens on the loopback interface only."""
    if replicas.ray_address is None:
        ray.init(include_dashboard=False, object_store_memory=_STORE_BYTES, log_to_driver=False)
        return
    try:
        ray.init(address=replicas.ray_address, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise ArgumentError(f"ray_address {replicas.ray_address!r} cannot be joined: {error}") from error


def _check_devices(resources: dict[str, float], count: int) -> None:
    free = ray.cluster_resources()
    for name, needed in resources.items():
        if needed * count > free.get(name, 0):
            raise ArgumentError(
                f"{count} replicas of {needed:g} {name} each need {needed * count:g}, Ray has {free.get(name, 0):g}"
            )
