"""Fuzzing of checkpoint files: those of the demo with faults; accepted ones are compared with another reader."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attacks.mutation import hostile_value, mutated_bytes, mutated_json
from attacks.trial import Wrong
from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.models import check_model, describe_model, load_model, resolve_model_path
from graphdecode.models.checkpoint import Checkpoint
from graphdecode.text import load_tokenizer
from graphdecode.text.input_processor import InputProcessor

DEMO = resolve_model_path("demo")
PROMPT = [52, 49, 55, 43, 51, 56, 53, 61]
TOLERANCE = 2e-3  # of float32 logits up to about 20
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CHANGES: list[dict[str, Any]] = [
    {},
    {},
    {"rope_parameters": _YARN},
    {"rope_parameters": _LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 128}},
    {"rope_parameters": None, "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 6},
    {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1]},
    {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "moe_intermediate_size": 32},
    {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "max_window_layers": 2},
    {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
]


def _copied(folder: Path, *, links: bool = True) -> Path:
    """Copy the demo's folder; its weights are a hard link if possible."""
    model = folder / "model"
    model.mkdir()
    for file in DEMO.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, model)
        elif links:
            try:
                os.link(file, model / file.name)
            except OSError:
                shutil.copy(file, model)
    return model


def our_logits(model: Path) -> torch.Tensor:
    """Return the library's logits after `PROMPT`, in float32."""
    from driven_decoder import DrivenDecoder

    decoder = load_model(model, device="cpu", dtype="float32", max_sequence_length=64)
    driven = DrivenDecoder(decoder, 1, max_length=32)
    driven.prefill([PROMPT[:-1]], [0])
    return driven.decode(PROMPT[-1:], [len(PROMPT) - 1])[0]


def _their_logits(model: Path) -> torch.Tensor | None:
    """Return transformers' logits; None if it refuses the checkpoint."""
    try:
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            return theirs.eval()(torch.tensor([PROMPT])).logits[0, -1]
    except Exception:  # transformers has no common error class
        return None


class ConfigAttack:
    """A config.json with faults; an accepted model has the logits of transformers."""

    name = "config.json"

    def __init__(self) -> None:
        self._settings = json.loads((DEMO / "config.json").read_text())
        self._logits = our_logits(DEMO)
        _their_logits(DEMO)

    def run(self, rng: random.Random, folder: Path) -> None:
        model = _copied(folder)
        settings = self._settings | rng.choice(_CHANGES)
        if rng.random() < 0.5:  # a field that is read, with its type
            name = rng.choice([*settings, "sliding_window", "layer_types", "rope_theta", "partial_rotary_factor"])
            settings[name] = hostile_value(rng)
        content = json.dumps(settings).encode() if rng.random() < 0.4 else mutated_json(rng, settings)
        (model / "config.json").write_bytes(content)
        if describe_model(model).max_position_embeddings < len(PROMPT):
            return  # no engine takes such a prompt
        ours = our_logits(model)
        if ours.shape == self._logits.shape and torch.equal(ours, self._logits):
            return  # the changed field is not read
        theirs = _their_logits(model)
        if theirs is None:
            if not ours.isfinite().all():
                raise Wrong(f"logits are not finite: {content[:600]!r}")
            return
        difference = (ours - theirs).abs().max().item()
        both_lost = not ours.isfinite().all() and not theirs.isfinite().all()
        if not difference < TOLERANCE and not both_lost:
            raise Wrong(f"logits differ by {difference} from those of transformers: {content[:900]!r}")


class GenerationAttack:
    """A generation_config.json with faults; if accepted, outputs are those of the same explicit parameters."""

    name = "generation_config.json"

    def __init__(self) -> None:
        self._settings = json.loads((DEMO / "generation_config.json").read_text()) | {
            "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "min_p": 0.01,
        }  # fmt: skip
        self._tokenizer = load_tokenizer(DEMO)

    def run(self, rng: random.Random, folder: Path) -> None:
        model = _copied(folder)
        content = mutated_json(rng, self._settings)
        (model / "generation_config.json").write_bytes(content)
        with LLM(model, tokenizer=self._tokenizer, max_batch_size=1, max_sequence_length=32, device="cpu") as llm:
            params = llm.get_default_sampling_params()
            settings = json.loads(content)
            if settings.get("do_sample"):
                for name in ("temperature", "top_p"):
                    if settings.get(name) is not None and getattr(params, name) != settings[name]:
                        raise Wrong(f"{name} is {getattr(params, name)}: {content!r}")
            elif params.temperature != 0.0:
                raise Wrong(f"not greedy: {content!r}")
            eos = settings.get("eos_token_id", 257)
            ends = set(eos if isinstance(eos, list) else [eos])
            [output] = llm.generate("417+385=", SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
            if ends == {257} and output.outputs[0].text.strip() != "802":
                raise Wrong(f"the output is {output.outputs[0].text!r}: {content!r}")


def stored_tensors(file: Path) -> dict[str, np.ndarray]:
    """Read a float32 safetensors file by its published layout, without a library."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, told in header.items():
        begin, end = told["data_offsets"]
        if told["dtype"] != "F32":
            raise Wrong(f"{name} is of {told['dtype']}, and was accepted")
        found[name] = np.frombuffer(data[8 + length + begin : 8 + length + end], "<f4").reshape(told["shape"])
    return found


class SafetensorsAttack:
    """A safetensors file with faults in its header or elsewhere; accepted tensors equal those of the file."""

    name = "model.safetensors"

    def __init__(self) -> None:
        data = (DEMO / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        self._header, self._tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
        self._data = data

    def run(self, rng: random.Random, folder: Path) -> None:
        model = _copied(folder, links=False)
        file = model / "model.safetensors"
        kind = rng.randrange(4)
        if kind == 0:
            file.write_bytes(mutated_bytes(rng, self._data))
        else:
            header = mutated_json(rng, self._header)
            length = (
                len(header)
                if kind < 3
                else rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, max(len(header) + rng.randrange(-9, 9), 0)])
            )
            file.write_bytes(length.to_bytes(8, "little") + header + self._tensors)
        check_model(model)
        source, stored = Checkpoint(model), stored_tensors(file)
        for name, tensor in source.tensors.items():
            given = torch.empty(tensor.shape, dtype=torch.float32)
            source.read(name, given)
            if given.numpy().tobytes() != stored[name].tobytes():
                raise Wrong(f"{name} is not what the file holds")


class IndexAttack:
    """A shard index with faults, among hostile files; if accepted, the tensors are exactly the demo's."""

    name = "index of shards"

    def __init__(self) -> None:
        from safetensors.torch import load_file

        self._tensors = load_file(DEMO / "model.safetensors")

    def run(self, rng: random.Random, folder: Path) -> None:
        from safetensors.torch import save_file

        model = _copied(folder, links=False)
        names = sorted(self._tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, held in shards.items():
            save_file({name: self._tensors[name] for name in held}, model / file)
        save_file({names[0]: torch.zeros_like(self._tensors[names[0]])}, folder / "outside.safetensors")
        index: Any = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
        kind = rng.randrange(4)
        if kind == 0:
            name = rng.choice(
                ["../outside.safetensors", str(folder / "outside.safetensors"), "..", "pipe", "link", "/dev/zero"]
            )
            index["weight_map"][rng.choice(names)] = name
        (model / "link").symlink_to("../outside.safetensors")
        os.mkfifo(model / "pipe")
        content = json.dumps(index).encode() if kind == 0 else mutated_json(rng, index)
        (model / "model.safetensors.index.json").write_bytes(content)
        check_model(model)
        source = Checkpoint(model)
        for name, tensor in source.tensors.items():
            given = torch.empty(tensor.shape, dtype=torch.float32)
            source.read(name, given)
            if not torch.equal(given, self._tensors[name]):
                raise Wrong(f"{name} is not the demo's: {content[:500]!r}")


class TokenizerAttack:
    """Tokenizer files with faults; an accepted tokenizer gives transformers' ids or refuses a prompt, and the engine
    works as before afterwards."""

    name = "tokenizer files"
    _TEXTS = ("417+385=", "rev wörld 日本\n\n <|bos|>", "")

    def __init__(self) -> None:
        self._llm = LLM("demo", device="cpu", max_batch_size=3, max_sequence_length=48)
        self._answer = (
            self._llm.generate("417+385=", SamplingParams(temperature=0.0), use_tqdm=False)[0].outputs[0].token_ids
        )
        AutoTokenizer.from_pretrained(DEMO)

    def run(self, rng: random.Random, folder: Path) -> None:
        model = _copied(folder)
        name = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer.json", "tokenizer_config.json"])
        content = mutated_json(rng, json.loads((DEMO / name).read_text()))
        (model / name).write_bytes(content)
        tokenizer = load_tokenizer(model)
        theirs = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        llm = self._llm
        llm.tokenizer, llm.input_processor = tokenizer, InputProcessor(llm.engine.rules, llm.engine.seed, tokenizer)
        refusal: GraphdecodeError | None = None
        for text in self._TEXTS:
            try:
                ids = llm.input_processor.encode(text)
                expected = theirs(text).input_ids
                if ids != expected and expected:
                    raise Wrong(f"ids {ids} are not {theirs(text).input_ids}: {content[:400]!r}")
                llm.generate(
                    text, SamplingParams(temperature=0.0, max_tokens=4, repetition_penalty=1.2), use_tqdm=False
                )
            except GraphdecodeError as error:
                refusal = error
        again = (
            llm.generate([PROMPT], SamplingParams(temperature=0.0, detokenize=False), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
        if again != self._answer:
            raise Wrong(f"afterwards the demo answers {again}, not {self._answer}")
        if refusal is not None:
            raise refusal
