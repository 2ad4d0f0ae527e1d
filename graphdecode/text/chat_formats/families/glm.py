"""GLM: a name, and a pair of tags for each argument; between them, GLM-4.5 and 4.6 write newlines, GLM-4.7 none."""

from graphdecode.text.chat_formats.chat_format import (
    CallSyntax,
    ChatFormat,
    ChatFormatFamily,
    NamedCall,
    TaggedArguments,
)

GLM = ChatFormat(
    "glm45",
    calls=CallSyntax(
        NamedCall("", "\n", "", TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
        opening="<tool_call>",
        closing="</tool_call>",
    ),
)
GLM_47 = ChatFormat(
    "glm47",
    calls=CallSyntax(
        NamedCall("", "", "", TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
        opening="<tool_call>",
        closing="</tool_call>",
        separator="",
    ),
)
_SIGNS = ("<tool_call>", "<arg_key>")
FAMILIES = [
    ChatFormatFamily(
        GLM_47, signs=(*_SIGNS, "</arg_key><arg_value>"), absent=("</arg_key>\n",), tool_call_parsers=("glm47",)
    ),
    ChatFormatFamily(GLM, signs=_SIGNS, tool_call_parsers=("glm45",)),
]
