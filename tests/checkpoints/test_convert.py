"""Conversions keep what they don't convert, can be killed at any shard, and never look whole before they are."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxinfer.checkpoints import convert as module
from jaxinfer.checkpoints import huggingface
from jaxinfer.checkpoints.convert import convert
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.errors import UserError
from jaxinfer.quantization.formats import WeightFormat
from jaxinfer.quantization.tensor import QuantizedTensor, dequantize, quantize
from tests.checkpoints import published

CONFIG = published.DEEPSEEK | {"hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 1}
CONFIG |= {"qk_nope_head_dim": 128, "v_head_dim": 128}  # whole FP8 blocks
INT4, FP8 = WeightFormat.parse("int4:g32"), WeightFormat.parse("fp8_e4m3")


rounded = jax.jit(quantize, static_argnums=1)


class Quiet(Watch):
    def note(self, text):
        pass


class Killed(Watch):
    """Stops the work after so many steps."""

    def __init__(self, steps: int):
        self.left = steps

    def advance(self):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def note(self, text):
        pass


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = published.write(tmp_path_factory.mktemp("plain") / "model", CONFIG, published.deepseek(CONFIG), 2)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leaves(folder):
    return jax.tree.leaves(huggingface.load(folder, watch=Quiet())[1], is_leaf=lambda x: isinstance(x, QuantizedTensor))


@pytest.mark.parametrize("format", [INT4, FP8], ids=str)
def test_the_matrices_become_what_quantising_them_gives(plain, tmp_path, format):
    report = convert(plain, tmp_path / "new", format, Quiet())
    assert report.bytes_after < report.bytes_before
    assert (tmp_path / "new" / "tokenizer_config.json").is_file() and not (tmp_path / "new.partial").exists()
    kinds = 0
    for old, new in zip(leaves(plain), leaves(tmp_path / "new"), strict=True):
        if not isinstance(new, QuantizedTensor):
            np.testing.assert_array_equal(np.asarray(old, np.float32), np.asarray(new, np.float32))
            continue
        kinds += 1
        np.testing.assert_array_equal(dequantize(new), dequantize(rounded(old, format)))
    assert kinds == (3 if format == INT4 else 21)
    assert all(0 < error.relative_rms < (0.2 if format == INT4 else 0.05) for error in report.errors)


def test_fp8_to_int4(plain, tmp_path):
    """What INT4 does not cover becomes plain again."""
    convert(plain, tmp_path / "fp8", FP8, Quiet())
    convert(tmp_path / "fp8", tmp_path / "int4", INT4, Quiet())
    _, params = huggingface.load(tmp_path / "int4", watch=Quiet())
    assert isinstance(params["sparse"]["mlp"]["up"], QuantizedTensor)
    assert not isinstance(params["sparse"]["attention"]["output"]["weight"], QuantizedTensor)
    assert convert(tmp_path / "int4", tmp_path / "again", INT4, Quiet()).errors == []


def test_killed_anywhere_and_resumed_it_is_the_same(plain, tmp_path):
    convert(plain, tmp_path / "once", INT4, Quiet(), shard_bytes=100_000)
    assert len(list((tmp_path / "once").glob("*.safetensors"))) > 3
    for steps in (0, 20, 35):
        with pytest.raises(KeyboardInterrupt):
            convert(plain, tmp_path / "often", INT4, Killed(steps), shard_bytes=100_000)
        assert not (tmp_path / "often").exists()
        with pytest.raises(UserError):  # what there is does not load
            huggingface.load(tmp_path / "often.partial")
    convert(plain, tmp_path / "often", INT4, Quiet(), shard_bytes=100_000)
    assert contents(tmp_path / "often") == contents(tmp_path / "once")


def test_another_conversion_in_the_way(plain, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        convert(plain, tmp_path / "new", INT4, Killed(3))
    with pytest.raises(UserError, match="holds the beginning of another conversion"):
        convert(plain, tmp_path / "new", FP8, Quiet())
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there exists; give another folder"):
        convert(plain, tmp_path / "there", FP8, Quiet())


def test_a_full_disk_and_a_group_that_does_not_fit_are_refused_first(plain, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs 0.\d GB, the disk of .* has 0.0"):
        convert(plain, tmp_path / "new", INT4, Quiet())
    with pytest.raises(UserError, match=r"size 128 does not divide the 64 inputs of model.layers.1.mlp.experts.\d"):
        convert(plain, tmp_path / "new", WeightFormat.parse("int4:g128"), Quiet())
    with pytest.raises(UserError, match="converted to fp8_e4m3 or int4, not bf16"):
        convert(plain, tmp_path / "new", WeightFormat.parse("bf16"), Quiet())
    assert list(tmp_path.iterdir()) == []


def test_config_says_what_was_done(plain, tmp_path):
    convert(plain, tmp_path / "new", INT4, Quiet())
    said = json.loads((tmp_path / "new" / "config.json").read_text())
    assert said["num_nextn_predict_layers"] == 0 and said["quantization_config"]["format"] == "pack-quantized"
    report = json.loads((tmp_path / "new" / "conversion.json").read_text())
    assert {error["name"].split(".")[-1] for error in report["errors"]} == {"weight_packed"}
