"""Door 2: a weight form is one class. This one keeps weights transposed, and reads them straight to their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.linear.forms import FORMS, register_form
from graphdecode.linear.weight_form import FormOptions, LinearNames, TensorSource, WeightForm, fused_shape

PROMPTS = ["417+385=", "rev oceanic=", "sort zebra="]
CONFIG = BucketConfig(max_batch_size=3, max_sequence_length=64, batch_sizes=[1, 2, 3])
LOADED: list[tuple[str, ...]] = []


@dataclass(frozen=True)
class Transposed(WeightForm):
    path = quantize = "transposed"
    columns: Tensor  # [in_features, out_features]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, options: FormOptions) -> WeightForm:
        return cls(weight.shape, bias, weight.T.contiguous())

    @classmethod
    def load(cls, source: TensorSource, names: LinearNames, options: FormOptions) -> WeightForm:
        assert not names.biases
        rows, in_features = fused_shape(source, names.weights)
        columns = torch.empty(in_features, rows, dtype=options.dtype, device=options.device)
        sizes = [fused_shape(source, (name,))[0] for name in names.weights]
        for name, part in zip(names.weights, columns.split(sizes, dim=1), strict=True):
            source.read(name, part.T)
        LOADED.append(names.weights)
        return cls((rows, in_features), None, columns)

    def apply(self, out: Tensor, x: Tensor) -> None:
        torch.mm(x, self.columns, out=out)


@pytest.fixture
def registered() -> Iterator[None]:
    register_form(Transposed)
    yield
    FORMS.remove(Transposed)
    LOADED.clear()


def answers(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))]


@pytest.mark.usefixtures("registered")
def test_a_form_from_outside_serves_a_whole_model() -> None:
    with LLM("demo", config=CONFIG) as llm:
        assert "transposed" not in str(llm.graphs.report()), "it is taken where it is asked for alone"
        expected = answers(llm)
    with LLM("demo", config=CONFIG, quantize="transposed") as llm:
        assert answers(llm) == expected
        for bucket in llm.graphs.report().buckets:
            assert {choice["path"] for choice in bucket.choices.values()} == {"transposed"}
    assert len(LOADED) == 4 * 4, "the output layer is made of the embedding, and of nothing that is read"


@pytest.mark.usefixtures("registered")
def test_registered_forms_are_named_in_errors() -> None:
    with pytest.raises(
        ValueError,
        match="quantize .*'transposed'.*'int3'.*--load-module",
    ):
        LLM("demo", quantize="int3")
