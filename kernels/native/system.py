"""What the compiled kernels ask of the operating system: Linux, and macOS, where none of this has been run.

The same in C is `native_system.h`.
"""

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

IS_MACOS = sys.platform == "darwin"
IS_KNOWN = IS_MACOS or sys.platform == "linux"
INSTALLS_COMPILER = "xcode-select --install" if IS_MACOS else "apt install gcc"
_SYSCTL = ("machdep.cpu", "hw.optional")
# as Linux names them, what macOS calls otherwise
_ARM_NAMES = {"FEAT_DotProd": "asimddp", "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "AdvSIMD": "asimd", "neon": "asimd"}
_X86_NAMES = {"avx1.0": "avx", "avx512_vbmi": "avx512vbmi"}


def is_x86() -> bool:
    """Whether this is an x86-64."""
    return platform.machine() in ("x86_64", "AMD64")


def is_arm() -> bool:
    """Whether this is a 64-bit Arm."""
    return platform.machine() in ("aarch64", "arm64")


def num_cores() -> int:
    """Return how many cores this process may use."""
    return (os.cpu_count() or 1) if IS_MACOS else len(os.sched_getaffinity(0))


def processor() -> str:
    """Return what a compiler's option "native" depends on."""
    lines = _sysctl().splitlines() if IS_MACOS else _cpuinfo().split("\n\n", 1)[0].splitlines()
    told = ("machdep.cpu.", "hw.optional.") if IS_MACOS else ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "\n".join(line for line in lines if line.startswith(told))


def extensions() -> set[str]:
    """Return the processor's extensions, as Linux names them."""
    if IS_MACOS:
        return extensions_on_macos(_sysctl())
    lines = _cpuinfo().splitlines()
    return set(next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split())


def extensions_on_macos(told: str) -> set[str]:
    """Return the extensions that sysctl tells of, as Linux names them: a list on x86, a line each on Arm."""
    words = " ".join(re.findall(r"^machdep\.cpu\.(?:leaf7_)?features: (.*)$", told, re.MULTILINE)).lower().split()
    features = re.findall(r"^hw\.optional\.(?:arm\.)?(\w+): 1$", told, re.MULTILINE)
    of_arm = {_ARM_NAMES[name] for name in features if name in _ARM_NAMES}
    return {_X86_NAMES.get(word, word) for word in words} | of_arm


def opened_library(descriptor: int) -> ctypes.CDLL:
    """Load a library by its descriptor, which stays open: what was checked is what is loaded.

    The loader takes what has the path of an earlier library for the same one; macOS loads by the path alone.
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
