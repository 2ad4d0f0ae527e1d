"""The steps that the engine can run, and their inputs and outputs."""

from graphdecode.engine.steps.batches import DecodeBatch, SpeculativeBatch
from graphdecode.engine.steps.decode import DecodeStep
from graphdecode.engine.steps.speculative import SpeculativeStep
from graphdecode.engine.steps.step import (
    ENDED_BEFORE,
    NO_CHOICE,
    Drafting,
    RowInputs,
    RowSampling,
    SequenceMemory,
    Step,
    StepDrafts,
    StepLogprobs,
    StepSetting,
    StepTokens,
    register_step,
)

__all__ = [
    "ENDED_BEFORE",
    "NO_CHOICE",
    "DecodeBatch",
    "DecodeStep",
    "Drafting",
    "RowInputs",
    "RowSampling",
    "SequenceMemory",
    "SpeculativeBatch",
    "SpeculativeStep",
    "Step",
    "StepDrafts",
    "StepLogprobs",
    "StepSetting",
    "StepTokens",
    "register_step",
]
