"""The tree of parameters: it describes any model without allocating it, and is what init makes and the module reads."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxinfer.models.decoder import bind, forward, init_params, parameter_specs
from jaxinfer.models.parameter import ParameterSpec, parameter
from jaxinfer.parallel.rules import RULES

SMALL = ModelConfig(
    name="small",
    vocab=31,
    hidden=16,
    layers=3,
    dense_layers=1,
    dense_intermediate=24,
    attention=MLAConfig(2, kv_lora=8, nope_dim=4, rope_dim=2, v_dim=6, q_lora=8),
    moe=MoEConfig(experts=4, top_k=2, intermediate=8),
    rope=RopeConfig(),
    max_position=64,
)
FEW = SMALL.replace(
    layers=1, dense_layers=0, attention=GQAConfig(4, 2, 4), moe=MoEConfig(4, 2, intermediate=8, shared_experts=0)
)


def flat(tree) -> dict[str, object]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, ParameterSpec))
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def by_hand(config: ModelConfig) -> int:
    """Parameters of an MLA model, counted from its sizes."""
    d, a, moe = config.hidden, config.attention, config.moe
    query = d * a.q_lora + a.q_lora + a.q_lora * a.heads * (a.nope_dim + a.rope_dim)
    latent = d * (a.kv_lora + a.rope_dim) + a.kv_lora + a.kv_lora * a.heads * (a.nope_dim + a.v_dim)
    attention = query + latent + a.heads * a.v_dim * d
    experts = (moe.experts + moe.shared_experts) * 3 * d * moe.intermediate + moe.experts * (d + 1)
    per_layer = config.layers * (attention + 2 * d)
    dense = config.dense_layers * 3 * d * config.dense_intermediate
    return 2 * config.vocab * d + d + per_layer + dense + config.moe_layers * experts


@pytest.mark.parametrize(
    ("name", "parameters"), [("kimi-k2.6", 1.03e12), ("deepseek-v3", 671e9), ("tiny", 6e6)]
)
def test_specs_of_the_presets(name, parameters):
    """A trillion parameters are described and not one is allocated."""
    config = ModelConfig.preset(name)
    before = {id(array) for array in jax.live_arrays()}
    specs = flat(parameter_specs(config))
    assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) == 0
    count = sum(math.prod(spec.shape) for spec in specs.values())
    assert count == by_hand(config)
    assert count == pytest.approx(parameters, rel=0.3 if name == "tiny" else 0.005)


@pytest.mark.parametrize("name", ["kimi-k2.6", "deepseek-v3", "tiny"])
def test_every_dimension_has_a_logical_axis_and_every_tensor_a_kind(name):
    specs = flat(parameter_specs(ModelConfig.preset(name)))
    known = {*RULES, "layers", "experts", "embed", "lora", "norm", "router"}
    for path, spec in specs.items():
        assert len(spec.axes) == len(spec.shape) and set(spec.axes) <= known, path
        assert spec.kind in ("plain", "linear", "expert", "float32"), path
        assert spec.dtype == (jnp.float32 if spec.kind == "float32" else jnp.bfloat16), path
    of_kind = lambda kind: {path for path, spec in specs.items() if spec.kind == kind and "norm" not in path}  # noqa: E731
    assert of_kind("expert") == {f"sparse/mlp/{part}" for part in ("gate", "up", "down")}
    assert of_kind("float32") == {"sparse/mlp/router/bias"}
    assert of_kind("plain") == {"embedding", "head", "sparse/mlp/router/weight"}


def test_routed_experts_are_most_of_kimi():
    """The part that INT4 covers: 384 experts in 60 layers."""
    specs = flat(parameter_specs(ModelConfig.preset("kimi-k2.6")))
    expert = sum(math.prod(spec.shape) for spec in specs.values() if spec.kind == "expert")
    assert expert == 60 * 384 * 3 * 7168 * 2048
    assert specs["sparse/mlp/gate"].shape == (60, 384, 7168, 2048)
    assert specs["dense/mlp/gate/weight"].shape == (1, 7168, 18_432)
    assert specs["sparse/attention/latent_down/weight"].shape == (60, 7168, 576)
    assert specs["head"].shape == (7168, 163_840)


@jax.jit
def initialise(seed):
    """Fresh parameters of a model with few of them, for each costs compilation."""
    return init_params(FEW, jax.random.key(seed))


@pytest.mark.parametrize("config", [SMALL, FEW], ids=["small", "few"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_init_makes_the_shapes_that_the_specs_say(config, dtype):
    specs = flat(parameter_specs(config, dtype))
    params = flat(jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype)))
    assert {p: (a.shape, a.dtype) for p, a in params.items()} == {p: (s.shape, s.dtype) for p, s in specs.items()}


def test_init_keeps_the_size_of_what_passes_through():
    for path, value in flat(initialise(0)).items():
        values = np.asarray(value, np.float64)
        if "norm" in path:
            assert (values == 1).all()
        elif path.endswith("bias"):
            assert not values.any()
        else:
            deviation = 0.02 if path == "embedding" else value.shape[-2] ** -0.5
            assert np.std(values) == pytest.approx(deviation, rel=5 / math.sqrt(values.size)), path


def test_another_key_is_another_model():
    one, same, other = (initialise(seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert (np.asarray(one["embedding"]) != np.asarray(other["embedding"])).all()
    parts = flat(one)
    assert (parts["sparse/mlp/gate"] != parts["sparse/mlp/up"]).all()


def test_every_parameter_is_read(random_params):
    """The loss depends on each tensor; one that is not used would have a gradient of zero. The correction bias has
    none: it only chooses."""
    config, tokens = SMALL.replace(layers=2), np.arange(24, dtype=np.int32).reshape(2, 12)
    params = random_params(config)
    positions, segments = np.tile(np.arange(12, dtype=np.int32), (2, 1)), np.ones((2, 12), np.int32)

    def loss(params):
        logits, load = forward(config, params, tokens, positions, segments, capacity_factor=4.0)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=-1)
        return -chosen.mean(), load

    (value, load), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.isfinite(value)
    assert load.shape == (1, 4) and load.sum(axis=1).tolist() == [48]
    for path, slope in flat(slopes).items():
        assert np.isfinite(slope).all(), path
        assert np.asarray(slope).any() == (not path.endswith("router/bias")), path


def test_bind_reads_the_params_it_is_given(random_params):
    params = random_params(SMALL)
    module = bind(SMALL, params)
    assert module.head.get_value() is params["head"]
    assert module.sparse.mlp.gate.get_value() is params["sparse"]["mlp"]["gate"]
    broken = {name: value for name, value in params.items() if name != "head"}
    with pytest.raises(KeyError, match="head"):
        bind(SMALL, broken)


@pytest.mark.parametrize("dense_layers", [0, 2])
def test_models_of_one_kind_of_layer_have_one_stack(dense_layers):
    config = SMALL.replace(layers=2, dense_layers=dense_layers, attention=GQAConfig(4, 2, 4))
    specs = flat(parameter_specs(config))
    stack = "dense" if dense_layers else "sparse"
    assert {path.split("/")[0] for path in specs} == {"embedding", "head", "norm", stack}
    assert all(spec.shape[0] == 2 for path, spec in specs.items() if "/" in path and not path.startswith("norm"))


def test_parameter_refuses_axes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"1 axes for a parameter of shape \(2, 3\)"):
        parameter(None, jnp.float32, ("embed",), (2, 3))
