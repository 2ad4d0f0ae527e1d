"""Each public name of the surfaces has an example in docs/surfaces.md; that they run is tested with all documents."""

import re
from pathlib import Path

from graphdecode import BatchDecodeWithPagedKVCacheWrapper, InferenceParams, SlotKVCacheManager
from graphdecode.surfaces import flashinfer, optimum_neuron, transformer_engine

TEXT = (Path(__file__).parents[2] / "docs" / "surfaces.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_each_public_name_has_an_example():
    names = {*flashinfer.__all__, *optimum_neuron.__all__, *transformer_engine.__all__}
    names |= {"append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"}
    names |= {"merge_state", "merge_state_in_place", "merge_states"}
    names -= {"NonPagedKVCacheManager", "PagedKVCacheManager"}  # `InferenceParams` makes them
    for surface in (InferenceParams, SlotKVCacheManager, BatchDecodeWithPagedKVCacheWrapper):
        names |= {name for name, verb in vars(surface).items() if callable(verb) and not name.startswith("_")}
    assert not [name for name in sorted(names) if not any(name in text for text in EXAMPLES)]
