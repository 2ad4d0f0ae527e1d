"""The compiled kernels' interface to the operating system: Linux, and macOS (never run).

The C counterpart is `native_system.h`.
"""

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

IS_MACOS = sys.platform == "darwin"
IS_SUPPORTED = IS_MACOS or sys.platform == "linux"
INSTALLS_COMPILER = "xcode-select --install" if IS_MACOS else "apt install gcc"
_SYSCTL = ("machdep.cpu", "hw.optional")
# Linux's names of extensions that macOS names otherwise
_ARM_NAMES = {"FEAT_DotProd": "asimddp", "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "AdvSIMD": "asimd", "neon": "asimd"}
_X86_NAMES = {"avx1.0": "avx", "avx512_vbmi": "avx512vbmi"}


def is_x86() -> bool:
    """Whether this is an x86-64."""
    return platform.machine() in ("x86_64", "AMD64")


def is_intel() -> bool:
    """Whether Intel made this processor."""
    return "GenuineIntel" in (_sysctl() if IS_MACOS else _cpuinfo().split("\n\n", 1)[0])


def is_arm() -> bool:
    """Whether this is a 64-bit Arm."""
    return platform.machine() in ("aarch64", "arm64")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return (os.cpu_count() or 1) if IS_MACOS else len(os.sched_getaffinity(0))


def processor() -> str:
    """Return a description of the processor, on which the compiler's option "native" depends."""
    lines = _sysctl().splitlines() if IS_MACOS else _cpuinfo().split("\n\n", 1)[0].splitlines()
    names = ("machdep.cpu.", "hw.optional.") if IS_MACOS else ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "\n".join(line for line in lines if line.startswith(names))


def extensions() -> set[str]:
    """Return the processor's extensions, by Linux's names."""
    if IS_MACOS:
        return extensions_on_macos(_sysctl())
    lines = _cpuinfo().splitlines()
    return set(next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split())


def extensions_on_macos(settings: str) -> set[str]:
    """Return the extensions from sysctl, by Linux's names: a list on x86, one line each on Arm."""
    words = " ".join(re.findall(r"^machdep\.cpu\.(?:leaf7_)?features: (.*)$", settings, re.MULTILINE)).lower().split()
    features = re.findall(r"^hw\.optional\.(?:arm\.)?(\w+): 1$", settings, re.MULTILINE)
    of_arm = {_ARM_NAMES[name] for name in features if name in _ARM_NAMES}
    return {_X86_NAMES.get(word, word) for word in words} | of_arm


def opened_library(descriptor: int) -> ctypes.CDLL:
    """Load a library by its descriptor, so that the checked file is the loaded one; the descriptor stays open.

    The loader identifies libraries by path; macOS can only load by path.
    """
    if not IS_MACOS:
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    import fcntl

    path = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))  # type: ignore[attr-defined]
    return ctypes.CDLL(path.rstrip(b"\0").decode())


def _cpuinfo() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


def _sysctl() -> str:
    return subprocess.run(["sysctl", *_SYSCTL], capture_output=True, text=True, check=False).stdout
