"""Every field of PEFT's `adapter_config.json` is honoured, changes nothing, or is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphdecode.models import load_model
from graphdecode.models.adapters import AdapterError
from graphdecode.models.peft.fields import FIELDS, HONOURED, NEUTRAL

PINNED = json.loads(Path(__file__).with_name("peft_fields.json").read_text())
OTHERS = {"runtime_config", "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio"}  # not saved by PEFT; of ms-swift
MODULE = "model.layers.1.self_attn.q_proj"
REFUSED: dict[str, list[Any]] = {
    "peft_type": ["IA3", "LOHA", "ADALORA", None],
    "init_lora_weights": ["pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga", "unheard of"],
    "alora_invocation_tokens": [[1, 2]],
    "arrow_config": [{"top_k": 3}],
    "bias": ["all", "lora_only"],
    "enable_lora": [[True, False, True]],
    "kasa_config": [{"beta": 1e-4}],
    "layer_replication": [[[0, 2], [1, 3]]],
    "lora_bias": [True],
    "megatron_config": [{"hidden_size": 64}],
    "modules_to_save": [["lm_head"]],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [1]}],
    "use_bdlora": [{"nblocks": 2}],
    "use_dora": [True],
    "use_qalora": [True],
    "use_rslora": ["yes", 2],
    "of_another_year": [True, 1, "all", {"scale": 2.0}],
}
HARMLESS: dict[str, list[Any]] = {
    "init_lora_weights": [None, True, False, "gaussian", "Gaussian", "orthogonal", "mica", "eva"],
    "loftq_config": [{"loftq_bits": 4}],
    "velora_config": [{"num_groups": 4}],
    "monteclora_config": [{"num_samples": 8}],
    "target_modules": ["all-linear", ["k_proj"], None],
    "layers_to_transform": [[0], 1],
    "lora_dropout": [0.5],
    "fan_in_fan_out": [True],
    "modules_to_save": [[], None],
    "of_another_year": [None, False, [], {}, ""],
}


def save(folder: Path, **changes: Any) -> Path:
    """Write an adapter of one product, as PEFT does."""
    drawn, shapes = torch.Generator().manual_seed(1), {"A": (8, 64), "B": (64, 8)}
    halves = {half: torch.randn(shape, generator=drawn) for half, shape in shapes.items()}
    named = {f"base_model.model.{MODULE}.lora_{half}.weight": matrix for half, matrix in halves.items()}
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(PINNED["defaults"] | changes))
    return folder


@pytest.fixture(scope="module")
def slots(checkpoint) -> Any:
    return load_model(checkpoint("llama-2"), device="cpu", dtype="float32", max_adapters=1).adapters


def matrices(slots: Any, folder: Path) -> list[torch.Tensor]:
    return [matrix for pair in slots.read(folder).matrices.values() for matrix in pair]


def test_the_table_has_the_fields_of_peft_and_no_others():
    assert FIELDS.keys() == PINNED["defaults"].keys() | PINNED["older"].keys() | OTHERS
    may_be_refused = {name for name, use in FIELDS.items() if use not in (HONOURED, NEUTRAL)}
    assert may_be_refused == REFUSED.keys() - {"use_rslora", "of_another_year"}


def test_the_table_has_the_fields_of_the_installed_peft():
    peft = pytest.importorskip("peft")
    assert peft.LoraConfig().to_dict().keys() <= FIELDS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_more_is_refused_by_name(slots, tmp_path, name):
    for value in REFUSED[name]:
        with pytest.raises(AdapterError, match=f"{name} is ") as refused:
            slots.read(save(tmp_path, **{name: value}))
        assert "adapter_config.json" in str(refused.value)


@pytest.mark.parametrize("name", [*HARMLESS, *PINNED["older"]])
def test_a_field_that_changes_nothing_changes_nothing(slots, tmp_path, name):
    plain = matrices(slots, save(tmp_path))
    for value in HARMLESS.get(name) or [PINNED["older"][name]]:
        for actual, expected in zip(matrices(slots, save(tmp_path, **{name: value})), plain, strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1.0),
        ({"lora_alpha": 4}, 0.5),
        ({"use_rslora": True}, 8**0.5),
        ({"alpha_pattern": {"q_proj": 24}}, 3.0),
        ({"r": 4, "rank_pattern": {"layers.1.self_attn.q_proj": 8}}, 1.0),
    ],
)
def test_the_others_are_honoured(slots, tmp_path, changes, scale):
    (_, plain), (_, actual) = (matrices(slots, save(tmp_path, **each)) for each in ({}, changes))
    torch.testing.assert_close(actual, plain * scale)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_multimodal_models_decoder_is_one_of_the_decoder(slots, tmp_path, prefix):
    _, expected = matrices(slots, save(tmp_path))
    path = f"{prefix}layers.1.self_attn.q_proj"
    file = save(tmp_path, alpha_pattern={f"^{path}": 24}) / "adapter_model.safetensors"  # PEFT's names, in full
    save_file({name.replace(MODULE, path): matrix for name, matrix in load_file(file).items()}, file)
    torch.testing.assert_close(matrices(slots, tmp_path)[1], 3.0 * expected)
    save_file({name.replace(path, f"model.visual.{path}"): matrix for name, matrix in load_file(file).items()}, file)
    with pytest.raises(AdapterError, match=r"visual.* is no product that adapters can change"):
        slots.read(tmp_path)


def test_what_training_kept_beside_the_matrices_is_not_read(slots, tmp_path):
    plain = matrices(slots, save(tmp_path))
    file = save(tmp_path) / "adapter_model.safetensors"
    name = f"base_model.model.{MODULE}.lora_"
    beside = {f"{name}velora_embed": torch.ones(4), f"{name}monteclora_sampler.std_prior": torch.ones(4)}
    save_file(load_file(file) | beside, file)
    for actual, expected in zip(matrices(slots, tmp_path), plain, strict=True):
        assert torch.equal(actual, expected)
    save_file(load_file(file) | {f"{name}diag": torch.ones(8)}, file)
    with pytest.raises(AdapterError, match=r"lora_diag is not the A or B of a product"):
        slots.read(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_link_out_of_the_folder_is_not_read(slots, tmp_path, name):
    folder = tmp_path / "models--one" / "snapshots" / "1"
    blobs = folder.parent.parent / "blobs"
    for directory in (folder, blobs):
        directory.mkdir(parents=True)
    expected = matrices(slots, save(folder))
    (folder / name).rename(blobs / "abc")
    (folder / name).symlink_to(blobs / "abc")  # as the hub's cache has it
    assert torch.equal(matrices(slots, folder)[1], expected[1])
    (blobs / "abc").rename(tmp_path / "secret")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterError, match=f"{name} is a link to .*secret, outside of its folder"):
        slots.read(folder)
