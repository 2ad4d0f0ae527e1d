"""Codes of four to eight bits in 16-bit words for a GPU's tensor cores: their values, and dequantization in registers.

A word holds codes of columns that are `span` apart: of four bits, columns j, j + span, j + 2 span and j + 3 span,
lowest bits first; of eight bits, two. The same bits of adjacent words are `span` adjacent columns; shifts, masks and
one multiply-add turn two words in a register into operands of the tensor cores. A fifth and sixth bit are in separate
words, for 16 or 8 spans each.

Values are integers or small floats, which 16-bit floats hold exactly: no weight is rounded. An integer's bits are put
into the mantissa of a float whose lowest such bit counts 1, and the excess is subtracted; a float's bits are put into
exponent and mantissa, and a power of two corrects the bias.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_ROWS = 4096  # rows packed at a time, which bounds scratch memory


class Code(NamedTuple):
    """One kind of code."""

    bits: int
    zero: int | None  # subtracted from an integer; None: the code is a float

    @property
    def per_word(self) -> int:
        """Columns per word, of codes or of their lower four bits."""
        return 2 if self.bits == 8 else 4

    @property
    def spans_of_high(self) -> int:
        """Spans per word of higher bits; 0: there are none."""
        return 16 // (self.bits - 4) if self.bits in (5, 6) else 0


CODES = {
    "u4": Code(4, 0),
    "s4": Code(4, 8),
    "u5": Code(5, 0),
    "s5": Code(5, 16),
    "s6": Code(6, 32),
    "s8": Code(8, 0),  # two's complement
    "e4m3": Code(8, None),
    "e2m1": Code(4, None),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats, 2023, 5.3.3


@functools.cache
def values_of(code: str) -> Tensor:
    """Return the values of the codes 0, 1, ..., float32; e4m3's two NaNs become +-480."""
    bits, zero = CODES[code]
    if code == "e4m3":
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        return values.nan_to_num(480.0).where(torch.arange(256) != 255, -480.0)
    if code == "e2m1":
        return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    if code == "s8":
        return torch.arange(256, dtype=torch.uint8).view(torch.int8).float()
    assert zero is not None
    return torch.arange(1 << bits).float() - zero


def to_words(codes: Tensor, code: str, span: int) -> tuple[Tensor, Tensor | None]:
    """Return words int16 [tiles, rows, span], a tile being the columns of a word, and the words of higher bits.

    Args:
        codes: uint8 [rows, columns], whole tiles of both kinds of words.
        code: kind of the codes.
        span: adjacent columns.
    """
    kind = CODES[code]
    words = _spans_in_words(codes & 15 if kind.bits < 8 else codes, span, kind.per_word)
    high = _spans_in_words(codes >> 4, span, kind.spans_of_high) if kind.spans_of_high else None
    return words, high


def _spans_in_words(codes: Tensor, span: int, count: int) -> Tensor:
    """Return words int16 [columns / span / count, rows, span] of `count` spans each."""
    rows, columns = codes.shape
    words = torch.empty(columns // (span * count), rows, span, dtype=torch.int16, device=codes.device)
    for begin in range(0, rows, _CHUNK_ROWS):
        some = codes[begin : begin + _CHUNK_ROWS]
        parts = some.view(len(some), -1, count, span).int()
        shifts = torch.arange(0, 16, 16 // count, dtype=torch.int32, device=codes.device)
        whole = (parts << shifts[:, None]).sum(2, dtype=torch.int32)
        words[:, begin : begin + len(some)] = whole.transpose(0, 1).to(torch.int16)
    return words


def from_words(words: Tensor, high: Tensor | None, code: str) -> Tensor:
    """Inverse of `to_words`: return codes, uint8 [rows, columns]."""
    kind = CODES[code]
    codes = _spans_from_words(words, kind.per_word)
    if high is not None:
        codes |= _spans_from_words(high, kind.spans_of_high) << 4
    return codes


def _spans_from_words(words: Tensor, count: int) -> Tensor:
    step = 16 // count
    shifts = torch.arange(0, 16, step, dtype=torch.int32, device=words.device)
    parts = words.int()[:, :, None] >> shifts[:, None] & (1 << step) - 1  # [tiles, rows, count, span]
    return parts.permute(1, 0, 2, 3).flatten(1).to(torch.uint8)


class _Format(NamedTuple):
    """A 16-bit float."""

    name: str  # PTX type
    dtype: torch.dtype
    mantissa: int  # bits
    bias: int  # exponent bias

    def of(self, value: float) -> int:
        """Return the bits of a float twice, as in a register."""
        return _in_both_halves(int(torch.tensor(value, dtype=self.dtype).view(torch.int16)) & 0xFFFF)


_FORMATS = {
    each.dtype: each for each in (_Format("bf16", torch.bfloat16, 7, 127), _Format("f16", torch.float16, 10, 15))
}
_AND_OR, _AND_XOR = 0xEA, 0x6A  # lop3: (a & b) | c, (a & b) ^ c


class _Listing:
    """A PTX listing, with one register per name."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: list[str] = []

    def shifted(self, source: str, left: int) -> str:
        """Return a register with `source` shifted left; right for a negative number of bits."""
        if left == 0:
            return source
        target = self._new()
        self._lines.append(f"{'shl' if left > 0 else 'shr'}.b32 {target}, {source}, {abs(left)};")
        return target

    def masked(self, source: str, mask: int, other: str | int, table: int = _AND_OR) -> str:
        """Return a register with `source & mask`, combined with `other`."""
        target = self._new()
        operand = other if isinstance(other, str) else f"0x{other:08x}"
        self._lines.append(f"lop3.b32 {target}, {source}, 0x{mask:08x}, {operand}, 0x{table:02x};")
        return target

    def multiply_add(self, target: str, source: str, factor: int, addend: str | int, form: _Format) -> None:
        """Write `source * factor + addend`."""
        operand = addend if isinstance(addend, str) else self._constant(addend)
        self._lines.append(f"fma.rn.{form.name}x2 {target}, {source}, {self._constant(factor)}, {operand};")

    def _constant(self, bits: int) -> str:
        name = f"c{bits:08x}"
        if name not in self._names:
            self._names.append(name)
            self._lines.insert(0, f"mov.b32 {name}, 0x{bits:08x};")
        return name

    def _new(self) -> str:
        self._names.append(f"r{len(self._names)}")
        return self._names[-1]

    def __str__(self) -> str:
        return "\n".join(["{", f".reg .b32 {', '.join(self._names)};", *self._lines, "}"])


@functools.cache
def assembly(code: str, dtype: torch.dtype, tile: int = 0) -> str:
    """Return PTX that dequantizes a register of two words to one register of two floats per span, in order.

    $0, $1, ... are the results, followed by the words and, if any, the higher bits.

    Args:
        code: the kind of codes.
        dtype: 16-bit dtype of the floats.
        tile: index among the tiles that share a word of higher bits.
    """
    kind, form, listing = CODES[code], _FORMATS[dtype], _Listing()
    words, high = f"${kind.per_word}", f"${kind.per_word + 1}"
    for span in range(kind.per_word):
        if kind.zero is None:
            _float(listing, span, words, kind.bits, form)
        elif kind.bits == 8:
            _byte(listing, span, words, form)
        else:
            _integer(listing, span, words, high, tile, kind, form)
    return str(listing)


def _in_both_halves(bits: int) -> int:
    return bits << 16 | bits


def _integer(listing: _Listing, span: int, words: str, high: str, tile: int, kind: Code, form: _Format) -> None:
    """Put an integer into a mantissa so that its lowest bit counts 1; subtract the excess and the zero."""
    base = 1 << (4 if kind.bits == 4 else kind.bits) if form.name == "bf16" else 1 << form.mantissa
    bit = form.mantissa - (base.bit_length() - 1)  # of the lowest bit
    operand = listing.masked(listing.shifted(words, bit - 4 * span), _in_both_halves(15 << bit), form.of(base))
    if kind.spans_of_high:
        width = kind.bits - 4
        at = (tile * kind.per_word + span) % kind.spans_of_high * width
        moved = listing.shifted(high, bit + 4 - at)
        operand = listing.masked(moved, _in_both_halves((1 << width) - 1 << bit + 4), operand)
    assert kind.zero is not None
    listing.multiply_add(f"${span}", operand, form.of(1.0), form.of(-float(base + kind.zero)), form)


def _byte(listing: _Listing, span: int, words: str, form: _Format) -> None:
    """Append the seven lower bits to 128; subtract 128, or 256 if the exponent includes the sign bit."""
    moved = listing.shifted(words, -8 * span)
    if form.name == "bf16":
        low = listing.masked(moved, _in_both_halves(0x7F), form.of(128.0))
        sign = listing.masked(moved, _in_both_halves(0x80), form.of(128.0))
        listing.multiply_add(f"${span}", sign, form.of(-1.0), low, form)
    else:  # flipping the sign makes it excess 128, and all eight bits fit
        operand = listing.masked(moved, _in_both_halves(0xFF), form.of(1024.0) ^ _in_both_halves(0x80), _AND_XOR)
        listing.multiply_add(f"${span}", operand, form.of(1.0), form.of(-1152.0), form)


def _float(listing: _Listing, span: int, words: str, bits: int, form: _Format) -> None:
    """Put exponent and mantissa in place, and correct the bias by a product, which keeps subnormals right."""
    mantissa, bias = (3, 7) if bits == 8 else (1, 1)
    begin = bits * span  # first bit of the code in the word
    bit = form.mantissa - mantissa
    magnitude = (1 << bits - 1) - 1 << bit
    operand = listing.masked(listing.shifted(words, bit - begin), _in_both_halves(magnitude), 0)
    operand = listing.masked(listing.shifted(words, 16 - bits - begin), _in_both_halves(0x8000), operand)
    listing.multiply_add(f"${span}", operand, form.of(2.0 ** (form.bias - bias)), form.of(-0.0), form)
