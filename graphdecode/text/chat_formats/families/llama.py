"""Llama 3: JSON that nothing marks."""

from graphdecode.text.chat_formats.chat_format import CallSyntax, ChatFormat, ChatFormatFamily, JsonCall

LLAMA_JSON = ChatFormat(
    "llama3_json",
    calls=CallSyntax(JsonCall(arguments="parameters"), separator="; ", optional_opening="<|python_tag|>"),
)
BARE_JSON = ChatFormat("json", calls=CallSyntax(JsonCall()))  # what templates without tools are told to write
FAMILIES = [
    ChatFormatFamily(LLAMA_JSON, signs=("<|python_tag|>",), tool_call_parsers=("llama3_json", "llama4_json")),
    ChatFormatFamily(LLAMA_JSON, signs=('{"name": ', '"parameters": ', "<|eot_id|>")),
]
