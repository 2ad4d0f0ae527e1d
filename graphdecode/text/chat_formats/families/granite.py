"""Granite 3: a list of JSON after a token."""

from graphdecode.text.chat_formats.chat_format import CallSyntax, ChatFormat, ChatFormatFamily, JsonCall

GRANITE = ChatFormat("granite", calls=CallSyntax(JsonCall(), opening="<|tool_call|>", is_list=True, separator=", "))
FAMILIES = [ChatFormatFamily(GRANITE, signs=("<|tool_call|>",), tool_call_parsers=("granite",))]
