"""A checkpoint whose every token has one successor: what it answers is known, and may be a call of a tool."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|eos|>"
CALL = ("<tool_call>", '\n{"name": ', '"add", ', '"arguments": {', '"a": 417, ', '"b": 385', "}}", "\n</tool_call>")
ANSWERS = {
    "<|chat|>": ("Hello", ", ", "world", "!"),
    "<|tools|>": ("I ", "add", ".\n", *CALL),
    "<|result|>": ("The ", "sum ", "is ", "802", "."),
}
TEMPLATE = """\
{% if tools %}{{ tools | tojson }} Call one so: <tool_call>...</tool_call>{% endif %}
{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}{% if messages[-1]['role'] == 'tool' %}<|result|>
{%- elif tools %}<|tools|>{% else %}<|chat|>{% endif %}{% endif %}"""

# the same with a model that thinks where it is asked to
THINKING_ANSWERS = {**ANSWERS, "<|thought|>": ("<think>", "\nHm, ", "well.", "\n</think>", "\n\nYes.")}
THINKING_TEMPLATE = "{# <think> </think> #}" + TEMPLATE.replace(
    "{% if messages[-1]", "{% if enable_thinking %}<|thought|>{% elif messages[-1]"
)


def save_chain_model(folder: Path, answers: Mapping[str, Sequence[str]] = ANSWERS, template: str = TEMPLATE) -> Path:
    """Save a model that plays the answer whose first token the chat template writes at the end of a prompt."""
    words = ["<unk>", EOS, *answers, *(word for words in answers.values() for word in words)]
    ids = {word: place for place, word in enumerate(words)}
    assert len(ids) == len(words)
    width = 64
    config = LlamaConfig(
        vocab_size=len(ids), hidden_size=width, intermediate_size=width, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=ids[EOS], bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(len(ids), width))
        for first, answer in answers.items():
            for word, successor in pairwise([first, *answer, EOS]):
                model.lm_head.weight[ids[successor], ids[word]] = 4.0
    model.save_pretrained(folder)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<unk>", EOS, *answers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
