"""The packaged tokenizer: round trips, special tokens only on request, streaming equal to decoding."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxinfer.text.tokenizer as module
from jaxinfer.text.tokenizer import SPECIAL_TOKENS, StreamDecoder, Tokenizer

PATH = Path(module.__file__).parents[1] / "checkpoints" / "tiny" / "tokenizer.json"
TOKENIZER = Tokenizer.load(PATH)
ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
texts = st.text() | st.lists(st.sampled_from([*SPECIAL_TOKENS, "a", " 12", "\n", "é", "🦉"])).map("".join)


@given(texts)
def test_text_comes_back_and_no_text_gives_a_special_token(text):
    encoded = TOKENIZER.encode(text)
    assert TOKENIZER.decode(encoded) == text
    assert not TOKENIZER.special_ids & set(encoded)


def test_special_tokens_are_recognised_only_on_request():
    assert TOKENIZER.encode("a<|end|>", special=True)[-1] == TOKENIZER.end_id
    assert len(TOKENIZER.encode("<|end|>")) > 1
    assert TOKENIZER.decode([TOKENIZER.end_id]) == ""
    assert TOKENIZER.decode([TOKENIZER.end_id], skip_special=False) == "<|end|>"
    assert [TOKENIZER.encode(token, special=True) for token in SPECIAL_TOKENS] == [[i] for i in range(7)]


@given(texts)
def test_special_encoding_is_the_plain_one_between_markers(text):
    # Prompts built from pieces and prompts built whole must be the same tokens.
    whole = TOKENIZER.encode(f"<|user|>{text.replace('<|', '')}<|end|>", special=True)
    assert whole[1:-1] == TOKENIZER.encode(text.replace("<|", ""))


@settings(max_examples=200)
@given(ids, st.booleans())
def test_stream_equals_decode(tokens, skip):
    stream = StreamDecoder(TOKENIZER, skip_special=skip)
    pieces = [stream.push(id) for id in tokens]
    assert "".join([*pieces, stream.flush()]) == TOKENIZER.decode(tokens, skip_special=skip)


@given(st.text())
def test_stream_never_splits_a_character(text):
    stream = StreamDecoder(TOKENIZER)
    pieces = [stream.push(id) for id in TOKENIZER.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_an_open_character_is_held_back_until_it_is_whole():
    owl = [TOKENIZER.encode("🦉")[i] for i in range(4)]
    stream = StreamDecoder(TOKENIZER)
    assert [stream.push(id) for id in owl] == ["", "", "", "🦉"]
    assert [stream.push(owl[0]), stream.flush()] == ["", "\ufffd"]


@given(ids)
def test_token_bytes_join_to_the_decoded_text(tokens):
    joined = b"".join(TOKENIZER.token_bytes(id) for id in tokens)
    assert joined.decode("utf-8", errors="replace") == TOKENIZER.decode(tokens, skip_special=False)


def test_digits_stand_alone():
    assert len(TOKENIZER.encode("90210")) == 5


@pytest.mark.parametrize("id", [-1, TOKENIZER.vocab_size])
def test_an_id_outside_the_vocabulary_is_refused(id):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        TOKENIZER.decode([id])


@pytest.mark.parametrize("content", [None, "", "{", '{"model": 3}', "[]"])
def test_a_missing_or_damaged_file_is_one_line_with_the_path(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="tokenizer.json") as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)


def test_save_and_load_give_the_same_tokens(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    text = "<|user|>7 owls & é<|end|>"
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.encode(text, special=True) == TOKENIZER.encode(text, special=True)
    assert again.encode(text) == TOKENIZER.encode(text)
