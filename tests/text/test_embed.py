"""`LLM.embed` and `LLM.score`: beside generation, with adapters and salts, and as a checkpoint's files say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_copies import demo_copy
from peft_folders import linear_weights, save_peft
from transformers import AutoModelForCausalLM

from graphdecode import LLM, ArgumentError, LoRARequest, PoolingParams, SamplingParams
from graphdecode.engine import Request
from graphdecode.errors import NotSupportedError
from graphdecode.models import resolve_model_path

SIZES: dict[str, Any] = {"dtype": "float32", "max_batch_size": 4, "max_sequence_length": 96, "page_size": 8}
TEXTS = ["Twelve.", "a much longer text, of several pages", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SIZES) as engine:
        yield engine


def vectors(llm: LLM, *args: Any, **keywords: Any) -> np.ndarray:
    return np.array([each.outputs.embedding for each in llm.embed(*args, use_tqdm=False, **keywords)])


def test_embeddings_beside_requests_that_generate_change_neither(llm: LLM) -> None:
    alone, expected = llm.generate(TEXTS[1], GREEDY, use_tqdm=False)[0], vectors(llm, TEXTS)
    engine = llm.engine
    tokens, pooled, prompt = [], [], llm.tokenizer(TEXTS[1]).input_ids
    running = engine.add(Request(prompt, GREEDY))
    while engine.has_work:
        for event in engine.step():
            tokens += event.token_ids
            pooled += [] if event.embedding is None else [event.embedding]
        if len(tokens) == 4:
            scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
            others = [Request(llm.tokenizer(text).input_ids, pools=True) for text in TEXTS]
            ids = [engine.add(each) for each in [*others, Request(prompt, scored)]]
            assert running not in ids
    assert tokens == alone.outputs[0].token_ids
    assert len(pooled) == len(TEXTS)
    found = sorted((each / np.linalg.norm(each)).tolist() for each in pooled)
    np.testing.assert_allclose(found, sorted(expected.tolist()), rtol=0, atol=1e-5)


def test_a_prompt_that_is_preempted_halfway_is_pooled_from_its_beginning() -> None:
    prompt = list(range(97, 97 + 24)) + list(range(97, 97 + 24))
    with LLM(
        "demo", pooling="mean", max_prefill_tokens=2, total_num_pages=9, **(SIZES | {"max_sequence_length": 72})
    ) as few:
        (alone,) = few.embed([prompt], use_tqdm=False)
        engine, pooled = few.engine, []
        engine.add(Request([1] * 8, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)))
        while engine.num_waiting or not few.stats.generated_tokens:
            engine.step()
        engine.add(Request(prompt, pools=True))
        while engine.has_work:
            pooled += [event.embedding for event in engine.step() if event.embedding is not None]
        assert few.num_preemptions > 0
    (vector,) = pooled
    np.testing.assert_allclose(vector / np.linalg.norm(vector), alone.outputs.embedding, rtol=0, atol=1e-5)


def test_without_embeddings_no_pass_pools() -> None:
    with LLM("demo", **SIZES) as fresh:
        fresh.generate(TEXTS, GREEDY, use_tqdm=False)
        fresh.generate(TEXTS[0], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
        assert fresh.graphs.report("pooled").buckets == []


def test_fields_and_parameters_are_those_of_vllm(llm: LLM) -> None:
    ids = llm.tokenizer(TEXTS[0]).input_ids
    (output,) = llm.embed([ids], pooling_params=PoolingParams(dimensions=5))
    assert (output.prompt_token_ids, output.finished, output.error) == (ids, True, None)
    whole = vectors(llm, TEXTS[0])[0]
    assert output.outputs.hidden_size == 5
    np.testing.assert_allclose(output.outputs.embedding, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
    assert llm.embed(TEXTS[1])[0].num_cached_tokens == llm.embed(TEXTS[1])[0].num_cached_tokens > 0
    (cut,) = llm.embed(TEXTS[1], truncate_prompt_tokens=3)
    assert cut.prompt_token_ids == llm.tokenizer(TEXTS[1]).input_ids[:3]


def test_scores_are_cosines_of_embeddings(llm: LLM) -> None:
    embeddings = vectors(llm, TEXTS)
    found = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS)]
    np.testing.assert_allclose(found, embeddings @ embeddings[0], rtol=0, atol=1e-6)
    assert [each.outputs.score for each in llm.score(TEXTS, TEXTS)] == pytest.approx([1.0] * 3, abs=1e-6)
    with pytest.raises(ArgumentError, match="data_1 .* data_2"):
        llm.score(TEXTS[:2], TEXTS)


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ([[]], {}, "prompt"),
        ([[1, 10**6]], {}, "token ids"),
        ("x", {"pooling_params": PoolingParams(dimensions=10**6)}, "dimensions"),
        ("x", {"prompt_name": "query"}, "prompt_name"),
        (["x", "y"], {"pooling_params": [PoolingParams()]}, "pooling_params"),
        ("x", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_embedded_is_an_error_that_names_it(llm: LLM, prompts, options, named) -> None:
    with pytest.raises(ArgumentError, match=named):
        llm.embed(prompts, **options)
    assert len(vectors(llm, "y")) == 1


def test_a_prompt_that_is_too_long_has_an_error_and_others_are_embedded(llm: LLM) -> None:
    with pytest.warns(RuntimeWarning, match="refused"):
        long, short = llm.embed(["a" * 200, "b"])
    assert (long.outputs.embedding, long.error is None) == ([], False)
    assert short.outputs.hidden_size == llm.model.hidden_size
    fits = ["a" * SIZES["max_sequence_length"], "a" * (SIZES["max_sequence_length"] + 1)]
    with pytest.warns(RuntimeWarning):
        assert [each.error is None for each in llm.embed(fits)] == [True, False]


def test_a_hidden_state_that_is_not_finite_ends_only_its_own_request(llm: LLM) -> None:
    table = llm.model.stem.embedding
    row = table[7].clone()
    try:
        table[7] = float("nan")
        bad, good = llm.embed([[7, 7], [8, 9]])
    finally:
        table[7] = row
        llm.reset_prefix_cache()
    assert (bad.outputs.embedding, good.error) == ([], None)
    assert bad.error is not None


def test_adapters_and_salts_keep_embeddings_apart(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32)
    save_peft(tmp_path / "adapter", model, linear_weights(model))
    request = LoRARequest("one", 1, tmp_path / "adapter")
    prompt = TEXTS[1]
    with LLM("demo", max_adapters=1, prefix_cache=False, **SIZES) as llm:
        adapted, plain = vectors(llm, prompt, lora_request=request), vectors(llm, prompt)
    assert np.abs(adapted - plain).max() > 1e-3
    with LLM("demo", max_adapters=1, **SIZES) as llm:  # each after the other has been cached
        for _ in range(2):
            np.testing.assert_allclose(vectors(llm, prompt), plain, rtol=0, atol=1e-5)
            np.testing.assert_allclose(vectors(llm, prompt, lora_request=request), adapted, rtol=0, atol=1e-5)
        (salted,) = llm.embed({"prompt": prompt, "cache_salt": "other"})
        assert (salted.num_cached_tokens, llm.embed(prompt)[0].num_cached_tokens > 0) == (0, True)


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"a.module.{kind}"}
        for index, kind in enumerate(("Transformer", *kinds))
    ]


def test_the_files_of_sentence_transformers_say_how_to_pool(tmp_path: Path, llm: LLM) -> None:
    files = {
        "modules.json": modules("Pooling"),  # and no Normalize
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False},
        "config_sentence_transformers.json": {"prompts": {"query": "Find: ", "document": ""}},
    }
    with LLM(write(demo_copy(tmp_path / "model"), files), **SIZES) as own:
        found, prompted = vectors(own, TEXTS), vectors(own, TEXTS, prompt_name="query")
        (score,) = own.score(TEXTS[0], TEXTS[1])
    with LLM("demo", pooling="mean", **SIZES) as mean:
        expected = vectors(mean, TEXTS, pooling_params=PoolingParams(use_activation=False))
        of_queries = vectors(mean, [f"Find: {text}" for text in TEXTS])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(prompted[0] / np.linalg.norm(prompted[0]), of_queries[0], rtol=0, atol=1e-5)
    document = expected[1] / np.linalg.norm(expected[1])
    assert score.outputs.score == pytest.approx(float(of_queries[0] @ document), abs=1e-5)


@pytest.mark.parametrize(
    "files",
    [
        {"modules.json": modules("Pooling"), "1_Pooling/config.json": {"pooling_mode_cls_token": True}},
        {"modules.json": modules("Pooling"), "1_Pooling/config.json": {"pooling_mode": ["mean", "max"]}},
        {"modules.json": modules("Pooling", "Dense"), "1_Pooling/config.json": {"pooling_mode": "mean"}},
    ],
)
def test_a_pooling_that_is_not_supported_is_refused_and_can_be_overridden(tmp_path: Path, files) -> None:
    folder = write(demo_copy(tmp_path / "model"), files)
    with LLM(folder, **SIZES) as llm:
        with pytest.raises(NotSupportedError, match="pooling"):
            llm.embed("x")
        assert llm.generate("x", SamplingParams(max_tokens=1))[0].error is None
    with LLM(folder, pooling="last", **SIZES) as llm:
        assert len(vectors(llm, "x")) == 1


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_reranker_scores_a_pair_by_the_logits_of_its_labels(tmp_path: Path, quantize) -> None:
    yes, no = 121, 110
    files = {
        "modules.json": modules("LogitScore"),
        "1_LogitScore/config.json": {"true_token_id": yes, "false_token_id": no},
    }
    folder = write(demo_copy(tmp_path / "model"), files)
    with LLM(folder, quantize=quantize, **(SIZES | {"max_sequence_length": 480})) as llm:
        first, second = llm.score("What is 2+2?", ["4", "a tree"])
        (raw,) = llm.score("What is 2+2?", "4", pooling_params=PoolingParams(use_activation=False))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for output, document in ((first, "4"), (second, "a tree")):
        text = llm.tokenizer.decode(output.prompt_token_ids)
        assert f"<Query>: What is 2+2?\n<Document>: {document}<|im_end|>" in text
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        expected = torch.sigmoid(logits[yes] - logits[no]).item()
        assert output.outputs.score == pytest.approx(expected, abs=1e-5 if quantize is None else 0.05)
    assert 1 / (1 + np.exp(-raw.outputs.score)) == pytest.approx(first.outputs.score, abs=1e-6)
