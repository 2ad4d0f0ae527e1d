"""Gemma 4 and FunctionGemma: names and values with quotes of their own."""

from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    ChatFormat,
    ChatFormatFamily,
    LiteralArguments,
    NamedCall,
)

_CONSTANTS = ("true", "false", "null")
GEMMA_4 = ChatFormat(
    "gemma4",
    calls=CallSyntax(
        NamedCall("call:", "{", "}", LiteralArguments(":", ('<|"|>',), False, _CONSTANTS, True, ":", ",")),
        opening="<|tool_call>",
        closing="<tool_call|>",
        separator="",
    ),
)
FUNCTION_GEMMA = ChatFormat(
    "functiongemma",
    calls=CallSyntax(
        NamedCall("call:", "{", "}", LiteralArguments(":", ("<escape>",), False, _CONSTANTS, True, ":", ",")),
        opening="<start_function_call>",
        closing="<end_function_call>",
    ),
)
FAMILIES = [
    ChatFormatFamily(GEMMA_4, signs=("<|tool_call>",), tool_call_parsers=("gemma4",)),
    ChatFormatFamily(FUNCTION_GEMMA, signs=("<start_function_call>",), tool_call_parsers=("functiongemma",)),
]
