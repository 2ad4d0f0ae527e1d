"""Deployment of replicas on Ray, local or on a cluster."""

from __future__ import annotations

import asyncio
import http.client
import logging
from collections.abc import Callable
from typing import Any, Literal

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from graphdecode.config import EngineConfig, ReplicaConfig, ServerConfig
from graphdecode.config.server import DOWNSCALING_FACTOR, target_requests
from graphdecode.errors import ArgumentError
from graphdecode.server.batch import ATTEMPTS, BatchRequest
from graphdecode.server.http import HttpError
from graphdecode.server.replicas.front import Front, LostError, make_front
from graphdecode.server.replicas.ray_channel import HttpChannel, Ingress, PrefixRouter, Route, as_lost_errors
from graphdecode.server.replicas.replica import Replica
from graphdecode.server.replicas.routing import prompt_blocks
from graphdecode.server.run import off_signals, on_signals
from graphdecode.server.service import Service

Way = Literal["proxy", "direct", "calls"]

_STORE_BYTES = 200 << 20  # of Ray's object store: nothing large goes through it
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_CARE: dict[str, Any] = {"health_check_period_s": 2.0, "health_check_timeout_s": 10.0, "logging_config": _LOGGING}
_MOST_REQUESTS = 2**31 - 1  # that Ray can count
_ATTEMPTS = 2  # at starting a replica
_STATS_SECONDS = 1.0  # how often the router learns which engines serve
_PROXY_SECONDS = 10.0  # for a proxy to say that it is there

log = logging.getLogger(__name__)


class Cluster:
    """The replicas of one model.

    Args:
        make_service: returns the service of one, which is yet to be started.
        way: how requests reach them: through Ray's proxies, over HTTP past them, or by calls of this process alone.
        application: its name in Ray, where another one of that name is replaced.
    """

    def __init__(
        self,
        make_service: Callable[[], Service],
        config: EngineConfig,
        limits: ServerConfig,
        replicas: ReplicaConfig,
        way: Way,
        application: str = "graphdecode",
    ) -> None:
        self._make_service = make_service
        self._config = config
        self._replicas = replicas
        self._way = way
        self._application = application
        self._deployed_at: float | None = None  # by the clock of the cluster; None: it was not
        self.limits = limits  # as given
        self.front: Front | None = None  # before them in this process, where the way is direct

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken on in this process."""
        return self.front is not None and self.front.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        if self.front is not None:
            self.front.draining = draining

    @property
    def num_open(self) -> int:
        """Requests under way in this process."""
        return self.front.num_open if self.front is not None else 0

    async def start(self) -> None:
        """Deploy, and wait until all replicas serve.

        Raises:
            ArgumentError: there is no such cluster, or too few devices.
        """
        await asyncio.to_thread(self.deploy)

    def deploy(self) -> None:
        """See `start`."""
        join_ray(self._replicas)
        resources = self._resources()
        if self._replicas.ray_address is None:
            check_room(resources, self._replicas.bounds[0])
        address = {"host": self.limits.host, "port": self.limits.port}
        location = "Disabled" if self._way != "proxy" else "EveryNode" if self._replicas.ray_address else "HeadOnly"
        replica = self._deployment(resources).bind(self._make_service, self._way == "direct")
        ingress = serve.deployment(
            name="front",
            num_replicas=self._replicas.fronts,
            max_ongoing_requests=self.limits.max_connections,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=self.limits.drain_timeout_s,
            **_CARE,
        )(serve.ingress()(Ingress))
        try:
            serve.start(proxy_location=location, http_options=address, logging_config=_LOGGING)
            if self._way == "proxy":
                self._check_proxy()  # before anything is replaced
            before = self._latest()
            try:
                if self._way == "proxy":
                    serve.run(ingress.bind(replica, self.limits), name=self._application)
                else:
                    serve.run(replica, name=self._application, route_prefix=None)
            finally:
                latest = self._latest()
                self._deployed_at = latest if latest != before else None
        except (RayError, RuntimeError) as error:  # which holds what the replicas said
            raise ArgumentError(f"the replicas cannot be started: {error}") from error

    def _check_proxy(self) -> None:
        """Check the address of the proxies: those of a cluster keep the address of an earlier command."""
        host, port = self.limits.host, self.limits.port
        asking = http.client.HTTPConnection(host, port, timeout=_PROXY_SECONDS)
        try:
            asking.request("GET", "/-/healthz")
            asking.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            raise ArgumentError(
                f"no proxy of the cluster listens on {host} port {port}: Ray Serve keeps the address that it was "
                f"first started with ({error})"
            ) from error
        finally:
            asking.close()

    def _latest(self) -> float | None:
        """Return when the application was deployed, by whatever command; None: it is not there."""
        told = serve.status().applications.get(self._application)
        return None if told is None else told.last_deployed_time_s

    def _resources(self) -> dict[str, float]:
        """Return what one replica takes: its devices, all on one machine."""
        devices = self._config.tensor_parallel_size
        needs: dict[str, float] = {"CPU": devices * self._replicas.cpus_per_device}
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        if self._config.device == "cuda" or (self._config.device == "auto" and has_gpus):
            needs["GPU"] = devices
        return needs

    def _deployment(self, resources: dict[str, float]) -> Any:
        replicas, rows = self._replicas, self._config.buckets.max_batch_size
        least, most = replicas.bounds
        size: dict[str, Any] = {"num_replicas": least}
        if replicas.autoscale is not None:
            target = target_requests(rows) if replicas.target_requests == "auto" else replicas.target_requests
            scaling = {"min_replicas": least, "max_replicas": most}
            aim = {"target_ongoing_requests": target, "downscaling_factor": DOWNSCALING_FACTOR}
            delays = {"upscale_delay_s": replicas.upscale_delay_s, "downscale_delay_s": replicas.downscale_delay_s}
            look_back = {"look_back_period_s": max(min(replicas.upscale_delay_s, 30.0), 1.0), "metrics_interval_s": 1.0}
            size = {"autoscaling_config": scaling | aim | delays | look_back}
        routing = {
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"slack": replicas.slack, "policy": replicas.routing},
            "request_routing_stats_period_s": _STATS_SECONDS,
        }
        actor = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
        return serve.deployment(
            name="replica",
            max_constructor_retry_count=_ATTEMPTS,
            max_ongoing_requests=min(rows + self.limits.max_waiting, _MOST_REQUESTS),
            placement_group_bundles=[resources],
            ray_actor_options=actor,
            request_router_config=routing,
            graceful_shutdown_timeout_s=self.limits.drain_timeout_s,
            **_CARE,
            **size,
        )(Replica)

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve behind Ray's proxies until SIGTERM or Ctrl-C; running answers are finished first, or until another one.

        Raises:
            ArgumentError: as `start`.
        """
        asked = asyncio.Event()
        try:
            await self.start()
            on_signals(lambda _: asked.set())
            on_ready()
            await asked.wait()
            log.warning("finishing what runs; ask again to end at once")
            off_signals()  # Ray's processes end with this one
        finally:
            await asyncio.to_thread(self.close)

    def app(self) -> Starlette:
        """Return the front of this process, once the replicas were started."""
        app, self.front = make_front(HttpChannel(self.handle()), self.limits)
        return app

    def handle(self) -> DeploymentHandle:
        """Return the handle of the replicas, once they were started."""
        return serve.get_deployment_handle("replica", self._application)

    def close(self, *, at_once: bool = False) -> None:
        """End the replicas, and a Ray that was started here; what another command deployed in a cluster stays."""
        if not ray.is_initialized():
            return
        joined = self._replicas.ray_address is not None
        if (joined or not at_once) and self._deployed_at is not None and self._latest() == self._deployed_at:
            serve.delete(self._application)
        ray.shutdown()


def join_ray(replicas: ReplicaConfig) -> None:
    """Join a cluster, or begin a Ray on this machine that nobody else can reach.

    Raises:
        ArgumentError: there is no such cluster.
    """
    if replicas.ray_address is not None:
        try:
            ray.init(address=replicas.ray_address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise ArgumentError(f"ray_address {replicas.ray_address!r} cannot be joined: {error}") from error
        return
    ray.init(include_dashboard=False, object_store_memory=_STORE_BYTES, log_to_driver=False)


def check_room(resources: dict[str, float], count: int) -> None:
    """Refuse more replicas than there are devices for.

    Raises:
        ArgumentError: there are too few.
    """
    there = ray.cluster_resources()
    for name, needed in resources.items():
        if needed * count > there.get(name, 0):
            raise ArgumentError(
                f"{count} replicas of {needed:g} {name} each need {needed * count:g}, Ray has {there.get(name, 0):g}"
            )


class ReplicaAnswers:
    """Answers the requests of a batch with replicas, as `EngineAnswers` does with one engine.

    They are calls of Ray Serve, and not of Ray Data: a call gives one answer, whose line is written as soon as it is
    there, and finds the replica that has its prefix; Data does a block again as a whole.

    Args:
        cluster: of the replicas; `start` starts it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._handle: Any = None

    async def start(self) -> None:
        """Start the replicas."""
        await self._cluster.start()
        self._handle = self._cluster.handle()

    def close(self, *, at_once: bool = False) -> None:
        """End the replicas; see `Cluster.close`."""
        self._cluster.close(at_once=at_once)

    async def answer(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        """Return status and body of the response to a request; one whose replica ended is asked of another one."""
        route = Route(prompt_blocks(request.body))
        for _ in range(ATTEMPTS):
            try:
                with as_lost_errors():
                    return await self._handle.whole.remote(request, route=route)  # type: ignore[no-any-return]
            except LostError as lost:
                log.warning("%r: %s", request.custom_id, lost)
        return 503, HttpError(503, f"{ATTEMPTS} replicas ended while they answered it").body
