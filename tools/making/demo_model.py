"""Train the demo model in graphdecode/models/demo: about 20 minutes on two CPU cores.

    tools/make demo-model --out graphdecode/models/demo

The model is a byte-level Llama of 0.82 million parameters (tasks: tools/demo_tasks.py), trained by AdamW
with a cosine schedule and a loss on the answer's tokens only. Token id i < 256 is byte i. With a fixed --seed, number
of steps and threads, and no --minutes, a run repeats itself on the same machine.
"""

import math
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.logging import disable_progress_bar

from demo_tasks import TASKS, sample

NUM_BYTES = 256
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 256, 257, 258
MAX_POSITIONS = 512

# of each batch of a step: sums are half as long as words, and carries make addition the slowest to learn
SAMPLES_PER_STEP = ({"add": 128}, {"rev": 64, "sort": 64})
PEAK_LR = 2e-3
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
IGNORED = -100  # the label of positions without a loss (torch's cross_entropy)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose id i < 256 is byte i; it adds nothing, and every string round-trips."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}  # GPT-2's table
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    bos, eos, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "<|eos|>" typed in a prompt is seven bytes, never the end of the sequence
    )


def build_model() -> LlamaForCausalLM:
    rope: Any = {"rope_theta": 10000.0}  # transformers has another name for it
    tokens: Any = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    config = LlamaConfig(
        vocab_size=NUM_BYTES + len(SPECIAL_TOKENS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        **rope,
        **tokens,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **tokens)
    return model


def make_batch(task_counts: dict[str, int], rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input ids, labels), both int64 [batch, longest]; labels are `IGNORED` outside the answers."""
    samples = [sample(task, rng) for task, count in task_counts.items() for _ in range(count)]
    rows = [[*f"{prompt}{answer}".encode(), EOS_ID] for prompt, answer in samples]
    width = max(map(len, rows))
    # padding is on the right, where causal attention ignores it
    ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])  # [batch, width]
    labels = ids.masked_fill(ids == PAD_ID, IGNORED)
    for row, (prompt, _) in zip(labels, samples, strict=True):
        row[: len(prompt)] = IGNORED
    return ids[:, :-1], labels[:, 1:]


def answer_logits(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [answer tokens, vocab] and targets [answer tokens] of the answers."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [batch, width, hidden]
    kept = labels != IGNORED
    return model.lm_head(hidden[kept]), labels[kept]


@torch.inference_mode()
def exact_match(model: LlamaForCausalLM, task: str, count: int, rng: random.Random) -> float:
    """Return the share of samples whose every token is right after a right prefix: greedy exact match."""
    ids, labels = make_batch({task: count}, rng)
    logits, targets = answer_logits(model, ids, labels)
    right = torch.ones_like(labels, dtype=torch.bool)
    right[labels != IGNORED] = logits.argmax(-1) == targets
    return right.all(-1).float().mean().item()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model folder; each file appears whole."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for file in Path(scratch).iterdir():
            file.chmod(0o644)  # safetensors makes files private, and a wheel would keep that
            os.replace(file, out / file.name)


def learning_rate(step: int, progress: float) -> float:
    """Return a linear warm-up over `WARMUP_STEPS`, then a cosine to zero over `progress` in 0..1."""
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def main(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("graphdecode/models/demo"),
    steps: Annotated[int, typer.Option(help="Optimizer steps of 256 samples.", min=1)] = 6000,
    minutes: Annotated[float, typer.Option(help="End earlier, with the schedule shortened.", min=1e-9)] = math.inf,
    seed: Annotated[int, typer.Option(help="Of the weights and the samples.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between saves.", min=1)] = 500,
    eval_samples: Annotated[int, typer.Option(help="Of each task, per save.", min=1)] = 1000,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Train until `steps` or `minutes` are spent, whichever comes first."""
    disable_progress_bar()  # of the save, which would break our progress bar
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(f"train {seed}")
    model, tokenizer = build_model(), build_tokenizer()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    start = time.monotonic()
    bar = tqdm(range(steps), desc="train", unit="step", mininterval=5)
    for step in bar:
        progress = max(step / steps, (time.monotonic() - start) / (60 * minutes))
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = learning_rate(step, progress)
        batches = [make_batch(group, rng) for group in SAMPLES_PER_STEP]
        num_answer_tokens = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        step_loss = 0.0
        for ids, labels in batches:
            loss = F.cross_entropy(*answer_logits(model, ids, labels), reduction="sum") / num_answer_tokens
            loss.backward()
            step_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

        last = step + 1 == steps or progress >= 1
        if last or (step + 1) % save_every == 0:
            fresh = random.Random(f"eval {seed} {step}")
            accuracy = {task: exact_match(model, task, eval_samples, fresh) for task in TASKS}
            save(model, tokenizer, out)
            shown = "  ".join(f"{task} {share:.2%}" for task, share in accuracy.items())
            elapsed = (time.monotonic() - start) / 60
            bar.write(f"step {step + 1}  {elapsed:.1f} min  loss {step_loss:.4f}  exact match: {shown}")
        if last:
            break
    bar.close()
