"""How compiled kernels are made, kept and loaded: by one process, privately, and never without a word if not at all."""

import ctypes
import json
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from command_line import run_python
from compiled_kernels import compiled

from graphdecode.kernels.linear.linear import to_panels
from graphdecode.kernels.native import compiler as compiling
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native import system
from graphdecode.kernels.native.compiler import PORTABLE_FLAGS, Compiler, NotCompiled
from graphdecode.kernels.native.instructions import VARIABLE, instructions, sets_of_arm, sets_of_x86
from graphdecode.kernels.native.library import ELEMENTS, include_flags, source_text
from graphdecode.kernels.native.private_folder import PrivateFolder
from graphdecode.kernels.native.registration import versions

pytestmark = compiled

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
ORACLE = f"""
import runpy, sys
sys.path.insert(0, {str(TOOLS)!r})
sys.argv = ["check", "quantized-products", "one"]
runpy.run_path({str(TOOLS / "check")!r}, run_name="__main__")
"""
ANSWER = """
from graphdecode import LLM, SamplingParams
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native import system
print(native.unavailable_reason())
prompts, params = ["417+385=", "rev oceanic="], SamplingParams(temperature=0.0, max_tokens=16)
for dtype in ("float32", "float16"):
    outputs = LLM("demo", dtype=dtype).generate(prompts, params, use_tqdm=False)
    print("|".join(output.outputs[0].text.strip() for output in outputs))
"""
ANSWERS = ["802|cinaeco"] * 2  # in either dtype
REASON = "from graphdecode.kernels.native import library; print(library.unavailable_reason())"
# a compiler that makes a library of nothing, where it does not matter what is made
QUICKLY = """case "$*" in *-shared*) exec cc "$@" <<'END'
char filler[60000] = {1};
void parallel(void) {}
void choose_token(void) {}
void share_parallel(void *shared) {}
void share_choose_token(void *shared) {}
END
;; esac; exec cc "$@"
"""
FILE = (
    "from graphdecode.kernels.native import library as native; print(native.unavailable_reason(), native._load().file)"
)


def started(code: str, **environment: str) -> subprocess.Popen:
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given
    )


def run(code: str, **environment: str) -> tuple[list[str], str]:
    """Return what a new process printed, and what it said on standard error."""
    process = started(code, **environment)
    out, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    return out.splitlines(), said


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("environment", "reason", "expected"),
    [
        ({"GRAPHDECODE_NATIVE": "0"}, "GRAPHDECODE_NATIVE is 0", ANSWERS),
        ({"GRAPHDECODE_NATIVE": "No"}, "GRAPHDECODE_NATIVE is No", []),
        (
            {"CC": "no-such-compiler"},
            "'no-such-compiler' cannot be run (No such file or directory): install it",
            ANSWERS,
        ),
        ({"CC": "", "PATH": ""}, "no C compiler was found: install gcc or clang (`apt install gcc`)", []),
        ({"CC": "false"}, "'false' cannot be run (`false --version` ended with 1): install it", []),
        ({"CC": '"'}, "CC is '\"', which is not a command", []),
    ],
)
def test_without_compiled_kernels_the_answers_are_the_same_and_the_reason_is_known(
    environment, reason, expected, tmp_path
):
    code = ANSWER if expected else REASON  # whatever the reason is, the same operators give the answers
    (why, *answers), said = run(code, GRAPHDECODE_CACHE_DIR=str(tmp_path), **environment)
    assert reason in why
    assert answers == expected
    lines = [line for line in said.splitlines() if "no compiled kernels" in line]
    assert len(lines) == ("CC" in environment)  # once, and not where it was asked for
    assert all(reason in line and "4 to 20 times as long" in line and "GRAPHDECODE_NATIVE=0" in line for line in lines)


def test_a_compilation_that_takes_long_is_announced(tmp_path):
    slow = script(tmp_path / "slow", 'case "$*" in *-shared*) sleep 2 ;; esac; ' + QUICKLY)
    for times in (1, 0):  # the second time they are there
        (why,), said = run(FILE.replace("native._load().file", "''"), GRAPHDECODE_CACHE_DIR=str(tmp_path), CC=slow)
        assert why.strip() == "None"
        assert said.count("compiling kernels for") == times


@pytest.mark.parametrize("when", ["before", "while"])
def test_kernels_are_not_made_of_sources_that_changed_under_the_process(when, tmp_path, monkeypatch):
    sources = tmp_path / "kernels" / native.FOLDER.name
    shutil.copytree(native.FOLDER.parent, sources.parent)
    change = f"echo >> {sources}/native.h"
    monkeypatch.setattr(native, "FOLDER", sources)
    monkeypatch.setattr(native, "LOADED", {})
    monkeypatch.setenv("GRAPHDECODE_CACHE_DIR", str(tmp_path / "cache"))
    compiling_changes = f'case "$*" in *-shared*) {change} ;; esac; {QUICKLY}'
    monkeypatch.setenv("CC", script(tmp_path / "cc", compiling_changes if when == "while" else QUICKLY))
    if when == "before":
        subprocess.run(change, shell=True, check=True)
    assert native.library() is None
    assert "have changed since this process started" in native.unavailable_reason()
    assert not list(tmp_path.glob("cache/native/*.so"))


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of its own")
def test_in_a_terminal_the_seconds_of_a_compilation_stand_on_a_short_line(tmp_path):
    slow = script(tmp_path / "slow", 'case "$*" in *-shared*) sleep 3 ;; esac; ' + QUICKLY)
    given = {**os.environ, "PYTHONPATH": str(ROOT), "GRAPHDECODE_CACHE_DIR": str(tmp_path), "CC": slow}
    terminal, its_end = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", FILE], stderr=its_end, env=given, timeout=500, check=True)
        shown = os.read(terminal, 65536).decode()
    finally:
        os.close(its_end)
        os.close(terminal)
    announced, *counted = shown.rstrip().replace("\r\n", "\n").split("\r")
    assert announced.count("compiling kernels for") == 1
    assert announced.endswith("or more\n")
    assert counted
    assert all(re.fullmatch(r"\d+ s", each) for each in counted)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is one of x86-64")
def test_on_a_processor_with_shorter_vectors_the_answers_are_the_same():
    environment = {"GRAPHDECODE_CACHE_DIR": os.environ["GRAPHDECODE_TEST_RUN"], VARIABLE: "avx2"}
    assert run(ANSWER, **environment)[0] == ["None", *ANSWERS]
    # and all forms of few bits, caches of 8 bits, and fp16, are as near to float64
    (line,), _ = run(ORACLE, **environment)
    seen = json.loads(line)
    assert not {"AVX512F", "AVX512BF16"} & set(seen["extensions"])
    shares = {
        (part, form): found["worst_share"] for part, forms in seen["parts"].items() for form, found in forms.items()
    }
    assert len(shares) > 40
    assert all("float16" in shares["blocks", kind] for kind in ("Q4_0", "Q6_K"))
    assert all(share <= 1 for of_dtype in shares.values() for share in of_dtype.values()), shares


@pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")
@pytest.mark.parametrize("level", ["-O0", *(pytest.param(each, marks=pytest.mark.slow) for each in ("-O1", "-O3"))])
def test_clang_compiles_the_kernels_too(tmp_path, level):
    clang = script(tmp_path / "clang", f'exec clang "$@" {level}')
    assert run(ANSWER, GRAPHDECODE_CACHE_DIR=str(tmp_path), CC=clang)[0] == ["None", *ANSWERS]


@pytest.mark.skipif(not system.is_x86(), reason="needs a compiler for x86-64")
def test_with_matrix_tiles_the_kernels_compile_without_warnings(tmp_path):
    extensions = (
        "bmi1 avx avx2 fma f16c bmi2 avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16 avx512_vnni avx512vbmi"
    )
    flags = sets_of_x86({*extensions.split(), "amx_tile", "amx_bf16"})["amx"].flags
    compiler = Compiler(["cc", *flags, "-Wall", "-Werror", "-Wno-unused-function", *PORTABLE_FLAGS, "-O0"], "", "")
    compiler.compile({tmp_path / "kernels.so": source_text(ELEMENTS[torch.bfloat16])}, include_flags())


SHARING = """
#include "native_threads.h"
static _Atomic int done[600];
static void count(const void *unused, int64_t begin, int64_t end) {
    (void)unused;
    for (int64_t i = begin; i < end; i++) atomic_fetch_add(&done[i], 1);
}
/* Return the first of `items` that is not done exactly once, or -1. */
int64_t wrong_item(int64_t threads, int64_t items, int64_t least) {
    for (int64_t i = 0; i < 600; i++) done[i] = 0;
    parallel(threads, count, 0, items, least);
    for (int64_t i = 0; i < 600; i++)
        if (done[i] != (i < items)) return i;
    return -1;
}
"""


def test_threads_do_each_item_once_for_any_number_of_items(tmp_path):
    Compiler.detect().compile({tmp_path / "sharing.so": SHARING}, include_flags())
    wrong_item = ctypes.CDLL(str(tmp_path / "sharing.so")).wrong_item
    wrong_item.argtypes, wrong_item.restype = [ctypes.c_int64] * 3, ctypes.c_int64
    for threads in (1, 2, 3, 7, 16):
        for items in (*range(40), 255, 256, 599):
            for least in (1, 2, 8, 600):
                assert wrong_item(threads, items, least) == -1, (threads, items, least)


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs a cross compiler for aarch64")
@pytest.mark.parametrize("level", ["-O0", pytest.param("-O1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["portable", "neon_bf16"])
def test_another_architecture_compiles_the_kernels_without_flags_of_this_one(name, level, tmp_path):
    flags = sets_of_arm({"asimd", "asimddp", "bf16"})[name].flags
    strict = ("-Wall", "-Werror", "-Wno-unused-function", "-Wno-maybe-uninitialized")  # of -O1 that sees too little
    compiler = Compiler(["aarch64-linux-gnu-gcc", *flags, *strict, *PORTABLE_FLAGS, level], "", "")
    compiler.compile({tmp_path / f"{kind}.so": source_text(kind) for kind in ELEMENTS.values()}, include_flags())
    for kind in ELEMENTS.values():
        header = (tmp_path / f"{kind}.so").read_bytes()[:20]
        assert header[:4] == b"\x7fELF"
        assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


def test_elsewhere_there_are_none_and_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(system, "IS_SUPPORTED", False)
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(NotCompiled, match="Linux and macOS alone, this is Windows"):
        Compiler.detect()


def test_a_kernel_that_reads_what_it_is_not_given_fails_to_compile(tmp_path):
    text = source_text("f32")
    assert "TENSOR(const int32_t) positions;" in text
    for wrong in ("TENSOR(const int32_t) place;", "int64_t positions;"):
        with pytest.raises(NotCompiled, match="positions"):
            Compiler.detect().compile(
                {tmp_path / "kernels.so": text.replace("TENSOR(const int32_t) positions;", wrong)},
                ["-Werror=incompatible-pointer-types", *include_flags()],
            )


def test_one_process_compiles_while_others_wait_and_later_ones_find_it(tmp_path):
    log = tmp_path / "log"
    counting = f'case "$*" in *-shared*) echo run >> {log}; sleep 2;; esac; {QUICKLY}'
    environment = {"CC": script(tmp_path / "cc", counting), "GRAPHDECODE_CACHE_DIR": str(tmp_path / "new" / "cache")}
    processes = [started(FILE, **environment) for _ in range(2)]
    outputs = [process.communicate(timeout=500) for process in processes]
    assert all("compiling kernels for" in said for _, said in outputs)
    first, second = [out.split() for out, _ in outputs]
    assert first == second
    assert first[0] == "None"
    made = Path(first[1])
    at = made.stat().st_mtime_ns
    assert run(FILE, **environment)[0][0].split()[1] == str(made)
    assert made.stat().st_mtime_ns == at
    assert log.read_text().splitlines() == ["run"]
    assert {file.name for file in made.parent.iterdir()} == {made.name, f"{made.name}.digest", "lock"}
    assert stat.S_IMODE(made.stat().st_mode) == stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    made.write_bytes(made.read_bytes()[:5000])  # as a full disk or a crash would leave it
    assert run(FILE, **environment)[0][0].split() == ["None", str(made)]
    assert log.read_text().splitlines() == ["run", "run"]
    assert made.stat().st_size > 50_000


def test_a_part_is_compiled_for_an_element_type_when_it_is_asked_for(tmp_path):
    code = """
import torch
from graphdecode.kernels.native import library as native
def compiled():
    print(*sorted(file.stem.partition("-")[2] for file in native._load().file.parent.glob("*.so")))
assert native.library() is not None; compiled()
assert native.library(torch.float16) is not None; compiled()
assert native.library(torch.float32, "linear") is not None; compiled()
"""
    cc = script(tmp_path / "cc", QUICKLY)
    half = "attention-f16 base-f16 base-f32 linear-f16"
    assert run(code, CC=cc, GRAPHDECODE_CACHE_DIR=str(tmp_path / "cache"))[0] == [
        "base-f32",
        half,
        f"{half} linear-f32",
    ]


def test_where_one_part_is_missing_an_element_type_has_no_kernels(monkeypatch):
    broken = native.LoadedLibrary(None, None, None, "cc could not compile the kernels")
    monkeypatch.setitem(native.LOADED, native.Unit("f32", "linear"), broken)
    assert native.library() is not None
    assert native.library(torch.float32) is native.library(torch.float32, "linear") is None
    assert native.unavailable_reason() == broken.reason
    assert not native.is_expected(torch.float32)


def test_each_kernel_is_in_one_part_and_what_has_no_element_type_is_compiled_once():
    def compiled_for(kind: str) -> list[str]:
        return [name for part in native.PARTS for name in re.findall(r'"(\w+/\w+).c"', source_text(kind, part))]

    every = sorted(f"{file.parent.name}/{file.stem}" for file in native.FOLDER.parent.glob("*/*.c"))
    assert sorted(compiled_for("f32")) == every
    assert compiled_for("bf16") == compiled_for("f16")
    assert set(compiled_for("f16")) < set(every) - {"attention/attention_plan", "linear/pack_codes", "model/advance"}


def test_the_next_library_is_compiled_as_soon_as_a_core_is_free(tmp_path, monkeypatch):
    """Not when the first of those that are being compiled ends."""
    monkeypatch.setattr(system, "num_cores", lambda: 2)
    log = tmp_path / "log"
    body = f"for made; do :; done; case $made in *long.so) sleep 2;; esac; basename $made .so >> {log}"
    compiler = Compiler([script(tmp_path / "cc", body)], "", "")
    compiler.compile({tmp_path / f"{name}.so": "" for name in ("long", "short", "last")}, [])
    assert log.read_text().split() == ["short", "last", "long"]


def test_where_a_folder_has_no_room_the_next_one_is_taken_and_that_is_said(tmp_path):
    full = f'case "$*" in *{tmp_path}/full*) echo "cc: No space left on device" >&2; exit 1;; esac; {QUICKLY}'
    (tmp_path / "tmp").mkdir()
    environment = {"CC": script(tmp_path / "cc", full), "TMPDIR": str(tmp_path / "tmp")}
    (out,), said = run(FILE, GRAPHDECODE_CACHE_DIR=str(tmp_path / "full"), **environment)
    assert out.split()[1].startswith(f"{tmp_path}/tmp/graphdecode-{os.geteuid()}/")
    assert said.count("No space left on device") == 1
    assert "GRAPHDECODE_CACHE_DIR" in said
    # nor does it matter that there is no folder at all
    homeless = {"HOME": "", "XDG_CACHE_HOME": "", "GRAPHDECODE_CACHE_DIR": "/dev/null/none"}
    (out,), said = run(FILE, **environment, **homeless)
    assert out.split()[1].startswith(f"{tmp_path}/tmp/graphdecode-")
    assert "Not a directory" in said


def test_without_any_folder_torch_does_the_work(tmp_path):
    (out,), said = run(FILE, GRAPHDECODE_CACHE_DIR="/dev/null/a", TMPDIR=str(tmp_path), CC=script(
        tmp_path / "cc", 'case "$*" in *--version*) exec cc "$@";; esac; echo "cc: Read-only file system" >&2; exit 1'
    ))  # fmt: skip
    assert out.startswith("no folder for compiled kernels can be written")
    assert said.count("there are no compiled kernels") == 1


def test_a_user_without_a_home_is_no_error(monkeypatch):
    monkeypatch.delenv("GRAPHDECODE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(FileNotFoundError, match="no home"):
        native.cache_folder()


@pytest.fixture
def folder(tmp_path):
    """A private folder that keeps one file, `kept`."""
    (tmp_path / "source").write_bytes(b"library" * 1000)
    folder = PrivateFolder(tmp_path / "private")
    folder.put(tmp_path / "source", "kept")
    yield folder
    folder.close()


def test_what_was_put_is_found(folder):
    descriptor = folder.opened("kept")
    assert os.pread(descriptor, 10_000, 0) == b"library" * 1000
    os.close(descriptor)
    assert folder.opened("another") is None


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "no digest", "empty digest"])
def test_a_damaged_file_is_not_found(folder, damage):
    kept, digest = folder.path / "kept", folder.path / "kept.digest"
    if damage == "no digest":
        digest.unlink()
    elif damage == "empty digest":
        digest.write_bytes(b"")
    else:
        kept.write_bytes({"cut": b"library", "empty": b"", "changed": b"Library" + b"library" * 999}[damage])
    assert folder.opened("kept") is None


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o701, 0o755])
def test_a_folder_that_others_can_reach_is_refused(tmp_path, mode):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(PermissionError, match=f"mode {mode:o}; it must be of user {os.geteuid()} with mode 700"):
        PrivateFolder(tmp_path / "open")


def test_a_folder_or_file_of_another_user_is_refused(folder, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {mine}"):
        PrivateFolder(folder.path)
    with pytest.raises(PermissionError, match=f"kept belongs to user {mine}"):
        folder.opened("kept")


def test_a_file_that_others_can_write_is_refused(folder):
    (folder.path / "kept").chmod(0o720)
    with pytest.raises(PermissionError, match="mode 720"):
        folder.opened("kept")


def test_links_are_not_followed(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(OSError, match="Not a directory|symbolic link"):
        PrivateFolder(tmp_path / "link")
    (folder.path / "kept").rename(folder.path / "other")
    (folder.path / "kept").symlink_to(folder.path / "other")
    with pytest.raises(OSError, match="symbolic link"):
        folder.opened("kept")


def test_waiting_for_another_process_has_an_end(folder):
    other = PrivateFolder(folder.path)
    with other.locked(1), pytest.raises(TimeoutError, match="held the lock"), folder.locked(0.2):
        pass
    other.close()
    with folder.locked(0.2):
        pass


def test_what_a_killed_process_left_is_removed(folder):
    (folder.path / "making-1").mkdir()
    (folder.path / "making-1" / "half.so").write_bytes(b"half")
    with folder.locked(1), folder.scratch() as scratch:
        assert [left.name for left in folder.path.glob("making-*")] == [scratch.name]
    assert not list(folder.path.glob("making-*"))


def test_a_stopped_compiler_leaves_neither_child_nor_file(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 1)
    slow = script(tmp_path / "cc", f"sleep 300 & echo $! > {tmp_path}/child; wait")
    with folder.locked(1), folder.scratch() as scratch, pytest.raises(NotCompiled, match="stopped after 1 s"):
        Compiler([slow], "", "").compile({scratch / "kernels.so": ""}, [])
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 60
    while _is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_running(child)
    assert not list(folder.path.glob("making-*"))


def test_a_killed_compiler_is_a_reason(tmp_path):
    killed = script(tmp_path / "cc", f"kill -{signal.SIGKILL.value} $$")
    with pytest.raises(NotCompiled, match="could not compile the kernels: exit code -9"):
        Compiler([killed], "", "").compile({tmp_path / "kernels.so": ""}, [])


def test_the_description_names_folder_and_compiler():
    text = native.describe()
    assert text.startswith("compiled kernels: /")
    assert " ".join(instructions().flags) in text


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


FORKING = """
import os, threading, torch
from graphdecode.kernels.linear.linear import to_panels
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions
draw = torch.Generator().manual_seed(3)
x, panels = torch.randn(8, 512, generator=draw), to_panels(torch.randn(2048, 512, generator=draw))
native.library()
def product(out):
    return versions("native_linear").native(out, x, panels, None)
expected = torch.empty(8, 2048)
call = product(expected)
call.function(call.packed, 4)
stop = threading.Event()
def work():
    out = torch.empty(8, 2048)
    mine = product(out)
    while not stop.is_set():
        mine.function(mine.packed, 4)
worker = threading.Thread(target=work)
worker.start()
codes = []
for _ in range(100):
    child = os.fork()
    if child == 0:
        out = torch.full((8, 2048), -1.0)
        mine = product(out)
        for _ in range(3):
            mine.function(mine.packed, 4)
        os._exit(0 if out.numpy().tobytes() == expected.numpy().tobytes() else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
worker.join()
print(set(codes))
"""


def test_a_child_that_was_forked_while_a_kernel_ran_computes_the_same():
    assert run_python(FORKING).split() == ["{0}"]


@pytest.mark.parametrize("threads", [2, 3, 5, 64])
def test_every_part_of_a_job_is_done_however_many_there_are(threads):
    """Panels are dealt in chunks, long ones first; each is multiplied, whatever their number leaves for the last."""
    draw = torch.Generator().manual_seed(7)
    x, weight = torch.randn(16, 512, generator=draw), torch.randn(150 * 32, 512, generator=draw)
    for panels in (1, 2, 9, 10, 11, 12, 13, 23, 40, 59, 61, 150):
        out, expected = torch.full((2, 16, panels * 32), torch.nan)
        call, alone = (
            versions("native_linear").native(each, x, to_panels(weight[: panels * 32]), None)
            for each in (out, expected)
        )
        call.function(call.packed, threads)
        alone.function(alone.packed, 1)
        assert torch.equal(out, expected), panels


def test_two_threads_with_different_numbers_of_threads_compute_the_same():
    """The parts that a job is dealt in follow its own number of threads, whatever another's is."""
    draw = torch.Generator().manual_seed(5)
    rows, heads, dim, pages = 3, 8, 64, 17
    q = torch.randn(rows, heads, dim, generator=draw)
    k_cache, v_cache = torch.randn(2, pages, 16, heads, dim, generator=draw)
    table = torch.randint(0, pages, (rows, 16), generator=draw).int()
    lengths = torch.tensor([250, 3, 128], dtype=torch.int32)
    nothing, plan = torch.zeros(1), torch.zeros(1, dtype=torch.int32)

    def attend(out, threads):
        given = (out, None, q, k_cache, v_cache, table, None, lengths, plan, nothing, nothing, plan, 1, 1)
        options = (0.125, -1, 0.0, None, False)
        call = versions("decode_attention").native(*given, *options, 1.0, "NONE", 1.0, 1e4, None, None)
        call.function(call.packed, threads)

    expected = torch.empty_like(q)
    attend(expected, 1)
    wrong = []

    def work(threads):
        for _ in range(200):
            guarded = torch.full((rows + 2, heads, dim), -7.0)
            attend(guarded[1:-1], threads)
            if not torch.equal(guarded[1:-1], expected) or not (guarded[[0, -1]] == -7.0).all():
                wrong.append(threads)

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (2, 7, 64, 10**6, -1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_all_element_types_share_the_threads():
    draw = torch.Generator().manual_seed(3)
    seen = []
    for dtype in native.ELEMENTS:
        x, panels = torch.randn(8, 512, generator=draw).to(dtype), torch.randn(2048, 512, generator=draw).to(dtype)
        out = torch.empty(8, 2048, dtype=dtype)
        call = versions("native_linear").native(out, x, to_panels(panels), None)
        call.function(call.packed, 4)
        seen.append(len(os.listdir("/proc/self/task")))
    assert len(set(seen)) == 1
