"""Memory of devices: how much there is, released, reserved, in huge pages; and the garbage collector."""

from .available import Memory, free_bytes, host_memory, resident_bytes, total_bytes
from .garbage import collector_paused, collector_spared
from .pages import check_can_release, release_memory, start_joining_pages, trim_heap, wait_for_joined_pages
from .reserved import GRANULE, ReservedMemory, check_can_reserve

__all__ = [
    "GRANULE",
    "Memory",
    "ReservedMemory",
    "check_can_release",
    "check_can_reserve",
    "collector_paused",
    "collector_spared",
    "free_bytes",
    "host_memory",
    "release_memory",
    "resident_bytes",
    "start_joining_pages",
    "total_bytes",
    "trim_heap",
    "wait_for_joined_pages",
]
