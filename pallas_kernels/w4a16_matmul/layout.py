"""How 4-bit weights lie in memory: in words that a GPU unpacks two at a time, and that split over devices.

A matrix of K inputs and N outputs has codes -8..7, stored plus 8. Blocks of 32 inputs of one output are 8 words of 16
bits: word i holds the codes of inputs i, i + 8, i + 16 and i + 24 of its block, from the lowest bits up (plane j is
bits 4j .. 4j+3). So one load of 16 bytes is one block, a plane of a tile needs one shift and one logic operation for
two weights, and every group size from 32 up is a whole number of blocks. Words are `[..., K/32, N*8]`: any cut of the
first axis, or of the second at a multiple of 8, is the layout of that part of the matrix.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8, UInt16

BLOCK, WORDS, PLANES = 32, 8, 4
GROUPS = (32, 64, 128)
CHUNK = 256  # inputs that the kernel takes at a time


def pack(codes: UInt8[Array, "... K N"]) -> UInt16[Array, "... K/32 N*8"]:
    """Codes 0..15 (plus 8) as words. ValueError where K is no multiple of 32."""
    *stack, inputs, outputs = codes.shape
    if inputs % BLOCK:
        raise ValueError(f"{inputs} inputs: 4-bit weights come in blocks of {BLOCK}")
    planes = codes.reshape(*stack, inputs // BLOCK, PLANES, WORDS, outputs).astype(jnp.uint16)
    words = planes[..., 0, :, :]
    for j in range(1, PLANES):
        words = words | (planes[..., j, :, :] << (4 * j))
    return words.swapaxes(-1, -2).reshape(*stack, inputs // BLOCK, outputs * WORDS)


def unpack(words: UInt16[Array, "... K/32 N*8"]) -> UInt8[Array, "... K N"]:
    """The inverse of `pack`."""
    *stack, blocks, width = words.shape
    by_output = words.reshape(*stack, blocks, width // WORDS, WORDS).swapaxes(-1, -2)
    codes = jnp.stack([(by_output >> (4 * j)) & 0xF for j in range(PLANES)], axis=-3)
    return codes.astype(jnp.uint8).reshape(*stack, blocks * BLOCK, width // WORDS)


def dequantize(
    words: UInt16[Array, "... K/32 N*8"], scale: Float[Array, "... K/group N"], group: int
) -> Float[Array, "... K N"]:
    """(code - 8) * scale in float32."""
    codes = unpack(words)
    *stack, inputs, outputs = codes.shape
    grouped = codes.reshape(*stack, inputs // group, group, outputs).astype(jnp.float32) - 8
    return (grouped * scale.astype(jnp.float32)[..., None, :]).reshape(*stack, inputs, outputs)


def by_plane(x: Float[Array, "M K"]) -> Float[Array, "M padded"]:
    """Inputs in the order in which the kernel meets them: K filled up to chunks of 256 with zeros, and in each chunk
    the 64 inputs of plane 0, then those of plane 1 ..."""
    rows, inputs = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -inputs % CHUNK)))
    chunks = padded.reshape(rows, -1, CHUNK // BLOCK, PLANES, WORDS)
    return chunks.swapaxes(2, 3).reshape(rows, -1)
