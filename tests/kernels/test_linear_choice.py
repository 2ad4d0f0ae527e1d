"""The choice between linear paths: remembered on disk, checked before it may win, fixed where it must not vary."""

import dataclasses
import json

import pytest
import torch

from gpu_checks.models import with_choices
from graphdecode.kernels.linear.small_linear import SmallLinearConfig, fixed_config
from graphdecode.linear import linear_choice
from graphdecode.linear.composite import MergedLinear
from graphdecode.linear.forms import linear_of
from graphdecode.linear.linear_choice import ChoiceCache, LinearChoice, LinearTuner, cache_folder
from graphdecode.linear.unquantized import UnquantizedLinear
from graphdecode.linear.weight_form import FormOptions

TIMINGS = 2  # both batch sizes
CONFIG = SmallLinearConfig("dot", 32, 64, 2, 4, 2, pdl=True)


def weight_of(out_features=96, in_features=80, dtype=torch.float32):
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def timings(monkeypatch):
    """The numbers of rows that any tuner times, in order."""
    timed = []

    def timing(weight, bias, rows, clock, fused):
        timed.append(rows)
        return CONFIG, {"plain": 2e-6, str(CONFIG): 1e-6}

    monkeypatch.setattr(linear_choice, "fastest_product", timing)
    monkeypatch.setattr(linear_choice, "GraphClock", lambda _: None)
    return timed


def prepare(weight, tuner, bias=None, **options):
    return linear_of(weight, bias, FormOptions(weight.device, weight.dtype, tuner, **options))


def start(folder, weight=None, bias=None, batch_sizes=(1, 8)):
    """What a process does at its start: a tuner of its own, over the cache that all share."""
    weight = weight_of(1024, 512) if weight is None else weight
    return LinearTuner(ChoiceCache(folder)).choose_small(weight, bias, batch_sizes)


def test_a_second_start_times_nothing_and_knows_as_much(tmp_path, timings):
    first = start(tmp_path)
    assert len(timings) == TIMINGS
    assert start(tmp_path) == first
    assert len(timings) == TIMINGS
    assert (first[8].us, first[8].runner_up) == (1.0, "plain")


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": weight_of(1024, 513)},
        {"weight": weight_of(1024, 512, torch.bfloat16)},
        {"bias": torch.zeros(1024)},
        {"batch_sizes": (2, 4)},
    ],
    ids=["shape", "dtype", "bias", "batch sizes"],
)
def test_another_layer_is_timed_anew(tmp_path, timings, changed):
    start(tmp_path)
    start(tmp_path, **changed)
    assert len(timings) == 2 * TIMINGS


@pytest.mark.parametrize("name", ["torch", "triton", "source", "processor", "threads"])
def test_another_machine_or_version_is_timed_anew(tmp_path, timings, monkeypatch, name):
    start(tmp_path)
    if name == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    elif name == "triton":
        monkeypatch.setattr(linear_choice, "version_of", lambda _: "99.0")
    elif name == "source":
        copy = tmp_path / "kernels"
        copy.mkdir()
        (copy / "linear.py").write_text("changed")
        monkeypatch.setattr(linear_choice, "__file__", str(copy / "linear_choice.py"))
    elif name == "processor":
        monkeypatch.setattr(linear_choice, "processor_name", lambda _: "another")
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    start(tmp_path)
    assert len(timings) == 2 * TIMINGS


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        '{"KEY": 5}',
        '{"KEY": {"path": "plain", "config": null, "no_such": 1}}',
        '{"KEY": {"path": "small", "config": null}}',
    ],
)
def test_a_corrupt_file_costs_a_measurement_and_is_mended(tmp_path, timings, content):
    start(tmp_path, batch_sizes=(1,))
    (file,) = tmp_path.iterdir()
    (key,) = json.loads(file.read_text())
    file.write_text(content.replace('"KEY"', json.dumps(key)))
    for _ in range(2):
        start(tmp_path, batch_sizes=(1,))
        assert timings == [1, 1]


def test_a_folder_that_cannot_be_written_costs_a_measurement(tmp_path, timings):
    (tmp_path / "file").write_text("in the way")
    assert start(tmp_path / "file" / "cache") == start(tmp_path / "file" / "cache")
    assert len(timings) == 2 * TIMINGS


def test_processes_keep_what_the_others_wrote(tmp_path):
    here, there = ChoiceCache(tmp_path), ChoiceCache(tmp_path)
    here.put("a", 1)
    there.put("b", 2)
    assert there.get("a") == 1
    here.put("c", 3)
    assert [ChoiceCache(tmp_path).get(key) for key in "abcd"] == [1, 2, 3, None]
    assert [file.name for file in tmp_path.iterdir()] == ["choices.json"]


def test_the_folder_is_where_the_variables_say(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHDECODE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("GRAPHDECODE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "graphdecode"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "graphdecode"


def test_a_choice_survives_the_disk():
    times = {"plain": 3e-6, str(CONFIG): 1.5e-6, "other": 2e-6}
    choice = LinearChoice.among("small", CONFIG, times, nbytes=3000)
    assert (choice.us, choice.gb_per_s, choice.runner_up, choice.runner_up_us) == (1.5, 2.0, "other", 2.0)
    stored = json.loads(json.dumps(dataclasses.asdict(choice)))
    assert LinearChoice.from_dict(stored) == choice
    assert choice.as_report()["config"] == "dot 32x64, 2 splits, 4 warps, 2 stages, early start"


def test_each_bucket_has_its_own_choice_and_a_second_start_times_nothing(tmp_path, monkeypatch):
    timed = []

    def timing(weight, bias, rows, clock, fused):
        timed.append(rows)
        config = None if rows == 2 else CONFIG
        return config, {"plain": 2e-6, str(CONFIG): 1e-6 if config else 3e-6}

    monkeypatch.setattr(linear_choice, "fastest_product", timing)
    monkeypatch.setattr(linear_choice, "GraphClock", lambda _: None)
    weight = weight_of(1024, 512)
    for _ in range(2):
        choices = LinearTuner(ChoiceCache(tmp_path)).choose_small(weight, None, (1, 2, 64, 65, 100))
        assert timed == [1, 2, 64]
        assert [choices[rows].path for rows in (1, 2, 64)] == ["small", "plain", "small"]
        assert choices.keys() == {1, 2, 64}
    assert LinearTuner().choose_small(weight_of(), None, (1, 2)) == {}, "such a weight is read in no time"
    counters = torch.zeros(64, dtype=torch.int32)
    held = UnquantizedLinear((1024, 512), None, weight, counters, choices=choices)
    taken = []
    monkeypatch.setattr("graphdecode.linear.unquantized.small_linear", lambda *given, **_: taken.append(given[-1]))
    for rows in (1, 2, 3, 64, 65):
        held.apply(torch.zeros(rows, 1024), torch.zeros(rows, 512))
    assert taken == [CONFIG, CONFIG]


def test_the_products_of_a_weight_can_be_changed_for_measuring(monkeypatch):
    small, weight = LinearChoice("small", CONFIG), weight_of()
    held = UnquantizedLinear(
        (96, 80), None, weight, torch.zeros(64, dtype=torch.int32), choices={1: small, 4: LinearChoice("plain")}
    )
    late = CONFIG._replace(pdl=False)
    changed = with_choices(held, lambda choice: choice.config and dataclasses.replace(choice, config=late))
    taken = []
    monkeypatch.setattr("graphdecode.linear.unquantized.small_linear", lambda *given, **_: taken.append(given[-1]))
    for form in (held, changed, with_choices(held, lambda choice: None)):
        form.apply(torch.zeros(1, 96), torch.zeros(1, 80))
        form.apply(torch.zeros(4, 96), torch.zeros(4, 80))
    assert taken == [CONFIG, late]
    assert [changed.choice(rows).path for rows in (1, 4)] == ["small", "plain"]
    assert len(changed.tensors) == 1, "the weight is shared, and the counters are no constant"
    assert changed.weight is weight
    joined = with_choices(MergedLinear.wrap([held, changed]), lambda choice: None)
    assert [form.choices for form in joined.forms] == [{}, {}]


def test_where_nothing_can_be_timed_cublas_is_taken_for_this_start_alone(tmp_path, monkeypatch):
    def timing(weight, bias, rows, clock, fused):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(linear_choice, "fastest_product", timing)
    monkeypatch.setattr(linear_choice, "GraphClock", lambda _: None)
    with pytest.warns(RuntimeWarning, match="for 2 rows could not be timed: OutOfMemoryError: no room"):
        choices = LinearTuner(ChoiceCache(tmp_path)).choose_small(weight_of(1024, 512), None, (2,))
    assert choices == {2: LinearChoice("plain")}
    assert not list(tmp_path.iterdir())


def test_the_fixed_product_has_one_configuration_for_any_number_of_rows():
    weight, config = weight_of(), fixed_config(96, 80, 4)
    held = UnquantizedLinear(weight.shape, None, weight, LinearTuner().counters(weight.device), config)
    for rows in (1, 16, 17, 700):
        assert held.choice(rows).config == config
        x, out = torch.randn(rows, 80), torch.full((rows, 96), torch.nan)
        held.apply(out, x)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)
    assert held.nbytes == weight.nbytes
    assert [tensor.data_ptr() for tensor in held.tensors] == [weight.data_ptr()], "the counters are no constant"


@pytest.mark.gpu
def test_a_weight_on_a_gpu_has_a_measured_choice_for_every_small_bucket(tmp_path):
    weight = (torch.randn(2048, 1024, device="cuda") / 32).bfloat16()
    held = prepare(weight, LinearTuner(ChoiceCache(tmp_path)), batch_sizes=(1, 64, 65))
    assert held.choice(1).us > 0
    assert held.choice(64).us > 0
    assert held.choice(65).us is None
    for rows in (1, 64, 65):
        x, out = torch.randn(rows, 1024, device="cuda").bfloat16(), weight.new_full((rows, 2048), torch.nan)
        held.apply(out, x)
        torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1.6e-2, atol=1.6e-2)
