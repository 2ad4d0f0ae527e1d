"""Fuzzing of GGUF files, their headers and tokenizers; accepted ones are compared with other implementations."""

from __future__ import annotations

import copy
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import torch
from gguf_checkpoints import random_model, write
from transformers import AutoModelForCausalLM, LlamaConfig

from attacks.checkpoints import PROMPT, TOLERANCE, our_logits
from attacks.gguf_content import ARRAY, BOOL, SIZES, STRING, UINT32, Field, fields_of, header_of, spoil_field
from attacks.mutation import mutated_bytes
from attacks.trial import Wrong
from graphdecode import LLM, GraphdecodeError, SamplingParams
from graphdecode.models import check_model, describe_model
from graphdecode.text import load_tokenizer
from graphdecode.text.input_processor import InputProcessor

_COMPARED = {"none", "linear"}  # rope scalings that are also computed here
_TEXTS = ("abab", "hello", "the", "")  # the empty text is only the begin token


class GgufAttack:
    """A GGUF model with faults in its header or elsewhere; an accepted one has the logits that transformers computes
    from what the gguf library reads."""

    name = "GGUF files"

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = write(random_model("llama"), "llama", Path(folder) / "model.gguf")
            self._whole = file.read_bytes()
            self._fields, reader = fields_of(file)
            self._infos: list[list[Any]] = [
                [
                    tensor.name,
                    [int(n) for n in tensor.shape],
                    int(tensor.tensor_type),
                    int(tensor.data_offset - reader.data_offset),
                ]
                for tensor in reader.tensors
            ]
            self._tensors = self._whole[reader.data_offset :]
            our_logits(file)
            if _their_logits(file) is None:
                raise RuntimeError("transformers cannot compute the model without faults")

    def _spoilt(self, rng: random.Random) -> bytes:
        """Return the file's bytes with faults."""
        kind = rng.randrange(8)
        if kind == 0:
            return mutated_bytes(rng, self._whole)
        if kind == 1:
            return mutated_bytes(rng, self._whole[: -len(self._tensors)]) + self._tensors
        fields, infos = list(self._fields), copy.deepcopy(self._infos)
        counts, version = [len(infos), len(fields)], 3
        if kind < 5:
            for _ in range(rng.choice([1, 1, 2])):
                spoil_field(rng, fields)
            counts = [len(infos), len(fields)]
        elif kind == 5:
            counts[rng.randrange(2)] = rng.choice([*SIZES, counts[0] - 1, counts[1] + 1])
            version = rng.choice([0, 1, 2, 3, 3, 4, 2**31, 3 << 24])
        else:
            info = rng.choice(infos)
            part = rng.randrange(5)
            if part == 0:
                info[0] = rng.choice(
                    [info[0] + "a", info[0][:-1], "", "a" * 70, "blk.1000000.attn_q.weight", infos[0][0]]
                )
            elif part == 1:
                info[1] = rng.choice([info[1][::-1], [], [1] * 5, [*info[1], 1], [rng.choice(SIZES), *info[1][1:]]])
            elif part == 2:
                info[2] = rng.choice([0, 1, 2, 3, 8, 14, 24, 28, 30, 39, 100, 2**32 - 1])
            elif part == 3:
                info[3] = rng.choice([*SIZES, info[3] + 32, info[3] - 32, infos[0][3]])
            else:
                infos.remove(info)
                counts[0] -= 1
        head = header_of(fields, infos, (counts[0] % 2**64, counts[1] % 2**64), version)
        return head.ljust(-(-len(head) // 32) * 32, b"\0") + self._tensors

    def run(self, rng: random.Random, folder: Path) -> None:
        file = folder / "model.gguf"
        file.write_bytes(self._spoilt(rng))
        check_model(file)
        if describe_model(file).max_position_embeddings < len(PROMPT):
            return  # no engine takes such a prompt
        ours, theirs = our_logits(file), _their_logits(file)
        if theirs is None:
            return  # a damaged tensor has only NaN
        difference = (ours - theirs).abs().max().item()
        both_lost = not ours.isfinite().all() and not theirs.isfinite().all()
        if not difference < TOLERANCE * max(1.0, theirs.abs().max().item() / 20) and not both_lost:
            raise Wrong(f"logits differ by {difference} from those of transformers")


def _their_logits(file: Path) -> torch.Tensor | None:
    """Return transformers' logits of a plain Llama; None if the file is another model or cannot be read."""
    try:
        fields, reader = fields_of(file)
        found = {key: value for key, _, value in fields}
        stated = {key.removeprefix("llama."): value for key, value in found.items() if key.startswith("llama.")}
        heads, hidden = stated["attention.head_count"], stated["embedding_length"]
        head_dim, scaling = stated.get("attention.key_length", hidden // heads), stated.get("rope.scaling.type", "none")
        other = stated.get("expert_count") or stated.get("rope.dimension_count", head_dim) != head_dim
        if found["general.architecture"] != "llama" or scaling not in _COMPARED or other:
            return None
        rope = {"rope_type": "default", "rope_theta": float(stated.get("rope.freq_base", 1e4))}
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": stated["rope.scaling.factor"]}
        held = {tensor.name for tensor in reader.tensors}
        kv_heads = stated.get("attention.head_count_kv", heads)
        config = LlamaConfig(
            vocab_size=int(next(tensor.shape[1] for tensor in reader.tensors if tensor.name == "token_embd.weight")),
            hidden_size=hidden, intermediate_size=stated["feed_forward_length"], num_attention_heads=heads,
            num_hidden_layers=stated["block_count"], num_key_value_heads=kv_heads, head_dim=head_dim,
            rms_norm_eps=stated["attention.layer_norm_rms_epsilon"], max_position_embeddings=stated["context_length"],
            rope_parameters=rope, tie_word_embeddings="output.weight" not in held,
        )  # fmt: skip
        # eager: a CPU's fused kernels turn NaN into numbers
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        stored = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
        state = {}
        for name, parameter in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = torch.from_numpy(
                np.array(stored[names.get_name(name, try_suffixes=(".weight", ".bias")) or ""], np.float32)
            )
            if "q_proj" in name or "k_proj" in name:
                own = heads if "q_proj" in name else kv_heads
                values = values.reshape(own, -1, 2, hidden).transpose(1, 2)
            state[name] = values.reshape(parameter.shape)
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            return model(torch.tensor([PROMPT])).logits[0, -1]
    except Exception:  # neither library has a common error class
        return None


class GgufTokenizerAttack:
    """A GGUF tokenizer with faults; an accepted one gives the ids of the plain algorithm, and the engine works as
    before afterwards."""

    name = "GGUF tokenizers"

    def __init__(self) -> None:
        self._llm = LLM("demo", device="cpu", max_batch_size=3, max_sequence_length=48)
        self._answer = self._answered()
        parts = [*"abehlot", "he", "ll", "hell", "hello", "ab", "abab", "th", "the"]
        tokens = ["<s>", "</s>", "<unk>", *parts]
        merges = ["h e", "l l", "he ll", "hell o", "a b", "ab ab", "t h", "th e"]
        shared: list[Field] = [
            ("general.architecture", STRING, "llama"),
            ("tokenizer.ggml.tokens", ARRAY, tokens),
            ("tokenizer.ggml.token_type", ARRAY, [3, 3, 2] + [1] * len(parts)),
            ("tokenizer.ggml.bos_token_id", UINT32, 0),
            ("tokenizer.ggml.eos_token_id", UINT32, 1),
            ("tokenizer.ggml.unknown_token_id", UINT32, 2),
            ("tokenizer.ggml.add_bos_token", BOOL, False),
            ("tokenizer.chat_template", STRING, "{% for m in messages %}{{ m['content'] }}{% endfor %}"),
        ]
        bytes_: list[Field] = [
            ("tokenizer.ggml.model", STRING, "gpt2"),
            ("tokenizer.ggml.pre", STRING, "gpt-2"),
            ("tokenizer.ggml.merges", ARRAY, merges),
        ]
        scores = [0.0] * 10 + [-float(n) for n in range(len(tokens) - 10)]
        pieces: list[Field] = [
            ("tokenizer.ggml.model", STRING, "llama"),
            ("tokenizer.ggml.scores", ARRAY, scores),
            ("tokenizer.ggml.add_space_prefix", BOOL, False),
        ]
        self._kinds = [shared + bytes_, shared + pieces]

    def _answered(self) -> list[int]:
        params = SamplingParams(temperature=0.0, detokenize=False)
        return self._llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids

    def run(self, rng: random.Random, folder: Path) -> None:
        fields = list(rng.choice(self._kinds))
        for _ in range(rng.choice([1, 1, 2])):
            spoil_field(rng, fields)
        content = header_of(fields, [], (0, len(fields)), 3)
        file = folder / "tokenizer.gguf"
        file.write_bytes(mutated_bytes(rng, content) if rng.random() < 0.2 else content)
        tokenizer = load_tokenizer(file)
        llm, refusal = self._llm, None
        llm.tokenizer, llm.input_processor = tokenizer, InputProcessor(llm.engine.rules, llm.engine.seed, tokenizer)
        for text in _TEXTS:
            try:
                ids, expected = llm.input_processor.encode(text), _plain_ids(file, text)
                if text and expected is not None and ids != expected:
                    raise Wrong(f"ids of {text} are {ids}, not {expected}: {fields!r:.1200}")
                llm.generate(text, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
                llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=2), use_tqdm=False)
            except GraphdecodeError as error:
                refusal = error
        if self._answered() != self._answer:
            raise Wrong(f"afterwards the demo answers {self._answered()}, not {self._answer}")
        if refusal is not None:
            raise refusal


def _plain_ids(file: Path, text: str) -> list[int] | None:
    """Return the ids of a word by merging adjacent tokens, the best pair first; None if other rules apply."""
    try:
        found = {key.removeprefix("tokenizer.ggml."): value for key, _, value in fields_of(file)[0]}
    except Exception:  # it has no common error class
        return None
    tokens, kinds = found["tokens"], found["token_type"]
    ids = {token: index for index, token in enumerate(tokens)}
    plain = all(kinds[index] in (1, 2) for token, index in ids.items() if token in text)
    if (
        not plain
        or not set(text) <= ids.keys()
        or found.get("add_bos_token") is not False
        or found.get("add_eos_token")
    ):
        return None
    prefixed = found.get("add_space_prefix", found["model"] == "llama")
    if prefixed or (found["model"] == "gpt2" and found["pre"] != "gpt-2"):
        return None
    named = [found.get(f"{use}_token_id", 0) for use in ("bos", "eos", "unknown", "padding")]
    if any(tokens[index] in text for index in named):
        return None  # special tokens are found first
    if found["model"] == "gpt2":
        ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in reversed(list(enumerate(found.get("merges", []))))}
    else:
        ranks = {}
    parts = list(text)
    while True:
        best = None
        for at, pair in enumerate(pairwise(parts)):
            whole = ids.get("".join(pair))
            rank = ranks.get(pair)
            if found["model"] == "llama" and whole is not None and kinds[whole] in (1, 4):
                rank = -found["scores"][whole]
            if rank is not None and (best is None or rank < best[0]):
                best = rank, at
        if best is None:
            return [ids[part] for part in parts]
        parts[best[1] : best[1] + 2] = ["".join(parts[best[1] : best[1] + 2])]
