"""`LLM(batch_invariant=True)`: a request's tokens and log-probabilities have the same bits alone and in any company."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.kernels.native import library as native
from graphdecode.models import resolve_model_path

needs_kernels = pytest.mark.skipif(
    not torch.cuda.is_available() and native.library() is None, reason=f"no compiled kernels: {native.why_not()}"
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"initializer_range": 0.3}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 20}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20, "initializer_range": 0.3},
    ),
}
Answer = tuple[list[int], list[dict[int, float]]]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts about the borders of pages and chunks, some with a common beginning; greedy and sampled."""
    rng = random.Random(5)
    common = [rng.randrange(97, 123) for _ in range(40)]
    found = []
    for index, length in enumerate([1, 2, 15, 16, 17, 31, 40, 47, 5, 33, 1, 60]):
        own = [rng.randrange(97, 123) for _ in range(length)]
        params = SamplingParams(
            temperature=[0.0, 0.9][index % 2],
            top_p=0.95,
            seed=index,
            max_tokens=10 + index,
            logprobs=3,
            ignore_eos=True,
            repetition_penalty=[1.0, 1.3][index % 3 == 0],
        )
        found.append((common + own if index % 3 == 1 else own, params))
    return found


def answers(llm: LLM, given: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    outputs = llm.generate([prompt for prompt, _ in given], [params for _, params in given], use_tqdm=False)
    return [
        (
            output.outputs[0].token_ids,
            [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def make(model: str | Path, dtype: str, quantize: str | None = None, budget: int = 512, **config: Any) -> LLM:
    settings = BucketConfig(**{"max_batch_size": 1, "max_sequence_length": 160, "page_size": 16, **config})
    return LLM(model, config=settings, dtype=dtype, quantize=quantize, batch_invariant=True, max_prefill_tokens=budget)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Small random checkpoints whose products are wide enough for several threads and panels."""
    demo = resolve_model_path("demo")

    def save(name: str) -> Path | str:
        if name == "demo":
            return "demo"
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(3)
        sizes = {"vocab_size": 300, "hidden_size": 192, "intermediate_size": 416, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
        model_name, changes = FAMILIES[name]
        model_class = getattr(transformers, f"{model_name}ForCausalLM")
        model_class(model_class.config_class(**sizes, **heads, **changes)).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((demo / file).read_bytes())
        return folder

    return save


@needs_kernels
@pytest.mark.parametrize(
    ("model", "dtype"),
    [("demo", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("gemma2", "float16"), ("gpt-oss", "float32")],
)
def test_a_request_has_the_same_bits_alone_and_in_any_company(folder_of: Any, model: str, dtype: str) -> None:
    folder, given = folder_of(model), requests()
    with make(folder, dtype) as llm:
        expected = [answers(llm, [request])[0] for request in given]
    order = list(range(len(given)))
    random.Random(1).shuffle(order)
    for budget, config in (
        (512, {"max_batch_size": 12}),
        (7, {"max_batch_size": 5, "batch_sizes": [3]}),
        (33, {"max_batch_size": 8, "page_size": 4, "total_num_pages": 45}),
        (512, {"max_batch_size": 4, "steps_per_launch": 3}),
    ):
        with make(folder, dtype, budget=budget, **config) as llm:
            found = answers(llm, [given[index] for index in order])
            for index, answer in zip(order, found, strict=True):
                assert answer == expected[index], (config, index)
            again = answers(llm, given)  # beginnings are shared now
            assert again == expected
            if "total_num_pages" in config:
                assert llm.num_preemptions > 0


@pytest.mark.skipif(native.library() is None, reason=f"no compiled kernels: {native.why_not()}")
@pytest.mark.skipif(torch.cuda.is_available(), reason="of products on a CPU")
@pytest.mark.parametrize(
    ("model", "quantize"), [("llama", "int8"), ("llama", "int4"), ("llama", "q8_0"), ("gpt-oss", "q8_0")]
)
def test_weights_of_few_bits_give_the_same_bits_in_any_company(folder_of: Any, model: str, quantize: str) -> None:
    folder, given = folder_of(model), requests()
    with make(folder, "bfloat16", quantize) as llm:
        expected = [answers(llm, [request])[0] for request in given]
    with make(folder, "bfloat16", quantize, 7, max_batch_size=5, batch_sizes=[3], steps_per_launch=2) as llm:
        assert answers(llm, given) == expected


@needs_kernels
def test_the_number_of_threads_changes_no_bit(folder_of: Any) -> None:
    folder, given = folder_of("llama"), requests()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        with make(folder, "float32", max_batch_size=6) as llm:
            found.append(answers(llm, given))
    assert found[0] == found[1]


def test_what_cannot_be_had_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda *element: None)
    monkeypatch.setattr(native, "why_not", lambda: "no compiler")
    with pytest.raises(ValueError, match="needs compiled kernels on a CPU: no compiler"):
        LLM("demo", device="cpu", batch_invariant=True)
