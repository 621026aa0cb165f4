"""Model: a configuration, its parameters as trained, the scales of its FP8 pages, and its tokenizer."""

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxinfer.checkpoints import orbax
from jaxinfer.config import ModelConfig, Precision
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import Params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.quantization.formats import WeightFormat
from jaxinfer.quantization.tensor import QuantizedTensor, check_group, dequantize, quantize
from jaxinfer.text.tokenizer import ASSISTANT, END, USER, StreamDecoder, Tokenizer

EMBEDDED = {"tiny": Path(__file__).parent / "tiny"}
"""Checkpoints that ship with the package, by name."""


@dataclass(frozen=True)
class Model:
    """What `Engine` serves. `expand_weights`: quantised weights are dequantised once at load, which gives the same
    numbers and is faster where no kernel reads the packed form (the CPU); elsewhere they stay packed."""

    config: ModelConfig
    params: Params
    kv_scales: dict[str, jax.Array]
    tokenizer: Tokenizer
    compute_dtype: jnp.dtype = field(default_factory=lambda: default_dtype())
    expand_weights: bool = field(default_factory=lambda: jax.default_backend() == "cpu")

    @classmethod
    def load(cls, name: str | Path) -> "Model":
        """The embedded model called `name`, or the checkpoint in that folder. UserError where there is neither."""
        folder = EMBEDDED.get(str(name), Path(name))
        if not folder.is_dir():
            raise UserError(
                f"no model {str(name)!r}: neither a folder nor one that ships ({', '.join(EMBEDDED)})"
            )
        config = orbax.read_config(folder)
        try:
            tokenizer = Tokenizer.load(folder / "tokenizer.json")
        except ValueError as error:
            raise UserError(str(error)) from None
        if tokenizer.vocab_size > config.vocab:
            raise UserError(
                f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {config.vocab}"
            )
        return cls(config, *orbax.restore(folder, config), tokenizer)

    def prepared(self, precision: Precision) -> Params:
        """The parameters in the weight format of `precision`, ready for the steps."""
        params = quantize_params(self.config, self.params, precision.weights)
        return expand(params, self.compute_dtype) if self.expand_weights else params

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset({self.tokenizer.end_id})

    def encode(self, text: str) -> list[int]:
        """A raw prompt as tokens: special tokens in it count as such, and it begins with the one for beginning."""
        tokens = self.tokenizer.encode(text, special=True)
        return tokens if tokens[:1] == [self.tokenizer.bos_id] else [self.tokenizer.bos_id, *tokens]

    def chat(self, user: str) -> list[int]:
        """One turn of a user, waiting for the assistant's answer. Nothing in `user` counts as a special token."""
        mark = lambda text: self.tokenizer.encode(text, special=True)  # noqa: E731
        if not user.strip():
            raise UserError("the prompt is empty; give some text")
        return [self.tokenizer.bos_id, *mark(USER), *self.tokenizer.encode(user), *mark(END + ASSISTANT)]

    def stream_decoder(self) -> StreamDecoder:
        return StreamDecoder(self.tokenizer)


def default_dtype():
    """float32 on the CPU, where bf16 arithmetic is emulated and slower; bf16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def quantize_params(config: ModelConfig, params: Params, format: WeightFormat) -> Params:
    """Every tensor that `format` covers quantised, the rest in the format's plain type. Checks before it works."""
    specs = parameter_specs(config)
    is_spec = lambda x: isinstance(x, ParameterSpec)  # noqa: E731
    covered = lambda spec: spec.kind == "expert" or (spec.kind == "linear" and format.dense)  # noqa: E731
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        if format.quantized and covered(spec):
            check_group(spec.shape[-2], format, "/".join(str(k.key) for k in path))
    make = jax.jit(quantize, static_argnums=1)

    def convert(spec: ParameterSpec, value):
        if isinstance(value, QuantizedTensor) or spec.kind == "float32":
            return value
        return make(value, format) if format.quantized and covered(spec) else value.astype(format.dtype)

    return jax.tree.map(convert, specs, params, is_leaf=is_spec)


def expand(params: Params, dtype) -> Params:
    """Every weight as a plain array in `dtype`; the values are those of the format it was in. Float32 leaves stay."""
    is_weight = lambda x: isinstance(x, QuantizedTensor)  # noqa: E731
    keep = lambda w: not is_weight(w) and w.dtype == jnp.float32  # noqa: E731
    return jax.tree.map(lambda w: w if keep(w) else dequantize(w, dtype), params, is_leaf=is_weight)


def weight_bytes(params: Params) -> int:
    """Bytes of parameters as they are kept, scales included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
