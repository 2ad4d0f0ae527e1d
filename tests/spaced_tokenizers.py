"""Small tokenizers of all kinds: how they mark spaces, and how they write bytes."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

TEXT = "Hello world é😊é world! 日本"
_PIECES = ["▁Hello", "▁world", "▁", *"Helowrd!"]
_BYTES = sorted({*TEXT.encode(), 0xFF} - set(b"Hello world!"))


def _unigram(byte_fallback: bool) -> Tokenizer:
    pieces = [("<unk>", -20.0), ("<s>", -20.0), ("</s>", -20.0)]
    pieces += [(piece, -1.0 if len(piece) > 1 else -5.0) for piece in _PIECES]
    pieces += [(f"<0x{byte:02X}>", -8.0) for byte in range(256)] if byte_fallback else [(c, -6.0) for c in "é😊日本"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def sentencepiece(*, strips: bool = True) -> Tokenizer:
    """As Llama 2's and Mistral's; without `strips` as Gemma's. The vocabulary has bytes."""
    tokenizer = _unigram(byte_fallback=True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if strips else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As T5's and the newer Llama 2's."""
    tokenizer = _unigram(byte_fallback=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme=scheme, split=False)
    return tokenizer


def byte_level() -> Tokenizer:
    """As GPT-2's: a token for each byte, and some for parts of two characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = ["ĠðŁ", "©ð"]
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "Ġð", *parts])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "ð"), ("Ġð", "Ł"), ("©", "ð")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def word_pieces() -> Tokenizer:
    """As BERT's: the space before a token depends on the token."""
    words = ["[UNK]", "hello", "world", "##s", "!", "é"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def suffixes() -> Tokenizer:
    """As GPT's first: the space before a token depends on the token before it."""
    words = ["hello</w>", "wor", "ld</w>", "!</w>", "wor</w>"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="!</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


KINDS = {
    "sentencepiece": sentencepiece,
    "gemma": lambda: sentencepiece(strips=False),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_never": lambda: metaspace("never"),
    "byte_level": byte_level,
}
