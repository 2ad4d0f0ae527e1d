"""The threads of the compiled kernels: any number for any job, in any of Python's threads, and after a fork."""

import os
import threading
from pathlib import Path

import pytest
import torch
from command_line import run_python

from graphdecode.kernels.linear.linear import to_panels
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled kernels: {native.why_not()}")

ROOT = Path(__file__).parents[2]
FORKING = """
import os, threading, torch
from graphdecode.kernels.linear.linear import to_panels
from graphdecode.kernels.native import library as native
from graphdecode.kernels.native.registration import versions
draw = torch.Generator().manual_seed(3)
x, panels = torch.randn(8, 512, generator=draw), to_panels(torch.randn(2048, 512, generator=draw))
native.library()
def product(out):
    return versions("native_linear").native(out, x, panels, None, None)
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
for _ in range(300):
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
            versions("native_linear").native(each, x, to_panels(weight[: panels * 32]), None, None)
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
        call = versions("decode_attention").native(*given, 0.125, -1, 0.0, None, 1.0, "NONE", 1.0, 1e4, None, None)
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
        call = versions("native_linear").native(out, x, to_panels(panels), None, None)
        call.function(call.packed, 4)
        seen.append(len(os.listdir("/proc/self/task")))
    assert len(set(seen)) == 1
