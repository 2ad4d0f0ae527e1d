"""The families whose chat formats are known: one file each, or a few that are close."""

from graphdecode.text.chat_formats.families import (
    deepseek,
    gemma,
    glm,
    granite,
    harmony,
    hermes,
    llama,
    mistral,
    nemotron,
    phi,
    pythonic,
    qwen,
)

# the first whose signs are in a template is taken: those with more of their own come first
FAMILIES = [
    *harmony.FAMILIES,
    *deepseek.FAMILIES,
    *gemma.FAMILIES,
    *glm.FAMILIES,
    *qwen.FAMILIES,
    *nemotron.FAMILIES,
    *phi.FAMILIES,
    *granite.FAMILIES,
    *mistral.FAMILIES,
    *hermes.FAMILIES,
    *pythonic.FAMILIES,
    *llama.FAMILIES,
]

__all__ = ["FAMILIES"]
