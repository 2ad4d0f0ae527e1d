"""All kinds of attack by name; a line here adds one."""

from __future__ import annotations

from collections.abc import Callable

from attacks.checkpoints import ConfigAttack, GenerationAttack, IndexAttack, SafetensorsAttack, TokenizerAttack
from attacks.gguf_files import GgufAttack, GgufTokenizerAttack
from attacks.requests import ParamsAttack, PromptAttack
from attacks.settings import ChoicesAttack, TomlAttack
from attacks.trial import Attack

KINDS: dict[str, Callable[[], Attack]] = {
    attack.name: attack
    for attack in (
        ConfigAttack,
        GenerationAttack,
        SafetensorsAttack,
        IndexAttack,
        TokenizerAttack,
        GgufAttack,
        GgufTokenizerAttack,
        TomlAttack,
        PromptAttack,
        ParamsAttack,
        ChoicesAttack,
    )
}
