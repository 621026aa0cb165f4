"""A model is loaded whole or not at all, and its weights are put into a format as the format says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints import orbax
from jaxinfer.checkpoints.model import Model, expand, quantize_params, weight_bytes
from jaxinfer.config import MLAConfig, ModelConfig, MoEConfig, Precision, RopeConfig
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import parameter_specs
from jaxinfer.models.parameter import ParameterSpec
from jaxinfer.quantization.formats import WeightFormat
from jaxinfer.quantization.tensor import QuantizedTensor, dequantize
from jaxinfer.text.tokenizer import Tokenizer

# Groups of 32 divide all inputs but those of the up-projections from the latent (48); no matrix takes groups of 128.
CONFIG = ModelConfig(
    name="small",
    vocab=320,
    hidden=64,
    layers=2,
    dense_layers=1,
    dense_intermediate=64,
    attention=MLAConfig(2, kv_lora=48, nope_dim=16, rope_dim=8, v_dim=16),
    moe=MoEConfig(experts=4, top_k=2, intermediate=64),
    rope=RopeConfig(),
    max_position=64,
)


def flat(tree) -> dict[str, object]:
    whole = lambda x: isinstance(x, (ParameterSpec, QuantizedTensor))  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=whole)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["seven owls and nine more owls"] * 3, 280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer, random_params):
    folder = tmp_path_factory.mktemp("model")
    orbax.save(folder, CONFIG, random_params(CONFIG), {"latent": jnp.array([0.5, 0.25])})
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return Model.load(folder)


# ---- loading


def test_load(model, tokenizer):
    assert model.config == CONFIG and model.kv_scales["latent"].tolist() == [0.5, 0.25]
    assert model.tokenizer.vocab_size == tokenizer.vocab_size <= CONFIG.vocab
    assert model.end_tokens == {tokenizer.end_id}
    assert model.encode("owls")[0] == tokenizer.bos_id and tokenizer.decode(model.encode("owls")) == "owls"
    assert model.encode("<|bos|>owls") == model.encode("owls")


def test_a_chat_turn_is_text_whatever_is_in_it(model):
    tokens = model.chat("owls<|end|>")
    assert sum(token in model.end_tokens for token in tokens) == 1
    assert "owls<|end|>" in model.tokenizer.decode(tokens)
    for empty in ("", " \n"):
        with pytest.raises(UserError, match="the prompt is empty"):
            model.chat(empty)


def test_no_such_model(tmp_path):
    for name in ("kimi", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=rf"no model '{name}': neither a folder nor one that ships \(tiny\)"):
            Model.load(name)


def test_a_tokenizer_that_is_missing_unreadable_or_too_large_is_named(tmp_path, folder, random_params):
    config = CONFIG.replace(vocab=270)
    orbax.save(tmp_path, config, random_params(config), {"latent": jnp.ones(2)})
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"\Ano tokenizer at .*tokenizer.json\Z"):
        Model.load(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"\Acannot read the tokenizer at .*tokenizer.json: [^\n]*\Z"):
        Model.load(tmp_path)
    path.write_text((folder / "tokenizer.json").read_text())
    with pytest.raises(UserError, match=r"the tokenizer has 2\d\d tokens, the embedding only 270\Z"):
        Model.load(tmp_path)


# ---- formats


@pytest.mark.parametrize(
    ("name", "covered"),
    [
        ("f32", set()),
        ("bf16", set()),
        ("int4:g32", {"expert"}),
        ("int4:g64", {"expert"}),
        ("fp8_e4m3", {"expert", "linear"}),
    ],
)
def test_a_format_covers_what_it_says(model, name, covered):
    """INT4 the routed experts; FP8 every linear layer; embedding, head, norms and router stay, and the router's bias is
    never narrowed."""
    format = WeightFormat.parse(name)
    found, specs = flat(quantize_params(CONFIG, model.params, format)), flat(parameter_specs(CONFIG))
    for path, spec in specs.items():
        weight = found[path]
        assert isinstance(weight, QuantizedTensor) == (spec.kind in covered), path
        assert weight.shape == spec.shape, path
        if isinstance(weight, QuantizedTensor):
            assert weight.format == format
            original = np.asarray(flat(model.params)[path], np.float32)
            largest = abs(original).max(axis=(-2, -1), keepdims=True)
            assert (abs(np.asarray(dequantize(weight)) - original) <= 0.08 * largest).all(), path
        elif spec.kind == "float32":
            assert weight.dtype == jnp.float32
        else:
            assert weight.dtype == format.dtype


def test_dense_int4_covers_the_other_linear_layers_too(random_params):
    config = CONFIG.replace(attention=MLAConfig(2, kv_lora=32, nope_dim=16, rope_dim=8, v_dim=16))
    found = flat(quantize_params(config, random_params(config), WeightFormat.parse("int4:g32+dense")))
    specs = flat(parameter_specs(config))
    quantized = {path for path, weight in found.items() if isinstance(weight, QuantizedTensor)}
    assert quantized == {path for path, spec in specs.items() if spec.kind in ("linear", "expert")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4:g128", r"group size 128 does not divide the 64 inputs of sparse/mlp/down"),
        ("int4:g32+dense", r"32 does not divide the 48 inputs of (dense|sparse)/attention/(key|value)_up/weight"),
    ],
)
def test_a_group_that_does_not_divide_is_refused_by_name(model, name, message):
    with pytest.raises(UserError, match=message):
        model.prepared(Precision.parse(name))


def test_expanded_weights_are_the_same_numbers(model):
    for name in ("int4:g32", "fp8_e4m3"):
        packed = quantize_params(CONFIG, model.params, WeightFormat.parse(name))
        plain = expand(packed, jnp.float32)
        assert not any(isinstance(leaf, QuantizedTensor) for leaf in flat(plain).values())
        for path, weight in flat(packed).items():
            np.testing.assert_array_equal(np.asarray(dequantize(weight)), np.asarray(flat(plain)[path], np.float32))


def test_prepared_is_packed_or_expanded(model):
    precision = Precision.parse("int4:g32")
    packed = dataclasses.replace(model, expand_weights=False).prepared(precision)
    plain = dataclasses.replace(model, expand_weights=True, compute_dtype=jnp.float32).prepared(precision)
    assert isinstance(packed["sparse"]["mlp"]["up"], QuantizedTensor)
    assert plain["sparse"]["mlp"]["up"].dtype == jnp.float32


def test_weight_bytes(model):
    """Two bytes a value in bf16, four for the router's bias; experts at 4.5 bits in groups of 32."""
    specs = flat(parameter_specs(CONFIG))
    size = lambda kind: sum(int(np.prod(s.shape)) for s in specs.values() if s.kind == kind)  # noqa: E731
    rest = 2 * (size("plain") + size("linear")) + 4 * size("float32")
    for name, bytes_a_value in [("bf16", 2), ("int4:g32", 4.5 / 8)]:
        params = quantize_params(CONFIG, model.params, WeightFormat.parse(name))
        assert weight_bytes(params) == rest + size("expert") * bytes_a_value
