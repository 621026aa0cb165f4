"""A few kernels compile for an H200 with no GPU here: no spills, the right instructions, no copy of a layer."""

import re
from functools import partial

import pytest

from experiments import kernel_compile
from jaxinfer.planning import deviceless, machine_code
from pallas_kernels.bf16_matmul import shapes as bf16
from pallas_kernels.fp8_matmul import shapes as fp8
from pallas_kernels.paged_attention import shapes as attention
from pallas_kernels.w4a16_matmul import shapes as w4a16

CASES = [
    attention.MLACase("mla e4m3", (8192,) * 64, 1, 8, 64, "uint8", 16),
    attention.GQACase("gqa e4m3", (8192,) * 64, 1, 12, 64, "uint8", 8),
    w4a16.W4A16Case("w4a16", 16, 7168, 4096),
    w4a16.W4A16Case("w4a16 experts", 512, 7168, 256, 32, 4, w4a16.routed(64, 8, 384)),
    fp8.FP8Case("fp8", 4096, 7168, 4096),
    bf16.BF16Case("bf16", 64, 7168, 1536),
    bf16.BF16Case("bf16 many rows", 4096, 7168, 4096),
    bf16.BF16Case("bf16 heads", 64, 512, 128, 16, heads=8),
]


@pytest.fixture(scope="module")
def mesh():
    if reason := deviceless.unavailable():
        pytest.skip(reason)
    return deviceless.mesh()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_compiles_without_spills(mesh, case):
    structs = [deviceless.array(mesh, struct.shape, struct.dtype) for struct in case.structs()]
    call = partial(case.call, implementation="auto")
    program = deviceless.compile(call, *structs, mesh=mesh, keep_kernels=True)
    code = machine_code.read(program.kernels[case.kernel])
    assert kernel_compile.faults(case, code) == []
    assert code.main_loop.issue_share(case.turn_bytes(), code.kernel.threads) < 0.8
    assert " conditional(" not in program.hlo  # `auto` leaves no branch
    largest = max(struct.size * struct.dtype.itemsize for struct in case.structs())
    assert program.memory()["temp"] < max(0.1 * largest, 64e6)  # neither the stack nor a layer of it was copied
    assert not re.search(r"= (s|u|f8e4m3fn)\S* (copy|dynamic-slice)\(\S*%param", program.hlo)


def test_the_gate_fails_a_kernel_that_spills(mesh, monkeypatch):
    from pallas_kernels.paged_attention import api
    from pallas_kernels.paged_attention.triton import Tuning

    monkeypatch.setattr(api, "mla_tuning", lambda *_: Tuning(16, 32, warps=2, depth=1))
    with pytest.raises(Exception, match="register spilling"):
        kernel_compile.compile_case(CASES[0], mesh)


def test_the_command_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(deviceless, "PLUGINS", ())
    assert kernel_compile.main(["--out", str(tmp_path)]) == 2
    assert "pip install 'jaxinfer[aot]'" in capsys.readouterr().err
