"""Model: a configuration, its parameters as trained, the scales of its FP8 pages, and its tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.checkpoints import gguf, huggingface, huggingface_text, kv_scales, orbax
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.config import ModelConfig, Precision
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import Params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.parallel.sharding import make_mesh
from jaxinfer.quantization.formats import WeightFormat
from jaxinfer.quantization.tensor import QuantizedTensor, check_group, dequantize, quantize
from jaxinfer.text import tool_calls
from jaxinfer.text.chat import ChatTemplate, Message
from jaxinfer.text.tokenizer import StreamDecoder, Tokenizer

EMBEDDED = {"tiny": Path(__file__).parent / "tiny"}
"""Checkpoints that ship with the package, by name."""


@dataclass(frozen=True)
class Model:
    """What `Engine` serves. `expand_weights`: quantised weights are dequantised once at load, which gives the same
    numbers and is faster where no kernel reads the packed form (the CPU); elsewhere they stay packed. `ends`: tokens
    that end a text besides the tokenizer's own."""

    config: ModelConfig
    params: Params
    kv_scales: dict[str, jax.Array]
    tokenizer: Tokenizer
    compute_dtype: jnp.dtype = field(default_factory=lambda: default_dtype())
    expand_weights: bool = field(default_factory=lambda: jax.default_backend() == "cpu")
    template: ChatTemplate = field(default_factory=ChatTemplate)
    ends: frozenset[int] = frozenset()

    @classmethod
    def load(
        cls, name: str | Path, devices: int = 1, watch: Watch | None = None, scales: Path | None = None
    ) -> "Model":
        """The model called `name`, as `_load` finds it. Its FP8 pages have the scales in the file `scales`; without
        one, those that were calibrated and stand beside the model (see `kv_scales`), those published with it, or 1."""
        if scales is not None and not scales.is_file():  # before the weights, which may take long
            raise UserError(f"no file {scales}; make it with: python -m jaxinfer.run calibrate --model {name}")
        model = cls._load(name, devices, watch)
        file = scales or kv_scales.place(cls.where(name))
        return replace(model, kv_scales=kv_scales.read(file, model.config)) if file.is_file() else model

    @staticmethod
    def where(name: str | Path) -> Path:
        """The folder or GGUF file of the model called `name`, which need not exist."""
        return gguf.installed(str(name)) if str(name) in gguf.INSTALLED else EMBEDDED.get(str(name), Path(name))

    @classmethod
    def _load(cls, name: str | Path, devices: int, watch: Watch | None) -> "Model":
        """The embedded model called `name`, or a checkpoint: a folder as Orbax or Hugging Face lay it out, or a GGUF
        file. Hugging Face's go straight to their places on so many `devices`. UserError where there is none."""
        folder = cls.where(name)
        if folder.suffix == ".gguf":
            return cls._from_gguf(folder, watch)
        if not folder.is_dir():
            raise UserError(
                f"no model {str(name)!r}: neither a folder nor one that ships ({', '.join(EMBEDDED)})"
            )
        if not (folder / "arrays").exists() and huggingface.is_folder(folder):
            return cls._from_huggingface(folder, devices, watch)
        config = orbax.read_config(folder)
        tokenizer, template, ends = huggingface_text.read_own(folder)
        check_vocabulary(folder, tokenizer, config)
        return cls(config, *orbax.restore(folder, config), tokenizer, template=template, ends=ends)

    @staticmethod
    def read_config(name: str | Path) -> ModelConfig:
        """The configuration alone of the embedded model called `name` or a checkpoint folder. UserError where there is
        none."""
        folder = EMBEDDED.get(str(name), Path(name))
        if not folder.is_dir():
            raise UserError(f"no model folder {str(name)!r}, nor one that ships ({', '.join(EMBEDDED)})")
        if not (folder / "arrays").exists() and huggingface.is_folder(folder):
            return huggingface.read_config(folder)[0]
        return orbax.read_config(folder)

    @classmethod
    def _from_huggingface(cls, folder: Path, devices: int, watch: Watch | None) -> "Model":
        config, _ = huggingface.read_config(folder)
        config.check_devices(devices)
        tokenizer, template, ends = huggingface_text.read(folder)
        check_vocabulary(folder, tokenizer, config)
        scales = huggingface.load_kv_scales(folder, watch)
        config, params = huggingface.load(folder, make_mesh(devices) if devices > 1 else None, watch)
        return cls(config, params, scales or unit_scales(config), tokenizer, template=template, ends=ends)

    @classmethod
    def _from_gguf(cls, file: Path, watch: Watch | None) -> "Model":
        config, params, tokenizer, template, ends = gguf.load(file, watch)
        check_vocabulary(file, tokenizer, config)
        return cls(config, params, unit_scales(config), tokenizer, template=template, ends=ends)

    def prepared(self, precision: Precision, packed: bool = False) -> Params:
        """The parameters in the weight format of `precision`, ready for the steps. `packed`: as kernels read them."""
        params = quantize_params(self.config, self.params, precision.weights)
        return expand(params, self.compute_dtype) if self.expand_weights and not packed else params

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.ends | {self.tokenizer.end_id}

    def encode(self, text: str) -> list[int]:
        """A raw prompt as tokens: special tokens in it count as such, and it begins with the one for beginning, if the
        model has one."""
        tokens, begin = self.tokenizer.encode(text, special=True), self.tokenizer.bos_id
        return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]

    def chat(self, user: str) -> list[int]:
        """One turn of a user, waiting for the assistant's answer. Nothing in `user` counts as a special token."""
        if not user.strip():
            raise UserError("the prompt is empty; give some text")
        return self.conversation([{"role": "user", "content": user}])

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """Messages, and tools in OpenAI's form, as the model's chat template writes them, waiting for the assistant.
        UserError where the template does not take them. `variables` are the template's own."""
        history = tool_calls.for_template(messages, self.tool_format)
        return self.template.encode(self.tokenizer, history, tools, **variables)

    @property
    def tool_format(self) -> str:
        """The format in which the model writes tool calls, for `tool_calls.parse`."""
        return tool_calls.format_of(self.template.source)

    def stream_decoder(self) -> StreamDecoder:
        """Special tokens are left out, but for those around tool calls."""
        markers = tool_calls.KIMI_MARKERS if self.tool_format == "kimi" else ()
        return StreamDecoder(self.tokenizer, keep=frozenset(filter(None, map(self.tokenizer.id_of, markers))))


def unit_scales(config: ModelConfig) -> dict[str, jax.Array]:
    """Scales of FP8 pages of a model that was not calibrated: 1, so that entries beyond 448 saturate."""
    return {kind: jnp.ones(layers) for kind, layers in config.cache_layers.items()}


def check_vocabulary(where: Path, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """UserError where the tokenizer has tokens that the embedding lacks."""
    if tokenizer.vocab_size > config.vocab:
        raise UserError(f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {config.vocab}")


def default_dtype():
    """float32 on the CPU, where bf16 arithmetic is emulated and slower; bf16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def quantize_params(config: ModelConfig, params: Params, format: WeightFormat) -> Params:
    """Every tensor that `format` covers quantised, the rest in the format's plain type. Checks before it works. What a
    checkpoint keeps in that format already stays; what it keeps in another is converted, a layer at a time."""
    specs = parameter_specs(config)
    is_spec = lambda x: isinstance(x, ParameterSpec)  # noqa: E731
    covered = lambda spec: spec.kind == "expert" or (spec.kind == "linear" and format.dense)  # noqa: E731
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        if format.quantized and covered(spec):
            check_group(spec.shape[-2], format, "/".join(str(k.key) for k in path))
    make = jax.jit(quantize, static_argnums=1)
    again = jax.jit(lambda w, f: jax.lax.map(lambda layer: quantize(dequantize(layer), f), w), static_argnums=1)

    def convert(spec: ParameterSpec, value):
        if spec.kind == "float32":
            return value
        target = format if covered(spec) or not format.quantized else WeightFormat.parse("bf16")
        if isinstance(value, QuantizedTensor):
            kept = (value.format.kind, value.format.group) == (target.kind, target.group)
            return value if kept else again(value, target)
        return make(value, target) if target.quantized else value.astype(target.dtype)

    return jax.tree.map(convert, specs, params, is_leaf=is_spec)


def expand(params: Params, dtype) -> Params:
    """Every weight as a plain array in `dtype`; the values are those of the format it was in. Float32 leaves stay."""
    is_weight = lambda x: isinstance(x, QuantizedTensor)  # noqa: E731
    keep = lambda w: not is_weight(w) and w.dtype == jnp.float32  # noqa: E731
    return jax.tree.map(lambda w: w if keep(w) else dequantize(w, dtype), params, is_leaf=is_weight)


def weight_bytes(params: Params) -> int:
    """Bytes of parameters as they are kept, scales included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
