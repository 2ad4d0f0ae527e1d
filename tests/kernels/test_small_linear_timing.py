"""The contest between the products of few rows: who wins, who is dropped, and how the clock captures."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graphdecode.kernels.linear.linear import linear
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, candidates, tiled_config
from graphdecode.kernels.linear.weight_tiles import tiled
from graphdecode.linear import linear_choice, small_linear_timing
from graphdecode.linear.linear_choice import DEQUANTIZED, ChoiceCache, LinearChoice, LinearTuner
from graphdecode.linear.small_linear_timing import (
    FUSED_FORMS,
    Contest,
    FusedForm,
    GraphClock,
    TiledOperand,
    fastest_product,
    fastest_tiled,
)


def weight_of(out_features, in_features, dtype=torch.float32):
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)


_NO_CODE = SimpleNamespace(co_freevars=())  # of a bound method


class StandInClock:
    """Runs every call, and says what a test wants to hear."""

    units = 132

    def __init__(self, seconds, has_pdl=True):
        self._seconds = seconds
        self.has_pdl = has_pdl
        self.before = {}
        self.last = {}
        self.timed = []

    def seconds(self, calls):
        for call in calls:
            call()
        names = [*getattr(calls[0], "__code__", _NO_CODE).co_freevars]
        if "config" not in names:
            self.timed.append("nothing")
            return 1e-6
        config = calls[0].__closure__[names.index("config")].cell_contents
        if config is None:
            self.timed.append("plain")
            return 11e-6
        self.timed.append(config)
        return 1e-6 + self._seconds(config)


def contest(seconds, rows=8, has_pdl=True, dtype=torch.bfloat16, place="v"):
    clock = StandInClock(seconds, has_pdl)
    fused = FUSED_FORMS.get(place, FusedForm())
    winner, times = fastest_product(weight_of(64, 512, dtype), None, rows, clock, fused)
    return winner, times, clock.timed[2:]


def test_the_fastest_candidate_wins_and_all_are_tried_with_an_early_start():
    all_configs = [config._replace(pdl=True) for config in candidates(64, 512, 2, 8, 132)]
    winner, times, timed = contest(lambda config: 4e-6 if config == all_configs[2] else 8e-6)
    assert winner == all_configs[2]
    assert timed[: len(all_configs)] == all_configs
    varied = timed[len(all_configs) :]
    assert varied[0]._replace(prefetch=True) == winner
    assert [(config.pdl, config.prefetch) for config in varied] == [(True, False), (False, True)] * 2
    assert times["plain"] == pytest.approx(10e-6)
    assert times[str(winner)] == pytest.approx(4e-6)
    assert len(times) == len(timed) + 1


def test_a_contest_keeps_neither_copies_of_its_weight_nor_the_contests_before_it(monkeypatch):
    clone, copies, clock = Tensor.clone, [], StandInClock(lambda _: 5e-6)

    def noted(tensor, *args, **kwargs):
        copy = clone(tensor, *args, **kwargs)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(Tensor, "clone", noted)
    o, gate_up = weight_of(64, 512, torch.bfloat16), weight_of(128, 64, torch.bfloat16)
    first = weakref.ref(o)
    fastest_product(o, None, 8, clock, FUSED_FORMS["o"])
    alive = [copy() for copy in copies]
    assert len(copies) > 2
    assert not [copy for copy in alive if copy is not None and copy.shape == o.shape]
    del o, alive
    fastest_product(gate_up, None, 8, clock, FUSED_FORMS["gate_up"])
    gc.collect()
    assert first() is None


def test_no_early_start_where_the_gpu_has_none():
    _, _, timed = contest(lambda _: 5e-6, has_pdl=False)
    assert timed
    assert not any(config.pdl for config in timed)


@pytest.mark.parametrize(
    ("place", "rows", "may"), [("gate_up", 1, False), ("gate_up", 16, False), ("gate_up", 17, True), ("qkv", 1, True)]
)
def test_a_gated_product_of_few_rows_does_not_start_early(place, rows, may):
    _, _, timed = contest(lambda _: 5e-6, rows=rows, place=place)
    assert any(config.pdl for config in timed) == may


@pytest.mark.parametrize("seconds", [20e-6, 9.9e-6])
def test_cublas_stays_where_no_candidate_is_clearly_faster(seconds):
    assert contest(lambda _: seconds)[0] is None


def test_a_wrong_candidate_is_dropped_with_a_warning(monkeypatch):
    """However fast it is."""
    fast, fickle, broken, *_ = candidates(64, 512, 2, 8, 132)
    calls = []

    def faulty(out, x, weight, bias, counters, config, **_):
        calls.append(config)
        if config == broken:
            raise RuntimeError("out of resources")
        linear(out, x, weight, bias)
        if config == fast:
            out[0, 0] += 100
        if config == fickle:
            out[0, 0] += len(calls) % 2

    monkeypatch.setattr(small_linear_timing, "small_linear", faulty)
    with pytest.warns(RuntimeWarning) as caught:
        winner, times, _ = contest(lambda config: 1e-6 if config in (fast, fickle, broken) else 5e-6, has_pdl=False)
    assert winner not in (None, fast, fickle, broken)
    assert not {str(fast), str(fickle), str(broken)} & times.keys()
    told = [str(warning.message) for warning in caught]
    assert len(told) == 3
    assert "is off by " in told[0]
    assert "same bits" in told[1]
    assert "out of resources" in told[2]


def test_a_candidate_that_writes_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(small_linear_timing, "small_linear", lambda *_, **__: None)
    with pytest.warns(RuntimeWarning, match="is off by nan"):
        assert contest(lambda _: 1e-6)[0] is None


def test_a_fused_form_is_timed_as_it_is_captured_and_cublas_with_the_launches_that_it_needs_beside(monkeypatch):
    made = []

    def noted(name):
        real = getattr(small_linear_timing, name)

        def call(*arguments, **options):
            made.append((name, options.get("epilogue"), options.get("gain") is not None))
            real(*arguments, **options)

        monkeypatch.setattr(small_linear_timing, name, call)

    for name in ("rms_norm", "add_rms_norm", "act_mul", "linear", "small_linear"):
        noted(name)
    plain = {"qkv": ["rms_norm", "linear"], "gate_up": ["rms_norm", "linear", "act_mul"]}
    plain |= {"down": ["linear", "add_rms_norm"], "lm_head": ["rms_norm", "linear"]}
    for place, launches in plain.items():
        fused = FUSED_FORMS[place]
        one = Contest(weight_of(64, 128), None, 2, fused)
        config = candidates(64, 128, 4, 2, 132)[0]
        assert one.problem(config) is None
        made.clear()
        one.calls(config)[0]()
        assert made == [("rms_norm", None, False), ("small_linear", fused.epilogue, fused.is_normed)]
        made.clear()
        one.calls(None)[0]()
        assert [name for name, *_ in made] == ["rms_norm", *launches]


def test_a_contest_draws_nothing_that_others_would_draw():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Contest(weight_of(64, 256), None, 4, cold_bytes=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_weights_are_rotated_until_no_cache_holds_them():
    weight = weight_of(64, 256)
    cold = Contest(weight, None, 4, cold_bytes=10 * weight.nbytes)
    calls = cold.calls(None)
    read = {id(call.__closure__[[*call.__code__.co_freevars].index("weight")].cell_contents) for call in calls}
    assert len(read) == len(calls) == 10


class StandInGpu:
    """Takes the place of torch.cuda: captured calls run at each replay, which takes a second more every time."""

    def __init__(self, monkeypatch):
        gpu, self.calls, self.captured, self.capturing, self.now_ms = self, [], None, False, 0.0

        class Graph:
            def capture_begin(self, capture_error_mode):
                assert gpu.calls[-1] == "synchronize", "the capture must find the device idle"
                gpu.captured, gpu.capturing = [], True
                gpu.calls.append("begin")

            def capture_end(self):
                gpu.capturing = False
                gpu.calls.append("end")

            def replay(self):
                gpu.calls.append("replay")
                gpu.now_ms += 1000.0 * gpu.calls.count("replay")

            def reset(self):
                gpu.calls.append("reset")

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at_ms = gpu.now_ms

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return other.at_ms - self.at_ms

        replacements = {
            "CUDAGraph": Graph,
            "Event": Event,
            "Stream": lambda device: "side",
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device: self.calls.append("synchronize"),
            "get_device_capability": lambda device: (9, 0),
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)

    def call(self):
        self.calls.append("captured" if self.capturing else "run")


@pytest.fixture
def gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    return StandInGpu(monkeypatch)


def test_the_clock_compiles_before_it_captures_and_takes_the_median_of_replays(gpu):
    clock = GraphClock(torch.device("cuda", 99))
    assert (clock.units, clock.has_pdl) == (132, True)
    seconds = clock.seconds([gpu.call] * 4)
    assert gpu.calls[:10] == ["synchronize", "run", "run", "synchronize", "begin", *["captured"] * 4, "end"]
    assert gpu.calls[10:] == ["replay"] * 11 + ["reset"]
    assert seconds == pytest.approx(7 / 4)  # the replays take 1 to 11 s; the first two do not count


def test_a_capture_that_fails_is_ended(gpu):
    def fails():
        gpu.call()
        if gpu.capturing:
            raise RuntimeError("not in a capture")

    with pytest.raises(RuntimeError, match="not in a capture"):
        GraphClock(torch.device("cuda", 99)).seconds([fails])
    assert gpu.calls[-3:] == ["begin", "captured", "end"]


SKINNY = SmallLinearConfig("skinny", 8, 128, 1, 4, 2, True, 8)


def tiles_of(rows=64, columns=512):
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    return TiledOperand(tiled(codes, "s8", torch.full((rows, 1), 0.01), 0), columns, torch.bfloat16)


@pytest.fixture
def has_skinny(monkeypatch):
    """Let the CUDA C++ kernel be a candidate on a CPU, where the torch version stands for it."""
    monkeypatch.setattr(small_linear_timing, "skinny_candidates", lambda _x, _weight, pdl: [SKINNY._replace(pdl=pdl)])


@pytest.mark.parametrize("fast", ["dot", "skinny"])
def test_the_faster_language_wins(has_skinny, fast):
    first = tiled_config(1, 64, 512, tiles_of().tiles.layout, 132)
    clock = StandInClock(lambda config: 4e-6 if config.kind == fast else 8e-6)
    winner, times = fastest_tiled(tiles_of(), None, 1, clock, FusedForm(), first)
    assert winner == (first if fast == "dot" else SKINNY)
    assert set(times) == {str(first), str(SKINNY), str(SKINNY._replace(pdl=False))}
    winner, _, timed = contest(lambda config: 4e-6 if config.kind == fast else 8e-6)
    assert winner.kind == fast
    assert {config.pdl for config in timed if config.kind == "skinny"} == {True, False}


@pytest.mark.parametrize(("tiles_us", "is_dequantized"), [(30, True), (10.1, False), (10.5, True), (5, False)])
def test_many_rows_are_dequantized_first_where_that_is_clearly_faster(tiles_us, is_dequantized):
    """The stand-in for the clock says 10 us of cuBLAS, the weight's values with it."""
    operand = tiles_of()._replace(scratch=torch.empty(1 << 15, dtype=torch.bfloat16))
    first = tiled_config(128, 64, 512, operand.tiles.layout, 132)
    clock = StandInClock(lambda _: tiles_us * 1e-6)
    winner, times = fastest_tiled(operand, None, 128, clock, FUSED_FORMS["o"], first)
    assert winner == (None if is_dequantized else first)
    assert times == pytest.approx({str(first): tiles_us * 1e-6, DEQUANTIZED: 10e-6})
    assert operand.scratch.isfinite().any()


def test_choices_of_many_rows_outlast_a_restart_and_a_narrow_weight_has_none(tmp_path, monkeypatch):
    operand = tiles_of(2048, 1024)._replace(scratch=torch.empty(1 << 15, dtype=torch.bfloat16))
    config = tiled_config(512, 2048, 1024, operand.tiles.layout, 132)
    times = {str(config): 30e-6, DEQUANTIZED: 10e-6}
    monkeypatch.setattr(linear_choice, "GraphClock", lambda _: None)
    monkeypatch.setattr(linear_choice, "fastest_tiled", lambda *_: (None, times))
    monkeypatch.setattr(linear_choice, "unavailable_reason", lambda: "not here")

    def chosen(weight=operand):
        return LinearTuner(ChoiceCache(tmp_path)).choose_dequantized(
            weight, (1, 64, 96, 600), FusedForm(), lambda _: config
        )

    first = chosen()
    assert {rows: choice.path for rows, choice in first.items()} == dict.fromkeys((96, 128, 256, 512), DEQUANTIZED)
    monkeypatch.setattr(linear_choice, "fastest_tiled", None)
    assert chosen() == first
    assert chosen(tiles_of()) == {}


def test_a_wrong_result_of_the_other_language_is_dropped(has_skinny, monkeypatch):
    real = small_linear_timing.tiled_linear

    def faulty(out, x, tiles, bias, counters, config, **fused):
        real(out, x, tiles, bias, counters, config, **fused)
        if config.kind == "skinny":
            out *= 2

    monkeypatch.setattr(small_linear_timing, "tiled_linear", faulty)
    first = tiled_config(1, 64, 512, tiles_of().tiles.layout, 132)
    with pytest.warns(RuntimeWarning, match="skinny"):
        winner, _ = fastest_tiled(tiles_of(), None, 1, StandInClock(lambda _: 1e-6), FusedForm(), first)
    assert winner == first


def test_a_product_is_timed_behind_the_one_that_feeds_it(monkeypatch):
    shapes = []
    real = small_linear_timing.small_linear

    def noting(out, x, weight, *arguments, **fused):
        shapes.append(tuple(weight.shape))
        real(out, x, weight, *arguments, **fused)

    monkeypatch.setattr(small_linear_timing, "small_linear", noting)
    layer = {"qkv": (96, 64), "o": (64, 32), "gate_up": (128, 64), "down": (64, 64)}
    clock = StandInClock(lambda _: 1e-6)
    behind = {}
    for name, shape in layer.items():
        clock.timed.clear()
        shapes.clear()
        fastest_product(weight_of(*shape, torch.bfloat16), None, 1, clock, FUSED_FORMS[name])
        behind[name] = set(shapes) - {shape}
    assert behind == {"qkv": set(), "o": set(), "gate_up": {(64, 32)}, "down": {(128, 64)}}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_real_contest_has_no_wrong_candidate(rows, recwarn):
    weight = (torch.randn(2048, 1024, device="cuda") / 32).bfloat16()
    winner, times = fastest_product(weight, None, rows, GraphClock(weight.device))
    assert not [str(warning.message) for warning in recwarn if "small linear" in str(warning.message)]
    assert len(times) >= 1 + len(candidates(2048, 1024, 2, rows, 132)) // 2
    assert min(times.values()) > 1e-7
    choice = LinearChoice.among("plain" if winner is None else "small", winner, times, weight.nbytes)
    assert 1 < choice.gb_per_s < 20000
