"""Safetensors files: as the format's own library writes and reads them, and whatever may be wrong with one."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoints.tensors import SafeTensors, read_header, write_header
from jaxinfer.errors import UserError

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2], ml_dtypes.bfloat16),
    "c": np.array([[7]], np.int32),
    "empty": np.zeros((0, 4), np.float16),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    return path.read_bytes()


def test_what_the_library_writes_is_read(tmp_path, whole):
    (tmp_path / "model.safetensors").write_bytes(whole)
    files = SafeTensors(tmp_path)
    assert files.entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert files.entries[name].dtype == tensor.dtype and files.entries[name].shape == tensor.shape
        np.testing.assert_array_equal(files.read(name), tensor)


def test_what_is_written_the_library_reads(tmp_path):
    header = write_header({name: (t.dtype, t.shape) for name, t in TENSORS.items()}, {"format": "pt"})
    assert len(header) % 8 == 0
    (tmp_path / "x.safetensors").write_bytes(header + b"".join(t.tobytes() for t in TENSORS.values()))
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(tensor, TENSORS[name])


@settings(max_examples=150)
@given(st.data())
def test_no_damage_goes_through_or_is_more_than_a_line(tmp_path_factory, whole, data):
    """Bytes changed anywhere in the header, or the file cut anywhere: all is read, or one line says what is wrong."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    header = int.from_bytes(whole[:8], "little") + 8
    for place in data.draw(st.lists(st.integers(0, header - 1), max_size=3)):
        if place < len(damaged):
            damaged[place] = data.draw(st.sampled_from(b'0129"{}[],:-.ax\x00\xff'))
    path.write_bytes(damaged)
    try:
        entries = dict(read_header(path))
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert all(entry.offset + entry.nbytes <= len(damaged) for entry in entries.values())


@pytest.mark.parametrize(
    "said",
    [
        [],
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_a_header_that_makes_no_sense_names_the_tensor(tmp_path, said):
    text = json.dumps({"x.weight": said}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(UserError, match="tensor x.weight"):
        SafeTensors(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    for name in ("one", "two"):
        save_file({"x": np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="tensor x is in both .*one.safetensors and .*two.safetensors"):
        SafeTensors(tmp_path)
