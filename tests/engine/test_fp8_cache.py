"""A cache of fp8: reachable by its name, twice the room, and answers that are the same in any company."""

import pytest
import torch

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.engine.capacity import plan_capacity, resolve_cache_dtype
from graphdecode.engine.loading import make_runner
from graphdecode.models import load_model

PROMPTS = {"417+385=": "802", "12+30=": "42", "999+1=": "1000", "rev oceanic=": "cinaeco"}


@pytest.mark.parametrize("backend", ["recorded", "eager"])
def test_answers_are_right_over_keys_of_eight_bits(backend):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM("demo", kv_cache_dtype="fp8", max_batch_size=3, backend=backend, dtype="float32") as llm:
        assert llm.engine.runner.cache.layers[0].keys.dtype == torch.float8_e4m3fn
        given = [llm.generate(prompt, params)[0].outputs[0].text.strip() for prompt in PROMPTS]
        assert given == list(PROMPTS.values())
        together = llm.generate(list(PROMPTS), params)  # now with prefixes of the cache, and neighbours
        assert [output.outputs[0].text.strip() for output in together] == given


def test_the_same_memory_has_room_for_twice_as_many_tokens():
    model = load_model("demo", device="cpu", dtype="bfloat16")
    config = BucketConfig(max_batch_size=2)
    runners = [make_runner(model, config, kv_cache_dtype=name) for name in ("auto", "fp8_e4m3")]
    wide, narrow = (runner.cache.layers[0].keys for runner in runners)
    assert wide.shape == narrow.shape
    assert wide.nbytes == 2 * narrow.nbytes
    plans = [
        plan_capacity(config, model.config, resolve_cache_dtype(name, model.dtype), model.device, available_bytes=2**18)
        for name in ("auto", "fp8")
    ]
    assert plans[0].token_bytes == 2 * plans[1].token_bytes
    assert plans[1].total_num_pages >= 2 * plans[0].total_num_pages
