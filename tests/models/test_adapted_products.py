"""An adapter of one product alone, for every product of every family: transformers' logits with merged weights."""

import pytest
import torch
import transformers
from family_checkpoints import FAMILIES
from peft_folders import products_of, save_peft, with_added
from torch import Tensor, nn

from graphdecode import LLM, BucketConfig, LoRARequest, SamplingParams
from graphdecode.models import adapter_bytes

# of each class one with all it can have, and those with other products
NAMES = {*{kind: name for name, (kind, _) in FAMILIES.items()}.values(), "gemma4-inputs", "nemotron-h", "llama4"}
PROMPT = [(7 * i * i + 13 * i + 5) % 250 + 3 for i in range(30)]  # a token that repeats would hide keys and values


def logprobs_of(model: nn.Module, tokens: list[int]) -> Tensor:
    """Return the log-probability of each token but the first."""
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return scores[range(len(tokens) - 1), tokens[1:]]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_product_can_be_adapted(checkpoint, tmp_path, name):
    base = checkpoint(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    kinds, plain = products_of(model), logprobs_of(model, PROMPT)
    added = {kind: save_peft(tmp_path / kind, model, names) for kind, names in kinds.items()}
    requests = [LoRARequest(kind, number, tmp_path / kind) for number, kind in enumerate(kinds, 1)]
    config = BucketConfig(max_batch_size=len(kinds), max_sequence_length=40, page_size=8)
    options = {"dtype": "float32", "max_adapters": len(kinds), "max_adapter_rank": 2, "backend": "eager"}
    options["adapt_experts"] = has_experts = any("experts" in kind for kind in kinds)
    with LLM(base, config=config, skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate([PROMPT] * len(kinds), params, use_tqdm=False, lora_request=requests)
        allocated = sum(each.down.nbytes + each.up.nbytes for each in llm.model.adapters.products.values())
        counted = adapter_bytes(llm.model.config, len(kinds), 2, llm.model.dtype, adapt_experts=has_experts)
    assert allocated <= counted
    for kind, output in zip(kinds, outputs, strict=True):
        (answer,) = output.outputs
        entries = [*output.prompt_logprobs[1:], *answer.logprobs]
        actual = torch.tensor([next(iter(entry.values())).logprob for entry in entries])
        with with_added(model, added[kind]):
            expected = logprobs_of(model, [*PROMPT, *answer.token_ids])
        torch.testing.assert_close(
            actual, expected, rtol=1e-3, atol=2e-3, msg=lambda text, kind=kind: f"{kind}: {text}"
        )
        assert float((expected[: len(plain)] - plain).abs().max()) > 0.01, kind  # the adapter matters
