"""The files beside the weights: tokenizer, template, what begins and ends a text; and a folder loaded as a whole."""

import json

import pytest

from jaxinfer.checkpoints import huggingface_text
from jaxinfer.checkpoints.model import Model
from jaxinfer.checkpoints.watch import Watch
from jaxinfer.errors import UserError
from jaxinfer.text.tokenizer import Tokenizer
from tests.checkpoints import published

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}"
SETTINGS = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|end|>", "chat_template": TEMPLATE}


@pytest.fixture
def folder(tmp_path):
    published.write(tmp_path, published.QWEN2, published.qwen2())
    Tokenizer.train(["seven owls and nine more owls"] * 3, 280).save(tmp_path / "tokenizer.json")
    settings(tmp_path, **SETTINGS)
    return tmp_path


def settings(folder, **values):
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_a_whole_folder(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 6], "temperature": 0.6}))
    model = Model.load(folder, watch=Watch())
    assert model.config.tied and model.config.name == folder.name
    assert model.end_tokens == {2, 6}
    assert model.encode("owls") == model.tokenizer.encode("owls")  # no token begins every text
    text = model.tokenizer.decode(model.chat("owls<|end|>"), skip_special=False)
    assert text == "<|bos|><|user|>owls<|end|><|end|>" and model.chat("owls<|end|>").count(2) == 1
    assert {scale.tolist() == [1, 1] for scale in model.kv_scales.values()} == {True}


def test_a_token_that_begins_every_text(folder):
    settings(folder, **SETTINGS, add_bos_token=True)
    tokenizer, _, _ = huggingface_text.read(folder)
    assert tokenizer.bos_id == 1


def test_where_templates_stand(folder):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    settings(folder, **SETTINGS | {"chat_template": named})
    assert huggingface_text.read(folder)[1].source == "y"
    settings(folder, **SETTINGS | {"chat_template": None})
    assert huggingface_text.read(folder)[1].source == huggingface_text.PLAIN_TEMPLATE
    (folder / "chat_template.jinja").write_text("z")
    assert huggingface_text.read(folder)[1].source == "z"


def test_what_ends_a_text_without_settings(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="says what ends a text"):
        Model.load(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    tokenizer, _, ends = huggingface_text.read(folder)
    assert tokenizer.end_id == 2 and ends == {2}


def test_what_is_wrong_is_named(folder):
    config = published.QWEN2 | {"vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"the tokenizer has 2\d\d tokens, the embedding only 100"):
        Model.load(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read the tokenizer at .*tokenizer.json: [^\n]*\Z"):
        Model.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer at .*tokenizer.json"):
        Model.load(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no safetensors files"):
        Model.load(folder)
