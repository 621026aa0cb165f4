"""Published layouts load to the values that they hold; what is wrong with a folder is said in one line."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints import huggingface, loading
from jaxinfer.checkpoints.matrix import pack_int32, takes_blocks, unpack_int32
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.errors import UserError
from jaxinfer.models.decoder import parameter_specs
from jaxinfer.parallel.sharding import make_mesh
from jaxinfer.quantization.tensor import QuantizedTensor, dequantize
from tests.checkpoints import published
from tests.checkpoints.published import DEEPSEEK, MIXTRAL, QWEN2, write


class Notes(Watch):
    def __init__(self):
        self.notes, self.steps, self.done = [], 0, 0

    def total(self, steps):
        self.steps = steps

    def advance(self):
        self.done += 1

    def note(self, text):
        self.notes.append(text)


def wide(weight) -> np.ndarray:
    return np.asarray(dequantize(weight), np.float32)


def turned(tensors, name: str) -> np.ndarray:
    return tensors[name].astype(np.float32).T


# ---- families


@pytest.mark.parametrize("shards", [1, 3])
def test_deepseek(tmp_path, shards):
    tensors, watch = published.deepseek(), Notes()
    config, params = huggingface.load(write(tmp_path, DEEPSEEK, tensors, shards), watch=watch)
    shapes = jax.tree.map(lambda a: a.shape, params)
    assert shapes == jax.tree.map(lambda s: s.shape, parameter_specs(config), is_leaf=loading.is_spec)
    attention, mlp, prefix = params["sparse"]["attention"], params["sparse"]["mlp"], "model.layers.2"
    assert attention["query_up"]["weight"].dtype == jnp.bfloat16 and mlp["router"]["bias"].dtype == jnp.float32
    joint = turned(tensors, f"{prefix}.self_attn.kv_b_proj.weight").reshape(32, 2, 40)
    for found, expected in [
        (params["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32)),
        (params["head"], turned(tensors, "lm_head.weight")),
        (params["norm"]["weight"][0], tensors["model.norm.weight"].astype(np.float32)),
        (params["dense"]["mlp"]["down"]["weight"][0], turned(tensors, "model.layers.0.mlp.down_proj.weight")),
        (attention["query_down"]["weight"][1], turned(tensors, f"{prefix}.self_attn.q_a_proj.weight")),
        (attention["key_up"]["weight"][1], joint[..., :16].reshape(32, -1)),
        (attention["value_up"]["weight"][1], joint[..., 16:].reshape(32, -1)),
        (mlp["up"][1, 3], turned(tensors, f"{prefix}.mlp.experts.3.up_proj.weight")),
        (mlp["shared"]["gate"]["weight"][1], turned(tensors, f"{prefix}.mlp.shared_experts.gate_proj.weight")),
        (mlp["router"]["weight"][0], turned(tensors, "model.layers.1.mlp.gate.weight")),
        (mlp["router"]["bias"][1], tensors[f"{prefix}.mlp.gate.e_score_correction_bias"]),
    ]:
        np.testing.assert_array_equal(np.asarray(found, np.float32), expected)
    drafts = sum(name.startswith("model.layers.3.") for name in tensors)
    assert watch.notes == [f"{drafts} tensors of layers that predict further tokens (MTP) are skipped"]
    assert watch.done == watch.steps > 0


def test_mixtral_has_its_own_names_and_no_correction(tmp_path):
    tensors = published.mixtral()
    _, params = huggingface.load(write(tmp_path, MIXTRAL, tensors))
    mlp = params["sparse"]["mlp"]
    for ours, theirs in {"gate": "w1", "down": "w2", "up": "w3"}.items():
        name = f"model.layers.1.block_sparse_moe.experts.2.{theirs}.weight"
        np.testing.assert_array_equal(mlp[ours][1, 2], turned(tensors, name))
    assert mlp["gate"].dtype == jnp.float32 and not np.asarray(mlp["router"]["bias"]).any()


def test_a_tied_head_and_biases(tmp_path):
    tensors = published.qwen2()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # some files repeat it
    config, params = huggingface.load(write(tmp_path, QWEN2, tensors))
    assert config.tied and "head" not in params
    bias = params["dense"]["attention"]["key"]["bias"]
    assert bias.dtype == jnp.float32  # float16 does not fit bfloat16
    np.testing.assert_array_equal(bias[1], tensors["model.layers.1.self_attn.k_proj.bias"].astype(np.float32))


def test_the_text_part_of_a_model_of_text_and_pictures(tmp_path):
    tensors = published.deepseek(draft=False)
    wrapped = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    wrapped["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    watch = Notes()
    config, params = huggingface.load(
        write(tmp_path, {"model_type": "kimi_k25", "text_config": DEEPSEEK}, wrapped), watch=watch
    )
    np.testing.assert_array_equal(wide(params["head"]), turned(tensors, "lm_head.weight"))
    assert watch.notes == ["1 tensors of other parts than the text model are skipped"]


# ---- quantised


@pytest.mark.parametrize("devices", [1, 2])
def test_int4_experts_stay_packed(tmp_path, devices):
    config = DEEPSEEK | {"moe_intermediate_size": 64, "quantization_config": int4_config(32)}
    tensors, values = published.pack_int4(published.deepseek(config))
    mesh = make_mesh(devices) if devices > 1 else None
    _, params = huggingface.load(write(tmp_path, config, tensors, 2), mesh, Notes())
    for part in ("gate", "up", "down"):
        weight = params["sparse"]["mlp"][part]
        assert isinstance(weight, QuantizedTensor) and str(weight.format) == "int4:g32"
        assert devices == 1 or not weight.data.sharding.is_fully_replicated
        for layer, expert in np.ndindex(2, 4):
            name = f"model.layers.{layer + 1}.mlp.experts.{expert}.{part}_proj.weight"
            np.testing.assert_array_equal(wide(weight.take(layer, expert)), values[name].T)
    assert params["sparse"]["mlp"]["shared"]["up"]["weight"].dtype == jnp.bfloat16


def int4_config(group: int) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(("nope", "v", "kept"), [(128, 128, True), (16, 24, False)])
def test_fp8_blocks_stay_where_the_halves_of_a_head_are_whole_blocks(tmp_path, nope, v, kept):
    config = DEEPSEEK | {"qk_nope_head_dim": nope, "v_head_dim": v, "quantization_config": FP8_CONFIG}
    config |= {"hidden_size": 160}  # one whole block and part of one
    tensors, values = published.block_fp8(published.deepseek(config))
    _, params = huggingface.load(write(tmp_path, config, tensors), watch=Notes())
    attention = params["sparse"]["attention"]
    for part in (attention["query_down"]["weight"], params["sparse"]["mlp"]["down"]):
        assert isinstance(part, QuantizedTensor) and str(part.format) == "fp8_e4m3"
    down = "model.layers.1.self_attn.q_a_proj.weight"
    np.testing.assert_array_equal(wide(attention["query_down"]["weight"])[0], values[down].T)
    joint = values["model.layers.2.self_attn.kv_b_proj.weight"].reshape(2, nope + v, -1)
    for part, rows in {"key_up": joint[:, :nope], "value_up": joint[:, nope:]}.items():
        weight = attention[part]["weight"]
        assert isinstance(weight, QuantizedTensor) == kept
        np.testing.assert_array_equal(wide(weight)[1], rows.reshape(-1, rows.shape[-1]).T)


def test_blocks_that_are_taken_whole():
    assert takes_blocks(np.r_[0:128, 256:384])
    assert not takes_blocks(np.r_[64:192]) and not takes_blocks(np.r_[0:64])


def test_words_of_eight_codes():
    codes = np.random.default_rng(0).integers(0, 16, (3, 64)).astype(np.uint8)
    words = pack_int32(codes)
    assert words.dtype == np.int32 and words.shape == (3, 8)
    assert [(int(words[1, 2]) >> 4 * i) & 15 for i in range(8)] == codes[1, 16:24].tolist()
    np.testing.assert_array_equal(unpack_int32(words), codes)


# ---- what can be wrong


def broken(tmp_path, change=None, config=None, shards=1):
    tensors = published.deepseek(draft=False)
    if change:
        change(tensors)
    return write(tmp_path, DEEPSEEK | (config or {}), tensors, shards)


NORM, EXPERT = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: t.pop(NORM), {}, rf"tensor {NORM} is missing"),
        (lambda t: t.pop(EXPERT), {}, rf"tensor {EXPERT} is missing"),
        (lambda t: t.update(extra=np.zeros(2)), {}, r"model.safetensors: tensor extra is not part of the model"),
        (lambda t: t.update({NORM: np.zeros(3, np.float32)}), {}, rf"{NORM} has shape \[3\], config.json asks"),
        (lambda t: t.update({NORM: np.zeros(64, np.int32)}), {}, rf"{NORM} has type int32, which is none of a weight"),
        (None, {"moe_intermediate_size": 48}, r"down_proj.weight has shape \[64, 32\], config.json asks"),
        (None, {"n_routed_experts": 5}, r"tensor .* has shape \[4\], config|tensor .*experts.4.*is missing|\[5, 64\]"),
        (None, {"model_type": "gpt2"}, r"config.json: unknown architecture 'gpt2'"),
        (None, {"quantization_config": {"quant_method": "awq"}}, r"unknown quantisation method 'awq'"),
        (None, {"quantization_config": FP8_CONFIG | {"weight_block_size": [64, 64]}}, r"block_size is \[64, 64\]"),
        (None, {"quantization_config": int4_config(48)}, r"group_0.weights.group_size is 48, not one of"),
        (lambda t: t.update({EXPERT: t[EXPERT].astype(published.E4M3)}), {}, rf"tensor {EXPERT}_scale_inv is missing"),
    ],
)
def test_what_contradicts_is_named_in_one_line(tmp_path, change, config, message):
    with pytest.raises(UserError, match=message) as error:
        huggingface.load(broken(tmp_path, change, config), watch=Notes())
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def cut(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_bytes(b"\x00\x01")


def remove(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def twice(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"weight_map": {', '"weight_map": {"lm_head.weight": "x", '))


def elsewhere(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.bias"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(values))


def outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../x.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"00002-of-00003.safetensors is cut short: tensor \S+ ends at byte"),
        (cut_header, r"00002-of-00003.safetensors is cut short or is no safetensors file"),
        (remove, r"00002-of-00003.safetensors is missing"),
        (twice, r"index.json names lm_head.weight twice"),
        (elsewhere, r"00001-of-00003.safetensors: tensor lm_head.bias is missing, and model.*index.json says"),
        (outside, r"index.json: tensor lm_head.weight is said to be in '../x.safetensors'"),
        (lambda f: (f / "config.json").unlink(), r"has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config.json is not JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, message):
    folder = broken(tmp_path, shards=3)
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        huggingface.load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
