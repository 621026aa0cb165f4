"""Tensors by name in safetensors files: what there is, from the headers alone, and any tensor read by itself.

A file is 8 bytes of header length, a JSON header `{name: {"dtype", "shape", "data_offsets"}}` and the data, little
endian (https://huggingface.co/docs/safetensors). A folder has one `model.safetensors`, or shards and an index.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxinfer.errors import UserError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 << 20  # the limit of the format's own library


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its shape and type, and the bytes it takes there."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Tensors(Protocol):
    """A checkpoint's tensors, whatever the files are."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def read(self, name: str) -> np.ndarray: ...


class SafeTensors:
    """The tensors of a folder. UserError, before anything is read, for a file that is damaged, missing, or
    contradicted by the index."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        index = folder / INDEX
        placed = _weight_map(index) if index.is_file() else None
        files = sorted(set(placed.values())) if placed is not None else [p.name for p in folder.glob("*.safetensors")]
        if not files:
            raise UserError(f"{folder} has no safetensors files")
        for file in sorted(files):
            for name, entry in read_header(folder / file):
                if name in self.entries:
                    raise UserError(f"tensor {name} is in both {self.entries[name].file} and {entry.file}")
                self.entries[name] = entry
        for name, file in (placed or {}).items():
            if name not in self.entries or self.entries[name].file.name != file:
                raise UserError(f"{folder / file}: tensor {name} is missing, and {INDEX} says that it is there")

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` in memory of its own."""
        entry = self.entries[name]
        raw = np.fromfile(entry.file, np.uint8, entry.nbytes, offset=entry.offset)
        if raw.nbytes != entry.nbytes:
            raise UserError(f"{entry.file}: tensor {name} is cut short")
        return raw.view(entry.dtype).reshape(entry.shape)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor to file, as the index has it."""
    values = read_json(index)
    placed = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(placed, dict) or not placed:
        raise UserError(f"{index} has no weight_map")
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: tensor {name} is said to be in {file!r}, which is no file of this folder")
    return placed


def read_json(path: Path) -> Any:
    """What the JSON file holds. UserError where it can't be read, isn't JSON, or says a thing twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise UserError(f"{path} names {name} twice")
            found[name] = value
        return found

    try:
        return json.loads(path.read_text(), object_pairs_hook=unique)
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def read_header(path: Path) -> Iterator[tuple[str, Entry]]:
    """Name and entry of every tensor in the file. UserError where the header is damaged or the data end too soon."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise UserError(f"{path} is cut short or is no safetensors file: its header does not fit")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise UserError(f"{path} is no safetensors file: its header is no object")
    for name, said in header.items():
        if name != "__metadata__":
            yield name, _entry(path, name, said, 8 + length, size)


def _entry(path: Path, name: str, said: Any, start: int, size: int) -> Entry:
    try:
        kind, shape, (begin, end) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
        sensible = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sensible = False
    if not sensible:
        raise UserError(f"{path}: the header says nothing sensible of tensor {name}")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise UserError(f"{path}: tensor {name} has type {kind}; there are: {', '.join(DTYPES)}")
    entry = Entry(path, DTYPES[kind], shape, start + begin)
    if end - begin != entry.nbytes:
        raise UserError(f"{path}: tensor {name} of shape {list(shape)} and type {kind} has {end - begin} bytes")
    if start + end > size:
        raise UserError(f"{path} is cut short: tensor {name} ends at byte {start + end}, the file at {size}")
    return entry


def write_header(entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file that holds tensors of these types and shapes, in this order."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
