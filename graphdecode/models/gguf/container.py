"""GGUF files: header, metadata, and the reading of tensors.

The layout is that of ggml's `docs/gguf.md`, versions 2 and 3. `gguf.GGUFReader` is not used: it takes 2.6 s for a
vocabulary of 49,152 tokens, and trusts counts and lengths of damaged files.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphdecode.hub.model_path import refuse_pointer
from graphdecode.linear.quantization.gguf import BLOCK_TYPES, BlockType, dequantize
from graphdecode.linear.weight_form import Shard
from graphdecode.models.config import UnsupportedModelError
from graphdecode.models.weight_map import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # GGML_MAX_DIMS
_DEFAULT_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """A tensor in a file."""

    path: Path  # of the file
    shape: tuple[int, ...]  # as torch has it, the longest stride first
    block: BlockType  # its type
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.block.size(math.prod(self.shape))

    def read(self, first: int, count: int) -> np.ndarray:
        """Return the bytes, uint8, of `count` values from `first` on, in whole blocks."""
        block, values = self.block.nbytes, self.block.values
        size = count // values * block
        read = np.fromfile(self.path, np.uint8, size, offset=self.offset + first // values * block)
        if len(read) < size:
            raise CheckpointError(f"{self.path} has become shorter while it was read")
        return read


class GgufFile(NamedTuple):
    """The header of one file."""

    path: Path
    fields: Mapping[str, Any]  # the metadata; arrays of numbers are NumPy arrays, those of strings are lists
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufFile:
    """Return a file's header, from a cache if the file has not changed.

    Raises:
        CheckpointError: it is not a GGUF file, or damaged; the message names the file and the field.
        ModelSourceError: it is a pointer of Git LFS.
    """
    try:
        status = path.stat()
        return _read_cached(path, status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


@functools.lru_cache(maxsize=8)  # shards of one model
def _read_cached(path: Path, *_version: int) -> GgufFile:
    refuse_pointer(path)
    with path.open("rb") as opened:
        size = opened.seek(0, 2)
        if size < len(MAGIC):
            raise CheckpointError(f"{path} is not a GGUF file: it has {size} bytes")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()


class _Header:
    """A position in the bytes of a file; each read advances it, and none reads past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> GgufFile:
        """Read the whole header."""
        self._check_magic()
        num_tensors, num_fields = self._count("tensor_count", 32), self._count("metadata_kv_count", 13)
        fields = self._metadata(num_fields)
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment must be a power of two >= 8, got {alignment!r}")
        return GgufFile(self._path, fields, self._tensors(num_tensors, alignment))

    def _check_magic(self) -> None:
        magic = self._data[: len(MAGIC)]
        if magic != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {magic!r} and not with {MAGIC!r}")
        self._at = len(MAGIC)
        version = self._number("I", "version")
        if version & 0xFFFF == 0:
            raise self._fault(f"version {version:#x} is of a big-endian file, which is not read")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise self._fault(f"version {version} is not supported; supported are {known}")

    def _count(self, field: str, least: int) -> int:
        """Read a number of entries, each of at least `least` bytes."""
        number = self._number("Q", field)
        if number * least > self._size - self._at:
            raise self._fault(
                f"{field} is {number}, for which {number * least} bytes must follow, and there are "
                f"{self._size - self._at}"
            )
        return number

    def _metadata(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for index in range(count):
            key = self._strings(1, f"the key of field {index}")[0]
            if key in fields:
                raise self._fault(f"the field {key} is there twice")
            fields[key] = self._value(self._number("I", f"the type of {key}"), key)
        return fields

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Read the descriptions of all tensors, and check that the file has their bytes."""
        described: dict[str, GgufTensor] = {}
        for index in range(count):
            name = self._strings(1, f"the name of tensor {index}")[0]
            if name in described:
                raise self._fault(f"the tensor {name} is there twice")
            described[name] = self._tensor(name)
        start = -(-self._at // alignment) * alignment
        end_before, name_before = start, ""
        for name, tensor in sorted(described.items(), key=lambda each: each[1].offset):
            offset = start + tensor.offset
            if tensor.offset % alignment:
                raise self._fault(f"the offset of {name} is {tensor.offset}, no multiple of {alignment}")
            if offset < end_before:
                raise self._fault(f"the bytes of {name} overlap those of {name_before}")
            end_before, name_before = offset + tensor.nbytes, name
            if end_before > self._size:
                raise CheckpointError(
                    f"{self._path} is truncated: {name} ends at byte {end_before}, and the file has {self._size}"
                )
        return {name: tensor._replace(offset=start + tensor.offset) for name, tensor in described.items()}

    def _tensor(self, name: str) -> GgufTensor:
        dims = self._number("I", f"the number of dimensions of {name}")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._fault(f"{name} has {dims} dimensions; there may be 1 to {_MAX_DIMS}")
        shape = tuple(self._number("Q", f"the shape of {name}") for _ in range(dims))[::-1]
        if min(shape) < 1:
            raise self._fault(f"{name} has the shape {list(shape)}")
        number = self._number("I", f"the type of {name}")
        block = BLOCK_TYPES.get(number)
        if block is None:
            known = ", ".join(known.name for known in BLOCK_TYPES.values())
            raise self._fault(f"{name} has the type number {number}; those that are read are {known}")
        if shape[-1] % block.values:
            raise self._fault(
                f"{name} has rows of {shape[-1]} values, which blocks of {block.values} ({block.name}) cannot fill"
            )
        return GgufTensor(self._path, shape, block, self._number("Q", f"the offset of {name}"))

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], key)
        if kind == _STRING:
            return self._strings(1, key)[0]
        if kind != _ARRAY:
            raise self._fault(f"{key} has the value type {kind}, which there is not")
        kind = self._number("I", f"the type of {key}")
        if kind == _STRING:
            return self._strings(self._count(key, 8), key)
        if kind not in _SCALARS:
            raise self._fault(f"{key} is an array of the value type {kind}, which is not supported")
        dtype = np.dtype(f"<{_SCALARS[kind]}" if _SCALARS[kind] != "?" else "?")
        count = self._count(key, dtype.itemsize)
        begin, self._at = self._at, self._at + count * dtype.itemsize
        return np.frombuffer(self._data[begin : self._at], dtype)

    def _number(self, number_format: str, field: str) -> Any:
        try:
            (value,) = struct.unpack_from(f"<{number_format}", self._data, self._at)
        except struct.error:
            raise self._truncated(field) from None
        self._at += struct.calcsize(f"<{number_format}")
        return value

    def _strings(self, count: int, field: str) -> list[str]:
        data, at, size, unpack = self._data, self._at, self._size, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                if end > size:
                    raise self._truncated(field)
                strings.append(data[at + 8 : end].decode())
                at = end
        except struct.error:
            raise self._truncated(field) from None
        except UnicodeDecodeError as error:
            raise self._fault(f"{field} is no UTF-8: {error}") from error
        self._at = at
        return strings

    def _fault(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}")

    def _truncated(self, field: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated: it ends within {field}, at byte {self._size}")


class Metadata:
    """The fields of a file and its architecture; each method raises `UnsupportedModelError` for a wrong value."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._all = fields
        self.architecture = self.whole("general.architecture", str)

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a number of the architecture, such as "embedding_length"; for an array, its value if all are equal."""
        layers = self.layers(name)
        if layers and all(value == layers[0] for value in layers):
            return layers[0]
        return self.whole(f"{self.architecture}.{name}", (int, float), default)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a number that is an integer >= 1."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(f"{self.architecture}.{name} must be an integer >= 1, got {value!r:.80}")
        return value

    @property
    def num_layers(self) -> int:
        """Layers of the decoder: those of the file without the last ones, which predict further tokens."""
        layers, further = self.count("block_count"), self.most("nextn_predict_layers", 0)
        if further >= layers:
            raise UnsupportedModelError(
                f"{self.architecture}.nextn_predict_layers is {further}; it must be below block_count, {layers}"
            )
        return layers - further

    def has(self, name: str) -> bool:
        """Whether the architecture has the field."""
        return f"{self.architecture}.{name}" in self._all

    def layers(self, name: str) -> list[Any]:
        """Return an array of values for each layer; [] if it is one value for all, or missing."""
        value = self._all.get(f"{self.architecture}.{name}")
        if not isinstance(value, np.ndarray):
            return []
        return value[: self.num_layers].tolist() if len(value) == self.count("block_count") else value.tolist()

    def most(self, name: str, default: int | None = None) -> int:
        """Return the greatest count of a layer, of which some may have none; a number >= 0."""
        layers = self.layers(name)
        value = max(layers) if layers else self.number(name, default)
        if not isinstance(value, int) or value < 0:
            raise UnsupportedModelError(f"{self.architecture}.{name} must be an integer >= 0, got {value!r:.80}")
        return value

    def whole(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a field by its full name."""
        value = self._all.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None:
            raise UnsupportedModelError(f"the field {key} is missing")
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise UnsupportedModelError(f"{key} must be {kinds}, got {value!r:.80}")
        return value


_CHUNK_VALUES = 1 << 19  # to dequantize, which needs a few MB of temporary memory


@dataclass(frozen=True)
class TensorView:
    """Rows of a stored tensor, as transformers has them."""

    stored: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0  # in the stored tensor
    head_dim: int = 0  # > 0: rotary pairs (i, i + head_dim / 2) of each head are stored as neighbours
    shift: float = 0.0  # is added to each value
    is_log: bool = False  # a value x is stored as -exp(x)
    rows: np.ndarray | None = None  # the stored row of each row; None: in order
    columns: np.ndarray | None = None  # the stored column of each column; None: in order

    @property
    def block_type(self) -> str:
        """The name of the stored type."""
        return self.stored.block.name

    @property
    def keeps_blocks(self) -> bool:
        """Whether `blocks` has the rows as they are stored."""
        return len(self.shape) == 2 and not self.shift and self.columns is None

    def read(self, out: Tensor, shard: Shard | None) -> None:
        """Write the values, or a part of them, into `out`, a few rows at a time."""
        # a vector is read as rows of one value, unless it is stored in blocks
        leading = self.shape if len(self.shape) == 1 and self.stored.block.values == 1 else self.shape[:-1]
        row_length = math.prod(self.shape[len(leading) :])
        slices = () if shard is None else shard.slices(self.shape)
        rows = np.arange(math.prod(leading)).reshape(leading)[slices[: len(leading)]].ravel()
        columns = slices[len(leading)] if len(slices) > len(leading) else slice(None)
        target, step = out.view(len(rows), -1), max(1, _CHUNK_VALUES // row_length)
        for begin in range(0, len(rows), step):
            values = self._read_rows(self._stored_rows(rows[begin : begin + step]), row_length)
            values = (values if self.columns is None else values[:, self.columns])[:, columns]
            values = values.add(self.shift) if self.shift else values
            target[begin : begin + step].copy_(values.neg().log() if self.is_log else values)

    @property
    def blocks(self) -> Tensor:
        """The stored rows of a matrix, uint8 [rows, bytes of a row]."""
        rows, row_length = self.shape
        order = self._stored_rows(np.arange(rows))
        stored = self.stored.read(self.first_row * row_length, rows * row_length).reshape(rows, -1)
        is_in_order = not self.head_dim and self.rows is None
        return torch.from_numpy(stored if is_in_order else stored[order - self.first_row])

    def _stored_rows(self, rows: np.ndarray) -> np.ndarray:
        if self.head_dim:
            head, row = np.divmod(rows, self.head_dim)
            half, pair = np.divmod(row, self.head_dim // 2)
            rows = head * self.head_dim + 2 * pair + half
        if self.rows is not None:
            rows = self.rows[rows]
        return self.first_row + rows

    def _read_rows(self, rows: np.ndarray, row_length: int) -> Tensor:
        """Return stored rows by their numbers, which are close to one another."""
        low, count = int(rows.min()), int(rows.max() - rows.min()) + 1
        out = dequantize(self.stored.read(low * row_length, count * row_length).reshape(count, -1), self.stored.block)
        return out if count == len(rows) and (np.diff(rows) == 1).all() else out[rows - low]


@dataclass(frozen=True)
class JoinedView:
    """A matrix of transformers whose rows are in several stored tensors."""

    parts: tuple[TensorView, ...]
    join: Callable[..., Tensor]  # returns the matrix, given the parts: of values, or of bytes if `keeps_rows`
    keeps_rows: bool  # each row of the matrix is one of a part

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return tuple(self.join(*(torch.empty(part.shape, device="meta") for part in self.parts)).shape)

    @property
    def block_type(self) -> str:
        """The name of the stored type; of several types, that of the first part."""
        return self.parts[0].block_type

    @property
    def keeps_blocks(self) -> bool:
        """Whether `blocks` has the rows as they are stored."""
        return self.keeps_rows and len({part.block_type for part in self.parts}) == 1

    @property
    def blocks(self) -> Tensor:
        """The stored rows, uint8 [rows, bytes of a row]."""
        return self.join(*(part.blocks for part in self.parts))

    def read(self, out: Tensor, shard: Shard | None) -> None:
        """Write the values, or a part of them, into `out`."""
        values = [torch.empty(part.shape) for part in self.parts]
        for part, target in zip(self.parts, values, strict=True):
            part.read(target, None)
        whole = self.join(*values)
        out.copy_(whole if shard is None else whole[shard.slices(self.shape)])
