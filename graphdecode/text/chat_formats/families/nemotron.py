"""Nemotron Nano 2 and Nemotron-H: a list of JSON between tags."""

from graphdecode.text.chat_formats.chat_format import CallSyntax, ChatFormat, ChatFormatFamily, JsonCall

NEMOTRON = ChatFormat(
    "nemotron_json",
    calls=CallSyntax(JsonCall(), opening="<TOOLCALL>", closing="</TOOLCALL>", is_list=True, separator=", "),
)
FAMILIES = [ChatFormatFamily(NEMOTRON, signs=("<TOOLCALL>",), tool_call_parsers=("nemotron_json",))]
