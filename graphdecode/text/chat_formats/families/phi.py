"""Phi-4-mini: a list of JSON between tokens."""

from graphdecode.text.chat_formats.chat_format import CallSyntax, ChatFormat, ChatFormatFamily, JsonCall

PHI_4_MINI = ChatFormat(
    "phi4_mini_json",
    calls=CallSyntax(JsonCall(), opening="<|tool_call|>", closing="<|/tool_call|>", is_list=True, separator=", "),
)
FAMILIES = [
    ChatFormatFamily(PHI_4_MINI, signs=("<|tool_call|>", "<|/tool_call|>")),
    ChatFormatFamily(PHI_4_MINI, signs=("<|tool|>", "<|/tool|>"), tool_call_parsers=("phi4_mini_json",)),
]
