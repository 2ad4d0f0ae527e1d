"""Phi-4-mini: a list of JSON between tokens."""

from dataclasses import replace

from graphdecode.text.chat_formats.chat_format import CallSyntax, ChatFormat, ChatFormatFamily, JsonCall

PHI_4_MINI = ChatFormat(
    "phi4_mini_json",
    calls=CallSyntax(JsonCall(), opening="<|tool_call|>", closing="<|/tool_call|>", is_list=True, separator=", "),
)
IN_SYSTEM = replace(PHI_4_MINI, name="phi4_mini_system", tools_in_system=True)
FAMILIES = [
    ChatFormatFamily(PHI_4_MINI, signs=("<|tool_call|>", "<|/tool_call|>"), tool_call_parsers=("phi4_mini_json",)),
    ChatFormatFamily(IN_SYSTEM, signs=("<|tool|>", "<|/tool|>", "message['tools']")),
]
