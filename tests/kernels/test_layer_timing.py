"""The contest of a layer's products one after another: what it tries, what it keeps, and that restarts agree."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from graphdecode.kernels.linear.small_linear import SmallLinearConfig
from graphdecode.linear import linear_choice
from graphdecode.linear.layer_timing import fastest_layer
from graphdecode.linear.linear_choice import ChoiceCache, LinearTuner
from graphdecode.linear.small_linear_timing import FUSED_FORMS, Contest, FusedForm, LayerProduct

EARLY = SmallLinearConfig("dot", 64, 64, 1, 4, 4, pdl=True)
LATE = EARLY._replace(pdl=False)
OTHER = EARLY._replace(kind="gemv")
ROWS = 2
SHAPES = {"qkv": (1024, 512), "o": (512, 1024), "gate_up": (3072, 512), "down": (512, 1536)}  # a MiB or more


class LayerClock:
    """Runs all calls; a layer takes what a test says of the kernels of its products."""

    def __init__(self, layer_us: Callable[[list[Any]], float]) -> None:
        self.before: dict[int, Any] = {}
        self.last: dict[int, LayerProduct] = {}
        self.layers: list[list[Any]] = []  # the kernels of each layer that was timed; "norm" where there is one
        self._layer_us = layer_us

    def seconds(self, calls: list[Callable[[], None]]) -> float:
        for call in calls:
            call()
        kernels = [call.args[2] if isinstance(call, partial) else "norm" for call in calls]
        once = kernels[: next(n for n in range(1, len(kernels) + 1) if kernels == kernels[:n] * (len(kernels) // n))]
        self.layers.append(once)
        return 1e-6 * self._layer_us([each for each in once if each != "norm"]) / len(once)


def product(
    name: str, config: SmallLinearConfig | None = EARLY, kinds: tuple[Any, ...] = (EARLY, LATE)
) -> LayerProduct:
    weight = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1)).bfloat16()
    return LayerProduct(Contest(weight, None, ROWS, FUSED_FORMS[name], cold_bytes=1), config, kinds)


def layer_us(configs: list[Any]) -> float:
    """An early product takes 9 us, a late one 10; gate_up, if early, lengthens `down` by 5."""
    taken = sum(10 if config is None else 9 if config.pdl else 10 for config in configs)
    return taken + 5 * configs[2].pdl


def test_an_early_start_that_the_next_product_pays_for_is_given_up() -> None:
    clock = LayerClock(layer_us)
    configs, seconds = fastest_layer([product(name) for name in SHAPES], clock)  # type: ignore[arg-type]
    assert configs == [EARLY, EARLY, LATE, EARLY]
    assert seconds == pytest.approx(37e-6)
    assert clock.layers[0] == [EARLY, "norm", EARLY, EARLY, EARLY]  # attention's place is before `o`


def test_cublas_takes_part_and_a_gain_within_the_noise_changes_nothing() -> None:
    of_layer = [product(name, None if name == "o" else EARLY, (OTHER,)) for name in SHAPES]
    for gain_us, chosen in ((0.1, [EARLY, None, EARLY, EARLY]), (1.0, [OTHER, OTHER, OTHER, OTHER])):
        clock = LayerClock(lambda configs, gain_us=gain_us: 40 - gain_us * configs.count(OTHER))  # type: ignore[misc]
        assert fastest_layer(of_layer, clock)[0] == chosen  # type: ignore[arg-type]


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[LayerClock]:
    """Let contests on a CPU be won by EARLY at once; LATE and OTHER took part."""
    made: list[LayerClock] = []

    def clock_of(_device: torch.device) -> LayerClock:
        made.append(LayerClock(layer_us))
        return made[-1]

    def won(weight: torch.Tensor, bias: Any, rows: int, clock: LayerClock, fused: FusedForm) -> tuple[Any, dict]:
        clock.last[rows] = LayerProduct(Contest(weight, bias, rows, fused, cold_bytes=1), EARLY, (EARLY, LATE))
        return EARLY, {"plain": 30e-6, str(EARLY): 9e-6, str(LATE): 10e-6}

    monkeypatch.setattr(linear_choice, "GraphClock", clock_of)
    monkeypatch.setattr(linear_choice, "fastest_product", won)
    return made


def loaded(tuner: LinearTuner, layers: int = 2) -> list[list[Any]]:
    """Choose for the products of some layers, in the order in which a model is loaded."""
    weights = {name: product(name).contest.weight for name in SHAPES}
    forms = {name: FUSED_FORMS[name] for name in SHAPES}
    return [
        [tuner.choose_small(weights[name], None, (ROWS,), forms[name]) for name in SHAPES]  # type: ignore[arg-type]
        for _ in range(layers)
    ]


def test_all_layers_have_what_is_fastest_in_a_layer_and_restarts_agree(tmp_path, clocks: list[LayerClock]) -> None:
    for starts in range(2):
        for choices in loaded(LinearTuner(ChoiceCache(tmp_path))):
            assert [each[ROWS].config for each in choices] == [EARLY, EARLY, LATE, EARLY]
            assert choices[2][ROWS].us == pytest.approx(10)
            assert choices[2][ROWS].runner_up == str(EARLY)
        assert len(clocks) == 1, f"start {starts} measured"


def test_a_layer_that_cannot_be_timed_keeps_the_choices_of_its_products(
    clocks: list[LayerClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(linear_choice, "fastest_layer", failing)
    with pytest.warns(RuntimeWarning, match="a layer of 2 rows could not be timed"):
        choices = loaded(LinearTuner())
    assert {each[ROWS].config for layer in choices for each in layer} == {EARLY}


def test_one_layer_alone_is_not_timed_whole(clocks: list[LayerClock]) -> None:
    ((qkv, *_),) = loaded(LinearTuner(), layers=1)
    assert (dict(qkv), len(qkv), qkv[ROWS].config) == ({ROWS: qkv[ROWS]}, 1, EARLY)
    assert clocks[0].layers == []
