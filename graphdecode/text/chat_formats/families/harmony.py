"""gpt-oss: OpenAI's harmony, whose messages say their channel and recipient."""

from graphdecode.text.chat_formats.chat_format import Channels, ChatFormat, ChatFormatFamily

HARMONY = ChatFormat(
    "openai",
    channels=Channels(
        start="<|start|>",
        channel="<|channel|>",
        constrain="<|constrain|>",
        message="<|message|>",
        endings=("<|end|>", "<|return|>", "<|call|>"),
        author="assistant",
        reasoning="analysis",
        calls="commentary",
        content="final",
        recipient=" to=functions.",
    ),
)
FAMILIES = [
    ChatFormatFamily(
        HARMONY,
        signs=("<|channel|>", "analysis"),
        tool_call_parsers=("openai", "gpt-oss"),
        reasoning_parsers=("openai_gptoss", "gpt-oss"),
    )
]
