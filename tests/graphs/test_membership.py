"""Law 2: a captured step is a function of device memory: sequences come, go and move rows without a new capture."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from graphdecode import GraphManager, Slot, StepBuffers
from graphdecode.buffers import Batch

ROWS, PAGES, PAGE, PAGES_PER_ROW, MODULUS = 6, 24, 2, 4, 9973
NULL_PAGE = PAGES


class Recurrence:
    """A toy decoder in integers: each step appends a token to a paged cache and hashes all that the row has there."""

    def __init__(self, device: str) -> None:
        self.buffers = StepBuffers(
            [
                Slot("tokens", ("batch",), torch.int64, pad=1, staged="rows"),
                Slot("lengths", ("batch",), torch.int64, pad=0, staged="rows"),
                Slot("pages", ("batch", PAGES_PER_ROW), torch.int64, pad=NULL_PAGE, staged="rows"),
            ],
            max_batch_size=ROWS,
            device=device,
        )
        self.cache = torch.zeros(PAGES + 1, PAGE, dtype=torch.int64, device=device)
        self.buffers.adopt("cache", self.cache)
        self.graphs = GraphManager(self.step, self.buffers, [1, 2, 4])
        self.graphs.capture(progress=False)

    def step(self, batch: Batch) -> None:
        rows = torch.arange(batch.size, device=self.cache.device)
        live = rows < batch.live_rows
        length = torch.where(live, batch.lengths, 0)
        page = batch.pages.gather(1, (length // PAGE)[:, None])[:, 0]
        self.cache[torch.where(live, page, NULL_PAGE), length % PAGE] = torch.where(live, batch.tokens, 0)
        kept = self.cache[torch.where(live[:, None], batch.pages, NULL_PAGE)].flatten(1)  # [batch, capacity]
        place = torch.arange(PAGES_PER_ROW * PAGE, device=self.cache.device)
        terms = torch.where(place <= length[:, None], kept * (place + 3), 0)
        batch.tokens.copy_(torch.where(live, terms.sum(-1) % MODULUS, batch.tokens))
        batch.lengths.add_(live.to(torch.int64))


def alone(prompt: int, count: int) -> list[int]:
    """The oracle: the same recurrence over a Python list."""
    tokens = [prompt]
    for _ in range(count):
        tokens.append(sum(token * (place + 3) for place, token in enumerate(tokens)) % MODULUS)
    return tokens


@dataclass
class Sequence:
    prompt: int
    wanted: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


@pytest.mark.parametrize("seed", range(8))
def test_law_2_one_capture_serves_every_membership(device: str, seed: int) -> None:
    draw = random.Random(seed)
    toy = Recurrence(device)
    captured = dict(toy.graphs.graphs)
    free, running, finished = list(range(PAGES)), [], []
    waiting = [Sequence(draw.randrange(1, MODULUS), draw.randrange(1, PAGES_PER_ROW * PAGE)) for _ in range(25)]
    while waiting or running:
        while waiting and len(running) < ROWS and draw.random() < 0.7:
            sequence = waiting.pop()
            sequence.tokens = [sequence.prompt]
            sequence.pages = [free.pop(draw.randrange(len(free))) for _ in range(PAGES_PER_ROW)]
            running.insert(draw.randrange(len(running) + 1), sequence)
        draw.shuffle(running)
        if not running:
            continue
        staged = toy.buffers.staging("rows")
        for row, sequence in enumerate(running):
            staged["tokens"][row] = sequence.tokens[-1]
            staged["lengths"][row] = len(sequence.tokens) - 1
            staged["pages"][row] = sequence.pages
        toy.buffers.upload("rows", len(running))
        if draw.random() < 0.5:
            toy.buffers.poison(len(running))
        pages_of_others = toy.cache[free].clone()
        for _ in range(draw.randrange(1, 3)):  # steady steps: nothing is uploaded between them
            if any(len(sequence.tokens) > sequence.wanted for sequence in running):
                break
            toy.graphs.replay(len(running))
            for sequence, token in zip(running, toy.buffers.tokens.tolist(), strict=False):
                sequence.tokens.append(token)
        assert torch.equal(toy.cache[free], pages_of_others), f"law 4, seed {seed}: a page of nobody was written"
        for sequence in [s for s in running if len(s.tokens) > s.wanted]:
            running.remove(sequence)
            finished.append(sequence)
            free.extend(sequence.pages)
    for sequence in finished:
        assert sequence.tokens == alone(sequence.prompt, len(sequence.tokens) - 1), f"seed {seed}"
    assert toy.graphs.graphs == captured, "nothing was captured again"
    assert len(finished) == 25


def test_law_2_the_rows_of_each_replay_are_live_and_no_others(device: str) -> None:
    toy = Recurrence(device)
    for batch_size in (3, 6, 1, 4, 2, 5):
        toy.buffers.lengths.zero_()
        toy.graphs.replay(batch_size)
        assert toy.buffers.lengths.tolist() == [1] * batch_size + [0] * (ROWS - batch_size)
        assert toy.buffers.live_rows.item() == batch_size
