"""Calls as Python writes them: Llama 3.2 and 4, Gemma 3, and between tokens LFM2."""

from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    ChatFormat,
    ChatFormatFamily,
    LiteralArguments,
    NamedCall,
)

_CALL = NamedCall("", "(", ")", LiteralArguments("=", ('"', "'"), True, ("True", "False", "None"), False, ": ", ", "))
PYTHONIC = ChatFormat("pythonic", calls=CallSyntax(_CALL, is_list=True, separator=", "))
LLAMA_4 = ChatFormat(
    "llama4_pythonic",
    calls=CallSyntax(_CALL, is_list=True, separator=", ", optional_opening="<|python_start|>"),
)
LFM2 = ChatFormat(
    "lfm2",
    calls=CallSyntax(_CALL, opening="<|tool_call_start|>", closing="<|tool_call_end|>", is_list=True, separator=", "),
)
FAMILIES = [
    ChatFormatFamily(LFM2, signs=("<|tool_call_start|>",), tool_call_parsers=("lfm2",)),
    ChatFormatFamily(LFM2, signs=("<|tool_list_start|>",)),
    ChatFormatFamily(LLAMA_4, signs=("[func_name1(param", "<|header_start|>"), tool_call_parsers=("llama4_pythonic",)),
    ChatFormatFamily(PYTHONIC, signs=("[func_name1(param",), tool_call_parsers=("pythonic",)),
]
