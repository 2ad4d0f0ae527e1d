"""Several engines behind one server: the section [replicas] of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass

from graphdecode.config.key import auto_or, boolean, integer, key, keys_of, matching, none_or, number, one_of
from graphdecode.errors import ConfigError

REPLICAS = "replicas"  # the section
# Of the way down, at a time. Requests under way tell little of what few replicas could take: 17 that are half busy have
# as many as one that is full, and one step down to what these would fill leaves a backlog that takes more than 17.
DOWNSCALING_FACTOR = 0.25


@dataclass(frozen=True)
class ReplicaConfig:
    """How many engines serve one model on Ray, where they are, and who gets which request.

    Raises:
        ConfigError: a value that no cluster could work with.
    """

    count: int | None = key(
        REPLICAS,
        None,
        none_or(integer(1), "2"),
        "Engines; left out, and without autoscale: one, without Ray.",
        flag="--replicas",
    )
    autoscale: str | None = key(
        REPLICAS, None, none_or(matching(r"[1-9]\d*:[1-9]\d*", "MIN:MAX"), '"1:4"'), "Engines at least and at most."
    )
    ray_address: str | None = key(
        REPLICAS,
        None,
        none_or(matching(r"\S+", "an address"), '"10.0.0.1:6379"'),
        "A cluster to join; left out: a Ray of its own on this machine, which ends with the command.",
    )
    cpus_per_device: int = key(
        REPLICAS, 1, integer(1), "Processors that Ray reserves for each device of an engine, and that the engine uses."
    )
    direct: bool = key(
        REPLICAS, False, boolean(), "Listen in the command itself, and take answers from the engines past Ray's proxy."
    )
    fronts: int = key(REPLICAS, 1, integer(1), "Processes behind Ray's proxies that choose an engine for each request.")
    slack: int = key(
        REPLICAS,
        8,
        integer(0),
        "Requests by which an engine may be ahead of the least loaded one, and still get a request whose prompt's "
        "beginning it has seen.",
    )
    routing: str = key(
        REPLICAS,
        "prefix",
        one_of("prefix", "random"),
        "Who gets a request: prefix is the least loaded and, within slack, who has the beginning of its prompt; random "
        "is there to compare with.",
    )
    target_requests: int | str = key(
        REPLICAS,
        "auto",
        auto_or(integer(1)),
        "Requests of an engine that autoscaling aims at; auto: a quarter of max_batch_size.",
    )
    upscale_delay_s: float = key(REPLICAS, 10.0, number(0), "Load must be above the target for so long.")
    downscale_delay_s: float = key(REPLICAS, 300.0, number(0), "Load must be below the target for so long.")

    def __post_init__(self) -> None:
        for each in keys_of(self):
            each.check(getattr(self, each.field))
        least, most = self.bounds
        if least > most:
            raise ConfigError(f"autoscale must be MIN:MAX with MIN at most MAX, got {self.autoscale!r}")
        if self.autoscale is not None and self.count is not None:
            raise ConfigError("count and autoscale cannot both be given: a number of engines is fixed, or it is not")

    @property
    def wanted(self) -> bool:
        """Whether there are replicas at all."""
        return self.count is not None or self.autoscale is not None

    @property
    def bounds(self) -> tuple[int, int]:
        """Engines at least and at most."""
        if self.autoscale is None:
            return (self.count or 1,) * 2
        least, _, most = self.autoscale.partition(":")
        return int(least), int(most)


def target_requests(rows: int) -> int:
    """Return how many requests each replica should have under way, so that it can take more while others start.

    Args:
        rows: that it can decode side by side.
    """
    return max(rows // 4, 1)
