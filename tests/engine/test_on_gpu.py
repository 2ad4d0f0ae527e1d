"""What only a GPU can show: CUDA graphs of the demo model's step."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from graphdecode import LLM, BucketConfig, SamplingParams
from graphdecode.models import resolve_model_path

MakeLLM = Callable[..., LLM]
pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(97, 123) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def answers(device: str, dtype: str, backend: str = "auto") -> list[list[int]]:
    config = BucketConfig(max_batch_size=8, max_sequence_length=128, backend=backend)
    with LLM("demo", config=config, device=device, dtype=dtype) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts(20), GREEDY)]


def test_fp32_tokens_are_the_cpus() -> None:
    assert answers("cuda", "float32") == answers("cpu", "float32")


def test_graphs_give_the_tokens_of_eager_steps() -> None:
    assert answers("cuda", "bfloat16") == answers("cuda", "bfloat16", backend="eager")


def test_bf16_tokens_are_transformers_up_to_near_ties() -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.bfloat16).cuda().eval()
    for prompt, answer in zip(prompts(20), answers("cuda", "bfloat16"), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 0.25


def test_ten_thousand_replays_do_not_drift(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=4, max_sequence_length=512)
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    first = llm.generate([[97], [98]], params)
    while llm.stats.batch_sizes.total() < 10_000:
        assert [o.outputs[0].token_ids for o in llm.generate([[97], [98]], params)] == [
            o.outputs[0].token_ids for o in first
        ]


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_replay_after_sleep_in_other_memory(level: int) -> None:
    config = BucketConfig(max_batch_size=8, max_sequence_length=128, total_num_pages=4096)
    with LLM("demo", config=config, device="cuda", dtype="float32", enable_sleep_mode=True) as llm:
        wanted, captured = llm.generate(prompts(20), GREEDY), dict(llm.graphs.graphs)
        cache = [tensor for layer in llm.cache.layers for tensor in layer]
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        given_back = llm.sleep(level)
        assert given_back >= sum(tensor.nbytes for tensor in [*cache, *llm.model.constants])
        assert torch.cuda.mem_get_info()[0] - free >= 0.95 * given_back
        other = torch.full((given_back // 2,), 255, dtype=torch.uint8, device="cuda")  # takes what was given back
        del other
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.update_weights("demo")
        llm.wake_up()
        outputs = llm.generate(prompts(20), GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted]
        assert llm.graphs.graphs == captured


def test_a_hundred_captures_leave_no_memory_behind(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=4)
    llm.graphs.thaw()
    for _ in range(5):
        llm.graphs.capture(progress=False, kinds=["steps"])
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(100):
        llm.graphs.capture(progress=False, kinds=["steps"])
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < 8 * 2**20
