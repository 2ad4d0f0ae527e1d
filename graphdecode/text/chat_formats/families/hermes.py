"""Hermes' JSON between tags: Hermes, Qwen2.5 and Qwen3, Granite 4, SmolLM3."""

from graphdecode.text.chat_formats.chat_format import CallSyntax, ChatFormat, ChatFormatFamily, JsonCall

HERMES = ChatFormat("hermes", calls=CallSyntax(JsonCall(), opening="<tool_call>\n", closing="\n</tool_call>"))
FAMILIES = [ChatFormatFamily(HERMES, signs=("<tool_call>",), tool_call_parsers=("hermes", "qwen3_json", "granite4"))]
