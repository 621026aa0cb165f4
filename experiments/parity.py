"""Table `parity`: logits of tiny random checkpoints of each family against the reference library's, over prefill and
decoding. Needs the `parity` extra.

    python -m experiments.parity --out experiments/results
"""

import argparse
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
from jaxtyping import Array, Float, Int32

from jaxinfer.cache.kv import KVCache
from jaxinfer.checkpoints import huggingface
from jaxinfer.config import ModelConfig
from jaxinfer.errors import UserError
from jaxinfer.evaluation.table import Table, check_writable, run_meta, to_rich, write
from jaxinfer.models.attention import PagedContext
from jaxinfer.models.decoder import Params, bind, forward
from jaxinfer.quantization.formats import KVFormat

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError:
    raise UserError("parity needs the reference library; get it with: pip install 'jaxinfer[parity]'") from None

PREFILL, DECODE, SEED = 40, 32, 0
TOLERANCE = 1e-4  # of a logit, float32 on both sides
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 256}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 3,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}  # the text is longer
SHARED = ["full", "shared", "full", "shared", "shared"]
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,  # the text is longer
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@dataclass(frozen=True)
class Case:
    """A row: the reference's configuration, what is done to the folder it saves, and its weights' format."""

    family: str
    kind: str
    sizes: dict[str, Any]
    format: str = "f32"
    change: Callable[[Path, torch.nn.Module], None] = field(default=lambda folder, model: None)
    note: str = ""


# ---- what is done to a folder, and to the reference so that it has the same values


def int4_experts(folder: Path, model: torch.nn.Module) -> None:
    """Routed experts packed by the reference's own packer, everything wrapped as the multimodal releases are."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        groups = weight.reshape(weight.shape[0], -1, 32)
        scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
        tensors[f"{module}.weight_packed"] = pack_to_int32(codes.reshape(weight.shape).to(torch.int8), 4)
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
        assign(model, name, (codes * scale.float()[..., None]).reshape(weight.shape))
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }

    def wrap(config: dict[str, Any]) -> dict[str, Any]:
        return {"model_type": "kimi_k25", "text_config": older_fields(config) | {"quantization_config": quantization}}

    rewrite_config(folder, wrap)


def fp8_blocks(folder: Path, model: torch.nn.Module) -> None:
    """Every linear layer in e4m3 with a scale a 128x128 block."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("_proj.weight", "_proj_with_mqa.weight"))]:
        weight = tensors[name]
        rows, columns = (-(-n // 128) for n in weight.shape)
        scale = torch.empty(rows, columns)
        wide = torch.empty_like(weight)
        for i, j in np.ndindex(rows, columns):
            block = np.s_[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            scale[i, j] = weight[block].abs().max() / 448
            wide[block] = scale[i, j]
        tensors[name] = (weight / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        assign(model, name, tensors[name].float() * wide)
    save_file(tensors, folder / "model.safetensors")
    rewrite_config(folder, lambda config: {**older_fields(config), "quantization_config": FP8})


def older_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of the published files where the reference library now writes others."""
    rope = dict(config.pop("rope_parameters"))
    config |= {"rope_theta": rope.pop("rope_theta"), "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    kind = rope.pop("rope_type")
    return config | ({} if kind == "default" else {"rope_scaling": {"type": kind, **rope}})


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def assign(model: torch.nn.Module, name: str, values: torch.Tensor) -> None:
    """Give the reference the values that the file now holds; it keeps the experts of a layer in two joint tensors."""
    with torch.no_grad():
        if ".experts." not in name:
            model.get_parameter(name).copy_(values)
            return
        before, _, after = name.partition(".experts.")
        index, part, _ = after.split(".")
        experts = model.get_submodule(f"{before}.experts")
        width = values.shape[0]
        if part == "down_proj":
            experts.down_proj[int(index)].copy_(values)
        else:
            first = 0 if part == "gate_proj" else width
            experts.gate_up_proj[int(index)][first : first + width].copy_(values)


DEEPSEEK, LLAMA = SIZES | EXPERTS | LATENT, SIZES | GROUPED | {"num_hidden_layers": 2}
CASES = (
    Case("deepseek_v3", "DeepseekV3", DEEPSEEK | {"n_group": 4, "topk_group": 2}),
    Case("deepseek_v3", "DeepseekV3", DEEPSEEK | {"n_group": 4, "topk_group": 2}, "fp8_e4m3", fp8_blocks),
    Case(
        "deepseek_v3",
        "DeepseekV3",
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN},
        note="YaRN, beyond the original length",
    ),
    Case(
        "kimi_k25",
        "DeepseekV3",
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN},
        "int4:g32",
        int4_experts,
        "YaRN, experts packed by compressed-tensors",
    ),
    Case("deepseek_v32", "DeepseekV32", DEEPSEEK | INDEXER | {"n_group": 4, "topk_group": 2}, note="indexer"),
    Case(
        "glm_moe_dsa",
        "GlmMoeDsa",
        DEEPSEEK | INDEXER | {"num_hidden_layers": 5, "indexer_types": SHARED},
        note="indexers, choices shared",
    ),
    Case("glm4_moe", "Glm4Moe", SIZES | EXPERTS | GROUPED | {"attention_bias": True, "use_qk_norm": True}),
    Case("glm4_moe", "Glm4Moe", SIZES | EXPERTS | GROUPED | {"use_qk_norm": False}, "fp8_e4m3", fp8_blocks),
    Case(
        "qwen3_moe",
        "Qwen3Moe",
        LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    Case(
        "qwen3_moe",
        "Qwen3Moe",
        LLAMA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": False},
        note="weights not renormalised",
    ),
    Case("mixtral", "Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("llama", "Llama", LLAMA | {"tie_word_embeddings": True}, note="tied head"),
    Case("llama", "Llama", LLAMA | {"rope_parameters": LLAMA3}, note="Llama 3.1 rope, beyond the original length"),
    Case("qwen2", "Qwen2", LLAMA, note="biases"),
    Case("qwen3", "Qwen3", LLAMA),
)


# ---- both sides


def reference_model(case: Case) -> torch.nn.Module:
    """Random weights that keep the size of what passes through, norms and biases that are not the neutral ones."""
    torch.manual_seed(SEED)
    config = getattr(transformers, f"{case.kind}Config")(**case.sizes)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                value.copy_(1 + 0.3 * torch.randn_like(value))
            elif "bias" in name:
                value.copy_(0.1 * torch.randn_like(value))
            elif value.ndim > 1:
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    return model


def reference_logits(model: torch.nn.Module, tokens: Int32[np.ndarray, " n"]) -> Float[np.ndarray, "n V"]:
    """One prefill, then one token at a time from its cache."""
    ids = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        out = model(ids[:, :PREFILL], use_cache=True)
        found = [out.logits[0]]
        for i in range(PREFILL, len(tokens)):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits[0])
    return torch.cat(found).numpy()


def served_logits(config: ModelConfig, params: Params, tokens: Int32[np.ndarray, " n"]) -> Float[np.ndarray, "n V"]:
    """The same through pages."""
    cache = KVCache.create(config.attention.entries, config.cache_layers, 1, len(tokens), KVFormat.parse("f32"))

    @jax.jit
    def step(cache: KVCache, tokens: Int32[Array, " T"], first: Int32[Array, ""]):
        positions = (first + jnp.arange(tokens.shape[0]))[None]
        table, length = jnp.zeros((1, 1), jnp.int32), first[None] + tokens.shape[0]
        context = PagedContext(positions, jnp.zeros_like(positions), positions, table, length)
        hidden, cache = bind(config, params).paged(tokens[None], context, cache, jnp.float32)
        return cache, bind(config, params).logits(hidden[0])

    cache, logits = step(cache, tokens[:PREFILL], jnp.int32(0))
    found = [logits]
    for i in range(PREFILL, len(tokens)):
        cache, logits = step(cache, tokens[i : i + 1], jnp.int32(i))
        found.append(logits)
    return np.concatenate(found)


def plain_logits(config: ModelConfig, params: Params, tokens: Int32[np.ndarray, " n"]) -> Float[np.ndarray, "n V"]:
    """The whole text at once, keys and values of every head expanded."""
    row = tokens[None]
    logits, _ = jax.jit(functools.partial(forward, config))(params, row, np.arange(row.size)[None], np.ones_like(row))
    return np.asarray(logits[0])


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """One row."""
    model = reference_model(case)
    model.save_pretrained(folder)
    case.change(folder, model)
    tokens = np.random.default_rng(SEED).integers(0, SIZES["vocab_size"], PREFILL + DECODE).astype(np.int32)
    expected = reference_logits(model, tokens)
    config, params = huggingface.load(folder)
    served, plain = served_logits(config, params, tokens), plain_logits(config, params, tokens)
    error = abs(served - expected)
    return {
        "model": case.family,
        "weight_format": case.format,
        "note": case.note,
        "prefill_max_diff": error[:PREFILL].max(),
        "decode_max_diff": error[PREFILL:].max(),
        "mean_diff": error.mean(),
        "plain_max_diff": abs(plain - expected).max(),
        "top1_agreement": (served.argmax(-1) == expected.argmax(-1)).mean(),
        "logit_deviation": expected.std(),
        "tolerance": TOLERANCE,
        "within": bool(max(error.max(), abs(plain - expected).max()) <= TOLERANCE),
        "source": "measured",
    }


def parity(command: str) -> Table:
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(case, Path(folder)))
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Table(
        "parity",
        rows,
        run_meta(command, SEED, len(rows), "f32 arithmetic, f32 pages", reference=libraries),
        "Logits of tiny random checkpoints against the reference implementation",
        [
            f"{PREFILL} tokens of prefill, {DECODE} decode steps of one forced token each, through pages, and at once "
            "with keys and values of every head (plain); the reference decodes from its own cache.",
            "Quantised rows: the reference has the dequantised values in float32.",
        ],
        draw,
    )


def draw(figure: Any, table: Table) -> None:
    """The largest differences of each row beside the tolerance, on a logarithmic axis."""
    axis = figure.subplots()
    fields = ("prefill_max_diff", "decode_max_diff", "plain_max_diff")
    for offset, name in enumerate(fields):
        heights = [place + 0.25 * (offset - 1) for place in range(len(table.rows))]
        axis.plot([row[name] for row in table.rows], heights, "o", markersize=4, label=name)
    axis.axvline(TOLERANCE, color="gray", linewidth=0.8, label="tolerance")
    labels = [" / ".join(filter(None, (r["model"], r["weight_format"], r["note"]))) for r in table.rows]
    axis.set_yticks(range(len(labels)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("largest difference of a logit")
    axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("experiments/results"))
    out = check_writable(parser.parse_args().out)
    table = parity(f"python -m experiments.parity --out {out}")
    write(table, out)
    rich.print(to_rich(table))


if __name__ == "__main__":
    main()
