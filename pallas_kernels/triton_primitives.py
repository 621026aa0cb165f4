"""Four operations on tiles that jnp can't say to Triton, each with its plain form, which interpreters run.

They are JAX primitives with two lowerings: to Triton's dialect inside a GPU kernel, and the plain form everywhere else,
so that a kernel is one function whether it is compiled or interpreted.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir  # Pallas has no public way to add a lowering
from jax._src.lib.mlir.dialects import math
from jax._src.lib.triton import dialect
from jax._src.pallas.triton import lowering
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, Shaped, UInt8, UInt16

# A 16-bit float with these bits is 128 (bf16) or 1024 (f16) plus its lowest four bits, so `| code` needs no conversion.
MAGIC = {jnp.dtype(jnp.bfloat16): (0x4300, 136.0), jnp.dtype(jnp.float16): (0x6400, 1032.0)}
ELEMENT: dict[Any, Any] = {jnp.dtype(jnp.bfloat16): ir.BF16Type, jnp.dtype(jnp.float16): ir.F16Type}


def widen_e4m3(bits: UInt8[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """The values of e4m3 bits in float16, exact. The tile is converted once, where it was loaded.

    The assembly is declared impure because Triton would move a pure conversion to each product that reads the tile and
    collect its operands byte by byte from shared memory.
    """
    return _widen.bind(bits)


def nibble(words: UInt16[Array, "rows columns"], plane: int, dtype) -> Float[Array, "rows columns"]:
    """Bits 4 plane .. 4 plane + 3 of each word, less 8: -8..7 in `dtype` (bfloat16 or float16), exact."""
    return _nibble.bind(words, plane=plane, dtype=jnp.dtype(dtype)) - jnp.asarray(MAGIC[jnp.dtype(dtype)][1], dtype)


def dot_e4m3(a: Shaped[Array, "m k"], b: Shaped[Array, "k n"]) -> Float[Array, "m n"]:
    """Product of two e4m3 tiles on the FP8 tensor cores, in float32.

    Those add up with about 14 bits; callers keep k at 128 and add the products themselves (arXiv:2412.19437, 3.3.2).
    Pallas' own dot asks for full accumulation, which makes Triton convert both tiles to float16.
    """
    return _dot.bind(a, b)


def multiply_add(a: Float[Array, "..."], b: Float[Array, "..."], c: Float[Array, "..."]) -> Float[Array, "..."]:
    """a * b + c of tiles of one shape in one instruction: Triton as XLA runs it does not contract the two."""
    return _multiply_add.bind(a, b, c)


def _primitive(name: str, plain: Callable[..., jax.Array]) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(plain)

    def abstract(*avals, **params):
        shape = jax.eval_shape(lambda *a: plain(*a, **params), *avals)
        return jax.core.ShapedArray(shape.shape, shape.dtype)

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=False))
    return primitive


def _plain_widen(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float16)


def _plain_nibble(words, *, plane: int, dtype):
    code = (words >> jnp.uint16(4 * plane)) & jnp.uint16(0xF)
    return jax.lax.bitcast_convert_type(code | jnp.uint16(MAGIC[dtype][0]), dtype)


def _plain_multiply_add(a, b, c):
    return a * b + c


def _plain_dot(a, b):
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))


_widen = _primitive("widen_e4m3", _plain_widen)
_nibble = _primitive("nibble", _plain_nibble)
_dot = _primitive("dot_e4m3", _plain_dot)
_multiply_add = _primitive("multiply_add", _plain_multiply_add)


def _assembly(operand, dtype, code: str, constraints: str, pack: int, pure: bool):
    shape = ir.RankedTensorType(operand.type).shape
    result = ir.RankedTensorType.get(shape, ELEMENT[jnp.dtype(dtype)].get())
    return dialect.elementwise_inline_asm(
        [result], code, constraints=constraints, pure=pure, packed_element=pack, args=[operand]
    )


@lowering.register_lowering(_widen)
def _triton_widen(ctx, bits):
    halves = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
    code = halves + "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    return _assembly(bits, jnp.float16, code, "=r,=r,r", pack=4, pure=False)


@lowering.register_lowering(_nibble)
def _triton_nibble(ctx, words, *, plane: int, dtype):
    # Two words in a register: one shift and one (word & 0x000F000F) | magic (truth table 0xEA) for two weights.
    pair = MAGIC[dtype][0] * 0x10001
    shift = f"shr.b32 word, $1, {4 * plane};" if plane else "mov.b32 word, $1;"
    code = f"{{ .reg .b32 word; {shift} lop3.b32 $0, word, 0x000F000F, {pair:#x}, 0xEA; }}"
    return _assembly(words, dtype, code, "=r,r", pack=2, pure=True)


@lowering.register_lowering(_dot)
def _triton_dot(ctx, a, b):
    rows, columns = ctx.avals_out[0].shape
    zero = lowering._zeros(ir.RankedTensorType.get([rows, columns], ir.F32Type.get()))
    return dialect.dot(a, b, zero, max_num_imprecise_acc=2**30)


@lowering.register_lowering(_multiply_add)
def _triton_multiply_add(ctx, a, b, c):
    return math.fma(a, b, c)
