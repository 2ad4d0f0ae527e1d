# ruff: noqa: RUF001 - the model writes these bars
"""DeepSeek V3: names and JSON between tokens; V3.2: tags of its own."""

from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    ChatFormat,
    ChatFormatFamily,
    JsonArguments,
    NamedCall,
    TaggedArguments,
)

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
V3 = ChatFormat(
    "deepseek_v3",
    calls=CallSyntax(
        NamedCall(f"function{_SEPARATOR}", "\n```json\n", "\n```", JsonArguments()),
        opening=_CALL,
        closing=_CALL_END,
        section_opening=_BEGIN,
        section_closing=_END,
    ),
)
V31 = ChatFormat(
    "deepseek_v31",
    calls=CallSyntax(
        NamedCall("", _SEPARATOR, "", JsonArguments()),
        opening=_CALL,
        closing=_CALL_END,
        separator="",
        section_opening=_BEGIN,
        section_closing=_END,
    ),
)
_TAG = "｜DSML｜"
V32 = ChatFormat(
    "deepseek_v32",
    calls=CallSyntax(
        NamedCall(
            'name="',
            '">\n',
            f"</{_TAG}invoke>",
            TaggedArguments(
                f'<{_TAG}parameter name="', '" string="true">', f"</{_TAG}parameter>\n", '" string="false">'
            ),
        ),
        opening=f"<{_TAG}invoke ",
        section_opening=f"<{_TAG}function_calls>\n",
        section_closing=f"\n</{_TAG}function_calls>",
    ),
)
FAMILIES = [
    ChatFormatFamily(V32, signs=("DSML", "function_calls"), tool_call_parsers=("deepseek_v32",)),
    ChatFormatFamily(V3, signs=(_BEGIN, "```json"), tool_call_parsers=("deepseek_v3",)),
    ChatFormatFamily(V31, signs=(_BEGIN,), tool_call_parsers=("deepseek_v31",)),
]
