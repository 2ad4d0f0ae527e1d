"""Compares a GGUF file with llama.cpp (token ids of 2,000 lines) and transformers (greedy outputs, perplexity)."""

from __future__ import annotations

import json
import random
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from graphdecode import LLM, SamplingParams
from graphdecode.models import resolve_model_path
from graphdecode.text import load_tokenizer
from harness import ROOT, elsewhere, json_of, perplexity

NUM_LINES = 2000
NEAR_TIE = 1e-3
ODD_WORDS = ["don't", "We'LL", "I'm", "it's", "naïve", "Straße", "e\u0301", "½", "Ⅷ", "²"]
ODD_WORDS += ["👩\u200d👧", "🏳\ufe0f\u200d🌈"]
SPACES = (" ", "  ", "\t", "\n", "\r\n", " \n ", "\u00a0", "\u3000", "   \t")
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain what a hash table is, in two sentences.",
    "List three prime numbers.",
)


def real_lines() -> list[str]:
    """Return all lines of the standard library's sources."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py")) + sorted((folder / "email").glob("*.py"))
    return [line for file in files for line in file.read_text("utf-8").splitlines() if line]


def lines(special: Sequence[str], seed: int = 5) -> list[str]:
    """Return lines of code, prose, digits, Unicode and spaces, some with special tokens between."""
    rng = random.Random(seed)
    found = rng.sample(real_lines(), NUM_LINES // 2)
    ranges: tuple[tuple[int, int], ...]
    ranges = ((0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF), (0x1100, 0x11FF))
    ranges += ((0x2000, 0x2BFF), (0x3040, 0x30FF), (0x4E00, 0x4FFF), (0xAC00, 0xACFF), (0x1F300, 0x1F6FF))

    def word() -> str:
        kind = rng.randrange(6)
        if kind == 0:
            return str(rng.randrange(10 ** rng.randrange(1, 12)))
        if kind == 1:
            return rng.choice(SPACES)
        if kind == 2:
            return rng.choice(ODD_WORDS)
        low, high = rng.choice(ranges)
        characters = [chr(rng.randint(low, high)) for _ in range(rng.randrange(1, 9))]
        return "".join(characters)

    while len(found) < NUM_LINES:
        words = [
            rng.choice(special) if special and rng.random() < 0.05 else word() for _ in range(rng.randrange(1, 14))
        ]
        found.append(rng.choice(["", " "]).join(words))
    return found


def llama_ids(path: Path, texts: Sequence[str], python: str) -> list[list[int]]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(texts, file)
        file.flush()
        return json_of(elsewhere(python, "llama-ids", path, file.name))


def compare_ids(path: Path, python: str) -> bool:
    """Print how many lines have llama.cpp's token ids, and the first that differ."""
    tokenizer = load_tokenizer(path)
    texts = lines(tokenizer.all_special_tokens)
    theirs = llama_ids(path, texts, python)
    ours = [list(tokenizer(text, verbose=False).input_ids) for text in texts]
    wrong = [index for index in range(len(texts)) if ours[index] != theirs[index]]
    print(f"token ids: {len(texts) - len(wrong)} of {len(texts)} lines are llama.cpp's ({sum(map(len, ours))} tokens)")
    for index in wrong[:5]:
        pairs = zip(ours[index], theirs[index], strict=False)
        at = next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
        shown = [tokenizer.convert_ids_to_tokens(ids[index][at : at + 6]) for ids in (ours, theirs)]
        print(f"  {texts[index]!r:.120}\n    ours {shown[0]}\n    theirs {shown[1]}")
    return not wrong


def reference_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def compare_answers(llm: LLM, model: Any, max_tokens: int) -> bool:
    """Print how many tokens of greedy outputs are the best of transformers' logits, up to near-ties."""
    template = bool(llm.tokenizer.chat_template)
    prompts = [
        llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        if template
        else question
        for question in QUESTIONS
    ]
    right = total = 0
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False):
        answer, prompt = output.outputs[0].token_ids, output.prompt_token_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        margins = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        right, total = right + int((margins < NEAR_TIE).sum()), total + len(answer)
        print(f"  {output.outputs[0].text!r:.110}")
    print(f"greedy answers: {right} of {total} tokens are the best of transformers' logits")
    return right == total


def compare_perplexity(llm: LLM, model: Any, text: str) -> bool:
    """Print the perplexity of a text here and in transformers, for the same tokens."""
    ids = llm.tokenizer(text, verbose=False).input_ids[: llm.engine_config.buckets.max_sequence_length - 1]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    theirs = logprobs.gather(1, torch.tensor(ids[1:])[:, None]).mean().neg().exp().item()
    ours = perplexity(llm, ids)
    print(f"perplexity of {len(ids)} tokens: {ours:.5f}, by transformers {theirs:.5f} ({ours / theirs - 1:+.4%})")
    return abs(ours / theirs - 1) < 1e-3


def main(
    model: Annotated[str, typer.Argument(help="A .gguf file, or a name that leads to one.")] = "smollm2",
    llama_python: Annotated[str, typer.Option(help="The interpreter that has llama-cpp-python.")] = sys.executable,
    text: Annotated[Path, typer.Option(help="What the perplexity is of.")] = ROOT / "LICENSE",
    max_tokens: Annotated[int, typer.Option(help="Of each greedy answer.")] = 48,
) -> None:
    """Compare a GGUF file's tokens, answers and perplexity with peers'."""
    path = resolve_model_path(model)
    right = [compare_ids(path, llama_python)]
    reference = reference_model(path)
    with LLM(path, dtype="float32", max_batch_size=4, max_sequence_length=1024) as llm:
        right += [compare_answers(llm, reference, max_tokens), compare_perplexity(llm, reference, text.read_text())]
    raise typer.Exit(not all(right))
