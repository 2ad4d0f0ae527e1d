"""The demo model in engines of different sizes."""

from collections.abc import Callable, Iterator

import pytest

from graphdecode import LLM, BucketConfig

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Make engines over the demo model, closed at the end of the test; keywords go to `BucketConfig`."""
    made: list[LLM] = []

    def make(*, prefix_cache: bool = True, seed: int = 0, **config: object) -> LLM:
        settings = BucketConfig(**{"max_batch_size": 4, "max_sequence_length": 128, "page_size": 16, **config})
        made.append(LLM("demo", config=settings, dtype="float32", prefix_cache=prefix_cache, seed=seed))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine with four rows."""
    with LLM("demo", config=BucketConfig(max_batch_size=4, max_sequence_length=128), dtype="float32") as engine:
        yield engine
