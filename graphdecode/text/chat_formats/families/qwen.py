"""XML with a tag for each parameter: Qwen3-Coder, Qwen3.5, Nemotron 3."""

from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    ChatFormat,
    ChatFormatFamily,
    NamedCall,
    TaggedArguments,
)

_ARGUMENTS = TaggedArguments("<parameter=", ">\n", "\n</parameter>\n")
QWEN_XML = ChatFormat(
    "qwen_xml",
    calls=CallSyntax(
        NamedCall("<function=", ">\n", "</function>", _ARGUMENTS), opening="<tool_call>\n", closing="\n</tool_call>"
    ),
)
FAMILIES = [
    ChatFormatFamily(
        QWEN_XML, signs=("<tool_call>", "<function=", "<parameter="), tool_call_parsers=("qwen3_xml", "qwen3_coder")
    )
]
