"""What the host's memory is: what the kernel says can be had, within the limits of the control groups around us."""

from pathlib import Path

import pytest
import torch

from graphdecode import BucketConfig, memory
from graphdecode.engine.capacity import plan_capacity
from graphdecode.memory import Memory, host_memory
from graphdecode.models import describe_model

MIB = 2**20
MEMINFO = f"MemTotal: {64 * 1024} kB\nMemFree: {1024} kB\nMemAvailable: {40 * 1024} kB\nCached: {39 * 1024} kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, used: int, kept: int, *, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    total = "" if version == 2 else "total_"
    stat = f"anon 5\n{total}inactive_file {kept - 3}\n{total}active_file 3\n"
    base = f"sys/fs/cgroup{folder}"
    return {f"{base}/{names[0]}": f"{limit}\n", f"{base}/{names[1]}": f"{used}\n", f"{base}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (64, 40)),  # what was read from files lies in memory that can be had, and not in MemFree
        ({"proc/self/cgroup": "0::/\n"} | group("", str(16 * MIB), 10 * MIB, 4 * MIB), (16, 10)),
        ({"proc/self/cgroup": "0::/\n"} | group("", "max", 10 * MIB, 4 * MIB), (64, 40)),
        ({"proc/self/cgroup": "0::/a/b\n"} | group("/a/b", "max", 0, 3), (64, 40)),
        (
            {"proc/self/cgroup": "0::/a/b\n"}
            | group("/a/b", str(32 * MIB), 3 * MIB, 3)
            | group("/a", str(20 * MIB), 19 * MIB, MIB),
            (20, 2),  # the nearest limit of all around us
        ),
        (
            {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/elsewhere/docker\n0::/\n"}
            | group("/memory", str(8 * MIB), 9 * MIB, 3, version=1),
            (8, 0),  # the container sees its own group as the first one, and is over its limit
        ),
        (
            {"proc/self/cgroup": "4:memory:/\n"} | group("/memory", "9223372036854771712", 50 * MIB, 3, version=1),
            (64, 40),
        ),
    ],
)
def test_what_can_be_had_is_what_the_kernel_says_within_every_limit(files, expected, tmp_path):
    found = host_memory(machine(tmp_path, files))
    assert [round(number / MIB, 3) for number in found] == list(expected)


def test_a_system_that_does_not_tell_has_something(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert 0 < found.available <= min(found.total, 4 * 2**30)


def test_pages_of_a_cpu_are_made_of_what_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    config = BucketConfig(max_batch_size=1024, max_sequence_length=512, memory_fraction=0.5)
    model, device = describe_model("demo"), torch.device("cpu")
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(64 * MIB, 40 * MIB))
    capacity = plan_capacity(config, model, torch.float32, device)
    assert capacity.total_num_pages == 20 * MIB // capacity.page_bytes - 1
