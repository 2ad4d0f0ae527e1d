"""Fuzzing of configuration files and of files in the cache folder."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attacks.mutation import hostile_value, mutated_bytes, mutated_json
from attacks.trial import Wrong
from graphdecode import EngineConfig
from graphdecode.engine.capacity import plan_checked_capacity
from graphdecode.kernels.linear.small_linear import SmallLinearConfig
from graphdecode.linear import linear_choice
from graphdecode.linear.linear_choice import ChoiceCache, LinearTuner
from graphdecode.models import describe_model
from making.configuration import default_file

CONFIG = SmallLinearConfig("dot", 32, 64, 2, 4, 2)


class TomlAttack:
    """A configuration file with faults; accepted values are those of a TOML reader, and sizes fit or are refused."""

    name = "configuration (TOML)"

    def __init__(self) -> None:
        self._text = default_file()
        self._model = describe_model("demo")

    def run(self, rng: random.Random, folder: Path) -> None:
        text = self._text.encode()
        lines = self._text.splitlines()
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.choice([number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")])
            value = hostile_value(rng)
            words = ["nan", "inf", "-1", "0", "1", "2147483647", "2147483648", "65536", "4096", '""', "[1, 2]", "1e400"]
            words.append(json.dumps(value) if not isinstance(value, dict) else "{}")
            lines[at] = f"{lines[at].partition(' = ')[0]} = {rng.choice(words)}"
        text = "\n".join(lines).encode()
        if rng.random() < 0.3:
            text = mutated_bytes(rng, text)
        file = folder / "config.toml"
        file.write_bytes(text)
        config = EngineConfig.load(file)
        stated = {name: value for section in tomllib.loads(text.decode()).values() for name, value in section.items()}
        for name, value in stated.items():
            holder: Any = config if hasattr(config, name) else config.buckets
            taken = getattr(holder, "capture_when" if name == "when" else name, value)
            if taken != value and list(taken) != value:
                raise Wrong(f"{name} is {taken!r}, but the file says {value!r}")
        plan_checked_capacity(config, self._model, torch.float32, torch.device("cpu"))


class ChoicesAttack:
    """A damaged file of measured choices: at most a new measurement, never an error or a wrong product."""

    name = "choices.json"

    def run(self, rng: random.Random, folder: Path) -> None:
        weight, rows = torch.empty(1024, 512), (1, 2)
        timed = {"plain": 2e-6, str(CONFIG): 1e-6}
        with patch.multiple(linear_choice, fastest_product=lambda *_: (CONFIG, timed), GraphClock=lambda _: None):
            first = LinearTuner(ChoiceCache(folder)).choose_small(weight, None, rows)
            file = folder / "choices.json"
            file.write_bytes(mutated_json(rng, json.loads(file.read_text())))
            choices = LinearTuner(ChoiceCache(folder)).choose_small(weight, None, rows)
        if choices.keys() != first.keys() or any(each.path not in ("plain", "small") for each in choices.values()):
            raise Wrong(f"{choices} are chosen: {file.read_bytes()[:500]!r}")
