"""Engines with adapters of every product of every family, in random mixtures: merged weights give the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from family_checkpoints import FAMILIES, save_checkpoint
from peft_folders import layers_products_of, products_of, save_peft, with_added
from torch import Tensor

from adopted_models import ADOPTED, TINY, save_random
from attacks.judge import Judge
from attacks.lives import LifeCounts
from attacks.trial import Wrong
from graphdecode import LLM, LoRARequest, RequestOutput, SamplingParams

MODELS = (*FAMILIES, *ADOPTED)
_LENGTH = 96  # of a prompt with its output
_APART = 5e-3  # of logits: random weights have large ones, and float32 differs by 1e-3 from float64 here
_ROUNDING, _TRIES = 2e-6, 8  # of values of the embedding, and how often it is tried
_LETTERS = range(97, 123)
_RANKS = (1, 2, 3, 4, 8)


class _Adapter(NamedTuple):
    """An adapter, and what it adds to the weights; None and nothing: the base."""

    request: LoRARequest | None
    added: dict[str, Tensor]


class AdapterLife:
    """One engine of a random model, settings, adapters and requests.

    Args:
        seed: of everything random.
        folder: for checkpoints, which lives share, and adapters.

    Attributes:
        kind: name of the model.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.kind = MODELS[seed % len(MODELS)]  # all in turn
        self.counts = LifeCounts()
        self._seed, self._folder = seed, folder
        rng = self._rng = random.Random(f"adapters {seed}")
        rows = rng.randrange(1, 7)
        self.settings: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "max_adapters": rng.randrange(1, 5),
            "max_adapter_rank": 8,
            "max_batch_size": rows,
            "max_sequence_length": _LENGTH,
            "page_size": rng.choice([1, 7, 16]),
            "batch_sizes": rng.choice(["auto", [rows]]),
            "prefix_cache": rng.random() < 0.7,
            "max_prefill_tokens": rng.choice(["auto", 5, 33]),
            "backend": rng.choice(["recorded", "eager"]),
        }
        if rng.random() < 0.2:
            self.settings |= {"speculation": "ngram", "num_tokens": rng.choice(["auto", 3])}

    def run(self) -> None:
        """Run all requests, and check their outputs; raises `Wrong`."""
        try:
            self._run()
        except Wrong as error:
            raise Wrong(f"{self.kind}: {error}; {self.settings}") from error

    def _run(self) -> None:
        import transformers

        base = self._folder / self.kind
        if not base.exists():
            save = save_checkpoint if self.kind in FAMILIES else lambda name, to: save_random(ADOPTED[name](TINY), to)
            save(self.kind, base)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        adapters = [_Adapter(None, {}), *self._adapters(model)]
        rng, vocab = self._rng, model.config.vocab_size
        common = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, 24))]
        requests = [(rng.choice(adapters), self._prompt(common, vocab), self._params()) for _ in range(24)]
        with LLM(str(base), **self.settings) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for _, prompt, _ in requests],
                [params for _, _, params in requests],
                use_tqdm=False,
                lora_request=[adapter.request for adapter, _, _ in requests],
            )
        self._judge(model, requests, outputs)

    def _judge(self, model: Any, requests: Sequence[tuple[_Adapter, Any, Any]], outputs: list[RequestOutput]) -> None:
        tokens = unsure = 0
        for (adapter, _, params), output in zip(requests, outputs, strict=True):
            judge = Judge(self._folder / self.kind, "auto", _LENGTH, (), logits=_logits_of(model), apart=_APART)
            try:
                with with_added(model, adapter.added):
                    judge.compare(output, params)
            except Wrong as error:
                if not _is_unsure(model, adapter.added, output):
                    raise Wrong(f"with {sorted(adapter.added)}: {error}") from error
                unsure += sum(len(answer.token_ids) for answer in output.outputs)
            tokens += judge.tokens
        self.counts = LifeCounts(1, len(outputs), tokens + unsure, unsure)

    def _adapters(self, model: Any) -> list[_Adapter]:
        """Save adapters: of one product, of some, and of all of them, so that all products have their turn."""
        rng = self._rng
        products = products_of(model) if self.kind in FAMILIES else layers_products_of(model)
        has_experts = any("experts" in kind for kind in products)
        self.settings["adapt_experts"] = has_experts
        kinds, made = list(products), []
        for number in range(1, rng.randrange(3, 8)):
            chosen = rng.choice([[rng.choice(kinds)], rng.sample(kinds, rng.randrange(1, len(kinds) + 1)), kinds])
            names = [name for kind in chosen for name in products[kind] if "experts" in kind or rng.random() < 0.9]
            if not names:
                continue
            folder = self._folder / f"adapter-{self._seed}-{number}"
            settings = {"lora_alpha": rng.choice([1, 4, 8.5]), "use_rslora": rng.random() < 0.2}
            size, seed = 0.25 / len(chosen) ** 0.5, rng.randrange(2**31)
            added = save_peft(folder, model, names, rank=rng.choice(_RANKS), size=size, seed=seed, **settings)
            made.append(_Adapter(LoRARequest(f"adapter-{number}", number, folder), added))
        return made

    def _prompt(self, common: list[int], vocab: int) -> list[int]:
        own = [self._rng.randrange(3, vocab) for _ in range(self._rng.randrange(1, 40))]
        before = common if self._rng.random() < 0.6 else []
        return [*before, *own, self._rng.choice(_LETTERS)]  # the text of what follows begins with a character

    def _params(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            seed=rng.randrange(2**31),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            max_tokens=rng.randrange(1, 33),
            logprobs=rng.choice([None, 1, 5]),
            prompt_logprobs=rng.choice([None, None, 3]) if self.kind in FAMILIES else None,
            ignore_eos=True,
        )


def _is_unsure(model: Any, added: dict[str, Tensor], output: RequestOutput) -> bool:
    """Whether rounding of the embedding alone moves the logits further than is allowed: a near-tie of two experts."""
    table = model.get_input_embeddings().weight
    (name,) = (each for each, weight in model.named_parameters() if weight is table)
    ids, logits = [*output.prompt_token_ids, *output.outputs[0].token_ids], _logits_of(model)
    drawn = torch.Generator().manual_seed(0)
    with with_added(model, added):
        exact = logits(ids)
        for _ in range(_TRIES):
            noise = torch.randn(table.shape, generator=drawn) * _ROUNDING * float(table.detach().std())
            with with_added(model, {name: noise}):
                if float((logits(ids) - exact).abs().max()) > _APART:
                    return True
    return False


def _logits_of(model: Any) -> Callable[[list[int]], Tensor]:
    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        found: Tensor = model(torch.tensor([ids])).logits[0]
        return found

    return logits
