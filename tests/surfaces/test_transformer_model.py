"""The example: a small model of `TransformerLayer`s that generates with `pre_step`, `step` and a graph per bucket."""

from collections import OrderedDict

import pytest
import torch
from layer_oracle import laid_out, layer
from torch import nn

from graphdecode import BucketLadder, GraphManager, InferenceParams, Slot, StepBuffers
from graphdecode.surfaces.transformer_engine import RotaryPositionEmbedding, TransformerLayer

VOCABULARY, HIDDEN, HEADS, GROUPS, LAYERS, MAX_BATCH, MAX_LENGTH = 61, 32, 4, 2, 2, 4, 32
DIM = HIDDEN // HEADS


class Model(nn.Module):
    """Embedding, layers, head: what a user writes over the modules."""

    def __init__(self, form, device):
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, device=device)
        self.layers = nn.ModuleList(
            TransformerLayer(
                HIDDEN, 64, HEADS, GROUPS, layer_number=number, self_attn_mask_type="padding_causal", bias=False,
                normalization="RMSNorm", activation="swiglu", attn_input_format=form, device=device,
            )
            for number in range(1, LAYERS + 1)
        )  # fmt: skip
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
        self.freqs = RotaryPositionEmbedding(DIM, device=device)(MAX_LENGTH)
        generator = torch.Generator().manual_seed(8)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, tokens, inference_params):
        """Return logits, in the format of the tokens."""
        hidden = self.embedding(tokens)
        for module in self.layers:
            hidden = module(hidden, inference_params=inference_params, rotary_pos_emb=self.freqs)
        return self.head(hidden)


class Generator:
    """Prompts eagerly, all further tokens by graphs, one for each bucket of rows."""

    def __init__(self, form, paged, device):
        self.model, self.form, self.device = Model(form, device), form, device
        pages = {"total_num_pages": 40, "page_size": 4} if paged else {}
        self.params = InferenceParams(
            MAX_BATCH, MAX_LENGTH, GROUPS, DIM, torch.float32, is_paged=paged, qkv_format=form, device=device, **pages
        )
        for module in self.model.layers:
            self.params.allocate_memory(module.self_attention.layer_number)
        slots = [Slot("tokens", ("batch",), torch.int64, pad=1), Slot("sampled", ("batch",), torch.int64)]
        self.buffers = StepBuffers(slots, max_batch_size=MAX_BATCH, device=device)
        for name, tensor in self.params.tensors().items():
            self.buffers.adopt(name, tensor)
        ladder = BucketLadder([1, 2], MAX_BATCH)
        self.graphs = GraphManager(self.step, self.buffers, ladder, constants=[self.model, self.model.freqs])
        self.graphs.capture(progress=False)
        self.graphs.freeze()

    def step(self, batch):
        shape = {"bshd": (-1, 1), "sbhd": (1, -1), "thd": (-1,)}[self.form]
        logits = self.model(batch.tokens.view(shape), self.params)
        batch.sampled.copy_(logits.view(-1, VOCABULARY).argmax(-1))

    def prefill(self, prompts):
        """Return the first token of each prompt, all in one pass; `prompts` and who goes on are the step."""
        rows = [torch.tensor(tokens) for tokens in prompts]
        logits = self.model(laid_out(rows, self.form).long().to(self.device), self.params)
        if self.form == "thd":
            last = self.params.cu_seqlens_q[1 : len(rows) + 1].long() - 1
            return logits[last].argmax(-1).tolist()
        logits = logits.transpose(0, 1) if self.form == "sbhd" else logits
        return [logits[i, len(row) - 1].argmax().item() for i, row in enumerate(rows)]

    def generate(self, arrivals, count):
        """Serve `arrivals` (step number -> id, prompt), `count` tokens each; a newcomer's prompt joins a step."""
        texts, running, now = {}, [], 0
        while running or any(at >= now for at in arrivals):
            new = dict(arrivals.get(now, ()))
            running = [*reversed(running), *new]  # rows change places, too
            if running:
                step = OrderedDict((i, len(new[i]) if i in new else 1) for i in running)
                self.params.pre_step(step)
                if new:
                    sampled = self.prefill([new.get(i) or [texts[i][-1]] for i in running])
                else:
                    n = len(running)
                    self.buffers.tokens[:n].copy_(torch.tensor([texts[i][-1] for i in running]))
                    self.buffers.set_live_rows(n)
                    self.graphs.replay(n)
                    sampled = self.buffers.sampled[:n].tolist()
                for i, token in zip(running, sampled, strict=True):
                    texts.setdefault(i, []).append(token)
                running = [i for i in running if len(texts[i]) < count]
            now += 1
        return texts


def greedy(model, prompt, count):
    """The same tokens in float64, over the whole text again for each."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = model.embedding.weight.double().cpu()[tokens]
        for module in model.layers:
            hidden = layer(hidden, module, DIM, kind="RMSNorm", activation="swiglu")
        tokens.append((hidden[-1] @ model.head.weight.double().cpu().T).argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_a_small_model_generates_what_float64_generates(form, paged, device):
    generator = Generator(form, paged, device)
    prompts = {7: [5, 9, 33], 3: [60, 2], 12: [1, 1, 1, 8, 40], 4: [17], 20: [30, 31]}
    arrivals = {
        0: [(7, prompts[7]), (3, prompts[3])],
        4: [(12, prompts[12])],
        6: [(4, prompts[4])],
        11: [(20, prompts[20])],
    }
    texts = generator.generate(arrivals, count=9)
    assert texts == {i: greedy(generator.model, prompt, 9) for i, prompt in prompts.items()}
    replays = {report.bucket: report.replays for report in generator.graphs.report().buckets}
    assert replays.keys() == {1, 2, 4}
    assert all(replays.values()), "every bucket's graph was used"
    generator.graphs.close()
