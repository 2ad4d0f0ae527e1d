"""Memory of devices: how much there is, released to the system, reserved; and the garbage collector."""

from .available import Memory, free_bytes, host_memory, resident_bytes, total_bytes
from .garbage import collector_paused, collector_spared
from .release import advise, check_can_release, release_memory, storage_spans
from .reserved import GRANULE, ReservedMemory, check_can_reserve

__all__ = [
    "GRANULE",
    "Memory",
    "ReservedMemory",
    "advise",
    "check_can_release",
    "check_can_reserve",
    "collector_paused",
    "collector_spared",
    "free_bytes",
    "host_memory",
    "release_memory",
    "resident_bytes",
    "storage_spans",
    "total_bytes",
]
