"""Mistral: a list of JSON, or since version 11 of its tokenizer each name with its arguments."""

from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    ChatFormat,
    ChatFormatFamily,
    JsonArguments,
    JsonCall,
    NamedCall,
)

_OPENING = "[TOOL_CALLS]"
LIST = ChatFormat("mistral", calls=CallSyntax(JsonCall(), opening=_OPENING, is_list=True, separator=", "))
NAMED = ChatFormat(
    "mistral_named",
    calls=CallSyntax(NamedCall("", "[ARGS]", "", JsonArguments()), opening=_OPENING, separator=""),
)
WITH_IDS = ChatFormat(
    "mistral_with_ids",
    calls=CallSyntax(
        NamedCall("", "[ARGS]", "", JsonArguments(), id_marker="[CALL_ID]"), opening=_OPENING, separator=""
    ),
)
FAMILIES = [
    ChatFormatFamily(WITH_IDS, signs=(_OPENING, "[CALL_ID]", "[ARGS]")),
    ChatFormatFamily(NAMED, signs=(_OPENING, "[ARGS]")),
    ChatFormatFamily(LIST, signs=(_OPENING,), tool_call_parsers=("mistral",)),
]
