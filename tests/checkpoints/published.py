"""Made-up checkpoints in the published layout, written out by hand: what the table of names is held against."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}

DEEPSEEK = {
    **SIZES,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "num_nextn_predict_layers": 1,
}
MIXTRAL = {
    **SIZES,
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN2 = {
    **SIZES,
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


class Drawer:
    """Random tensors by name."""

    def __init__(self, dtype=BF16, seed: int = 0):
        self.rng, self.dtype, self.tensors = np.random.default_rng(seed), dtype, {}

    def __call__(self, name: str, *shape: int, dtype=None) -> None:
        values = self.rng.standard_normal(shape, np.float32) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        self.tensors[name] = (values + ("norm" in name)).astype(dtype or self.dtype)

    def frame(self, config: dict) -> None:
        self("model.embed_tokens.weight", config["vocab_size"], config["hidden_size"])
        self("model.norm.weight", config["hidden_size"])
        if not config.get("tie_word_embeddings"):
            self("lm_head.weight", config["vocab_size"], config["hidden_size"])
        for layer in range(config["num_hidden_layers"]):
            for name in ("input_layernorm", "post_attention_layernorm"):
                self(f"model.layers.{layer}.{name}.weight", config["hidden_size"])

    def mlp(self, prefix: str, hidden: int, width: int, names=("gate_proj", "up_proj", "down_proj")) -> None:
        gate, up, down = names
        self(f"{prefix}.{gate}.weight", width, hidden)
        self(f"{prefix}.{up}.weight", width, hidden)
        self(f"{prefix}.{down}.weight", hidden, width)

    def gqa(self, config: dict, bias: bool) -> None:
        hidden, head = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
        kv = config["num_key_value_heads"] * head
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}.self_attn"
            for name, width in {"q_proj": hidden, "k_proj": kv, "v_proj": kv}.items():
                self(f"{prefix}.{name}.weight", width, hidden)
                if bias:
                    self(f"{prefix}.{name}.bias", width)
            self(f"{prefix}.o_proj.weight", hidden, hidden)


def deepseek(config: dict = DEEPSEEK, draft: bool = True) -> dict[str, np.ndarray]:
    """All tensors of such a model, a layer that predicts further tokens included."""
    draw = Drawer()
    layers = config["num_hidden_layers"] + draft
    draw.frame({**config, "num_hidden_layers": layers})
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["moe_intermediate_size"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        draw(f"{prefix}.self_attn.q_a_proj.weight", config["q_lora_rank"], hidden)
        draw(f"{prefix}.self_attn.q_a_layernorm.weight", config["q_lora_rank"])
        draw(f"{prefix}.self_attn.q_b_proj.weight", heads * (nope + rope), config["q_lora_rank"])
        draw(f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", config["kv_lora_rank"] + rope, hidden)
        draw(f"{prefix}.self_attn.kv_a_layernorm.weight", config["kv_lora_rank"])
        draw(f"{prefix}.self_attn.kv_b_proj.weight", heads * (nope + v), config["kv_lora_rank"])
        draw(f"{prefix}.self_attn.o_proj.weight", hidden, heads * v)
        if layer < config["first_k_dense_replace"]:
            draw.mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
            continue
        draw(f"{prefix}.mlp.gate.weight", config["n_routed_experts"], hidden)
        draw(f"{prefix}.mlp.gate.e_score_correction_bias", config["n_routed_experts"], dtype=np.float32)
        draw.mlp(f"{prefix}.mlp.shared_experts", hidden, width)
        for expert in range(config["n_routed_experts"]):
            draw.mlp(f"{prefix}.mlp.experts.{expert}", hidden, width)
    return draw.tensors


def mixtral(config: dict = MIXTRAL) -> dict[str, np.ndarray]:
    draw = Drawer(np.dtype(np.float32))
    draw.frame(config)
    draw.gqa(config, bias=False)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        draw(f"{prefix}.gate.weight", config["num_local_experts"], config["hidden_size"])
        for expert in range(config["num_local_experts"]):
            names = ("w1", "w3", "w2")
            draw.mlp(f"{prefix}.experts.{expert}", config["hidden_size"], config["intermediate_size"], names)
    return draw.tensors


def qwen2(config: dict = QWEN2) -> dict[str, np.ndarray]:
    draw = Drawer(np.dtype(np.float16))
    draw.frame(config)
    draw.gqa(config, bias=True)
    for layer in range(config["num_hidden_layers"]):
        draw.mlp(f"model.layers.{layer}.mlp", config["hidden_size"], config["intermediate_size"])
    return draw.tensors


def pack_int4(tensors: dict[str, np.ndarray], group: int = 32) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The routed experts as compressed-tensors packs them, and the values that they then have, [outputs, inputs]."""
    packed, values = dict(tensors), {}
    for name in [name for name in tensors if ".experts." in name]:
        weight = packed.pop(name).astype(np.float32)
        outputs, inputs = weight.shape
        scale = (abs(weight.reshape(outputs, -1, group)).max(-1) / 7.5).astype(BF16)
        step = scale.astype(np.float32).repeat(group, 1)
        codes = np.clip(np.round(weight / step), -8, 7).astype(np.int64)
        words = np.zeros((outputs, inputs // 8), np.int64)
        for i in range(8):
            words |= (codes[:, i::8] + 8) << (4 * i)
        module = name.removesuffix(".weight")
        packed[f"{module}.weight_packed"] = words.astype(np.uint32).view(np.int32)
        packed[f"{module}.weight_scale"] = scale
        packed[f"{module}.weight_shape"] = np.array([outputs, inputs], np.int32)
        values[name] = codes * step
    return packed, values


def block_fp8(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The linear layers as DeepSeek-V3 has them, with the values that they then have."""
    blocks, values = dict(tensors), {}
    for name in [n for n in tensors if n.endswith("_proj.weight") or "_proj_with_mqa" in n]:
        weight = tensors[name].astype(np.float32)
        scale = np.empty([-(-n // 128) for n in weight.shape], np.float32)
        wide = np.empty_like(weight)
        for i, j in np.ndindex(scale.shape):
            block = np.s_[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            scale[i, j] = wide[block] = abs(weight[block]).max() / 448
        blocks[name] = (weight / wide).astype(E4M3)
        blocks[f"{name}_scale_inv"] = scale
        values[name] = blocks[name].astype(np.float32) * wide
    return blocks, values


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """The folder, with the library's own writer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    placed = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, {"format": "pt"})
        placed |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder
