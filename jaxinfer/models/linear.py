"""A stack of linear layers, one a decoder layer, read by layer index so that no layer is copied out for a kernel."""

from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxinfer.models.parameter import parameter
from jaxinfer.quantization.tensor import heads_matmul, matmul


class Linear(nnx.Module):
    """Weights `[layers, inputs, outputs]`; `axes` are the logical names of the last two. A `bias` is
    `[layers, outputs]`."""

    def __init__(
        self, layers: int, inputs: int, outputs: int, axes: tuple[str, str], rngs: nnx.Rngs, dtype, bias: bool = False
    ):
        self.axes = axes
        self.weight = parameter(rngs, dtype, ("layers", *axes), (layers, inputs, outputs), kind="linear")
        self.bias = parameter(rngs, dtype, ("layers", axes[1]), (layers, outputs), init="zeros") if bias else None

    def __call__(self, x: Float[Array, "... inputs"], layer: Int32[Array, ""]) -> Float[Array, "... outputs"]:
        y = matmul(x, self.weight.get_value(), layer, self.axes)
        return y if self.bias is None else y + self.bias.get_value()[layer].astype(y.dtype)

    def by_head(
        self, x: Float[Array, "... H K"], layer: Int32[Array, ""], transposed: bool = False
    ) -> Float[Array, "... H N"]:
        """Each head of `x` times its columns of the matrix, or (`transposed`) times their transpose."""
        return heads_matmul(x, self.weight.get_value(), layer, transposed)
