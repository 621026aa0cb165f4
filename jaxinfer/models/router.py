"""The expert router: which experts a token goes to, and with what weight. Float32 throughout."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxinfer.config import MoEConfig
from jaxinfer.models.parameter import parameter
from jaxinfer.quantization.tensor import exact_matmul


class Router(nnx.Module):
    """Scores `[N, E]`, selection by score + correction bias within the best groups (arXiv:2412.19437, eq. 12-16)."""

    def __init__(self, layers: int, hidden: int, config: MoEConfig, rngs: nnx.Rngs, dtype):
        self.config = config
        self.weight = parameter(rngs, dtype, ("layers", "embed", "router"), (layers, hidden, config.experts))
        self.bias = parameter(
            rngs, dtype, ("layers", "router"), (layers, config.experts), init="zeros", kind="float32"
        )

    def __call__(
        self, x: Float[Array, "N D"], layer: Int32[Array, ""]
    ) -> tuple[Int32[Array, "N K"], Float[Array, "N K"]]:
        """Experts of each token and their weights, float32."""
        config = self.config
        logits = exact_matmul(x, self.weight.get_value(), layer)
        scores = jax.nn.sigmoid(logits) if config.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        choice = scores + self.bias.get_value()[layer]
        if config.groups > 1:
            choice = jnp.where(_best_groups(choice, config), choice, -jnp.inf)
        _, experts = jax.lax.top_k(choice, config.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.renormalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, weights * config.scaling


def _best_groups(choice: Float[Array, "N E"], config: MoEConfig):
    """Mask of the experts in the `top_groups` groups; a group counts by the sum of its two best experts."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, config.groups, experts // config.groups)
    score = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
    _, best = jax.lax.top_k(score, config.top_groups)
    keep = jnp.zeros((tokens, config.groups), bool).at[jnp.arange(tokens)[:, None], best].set(True)
    return jnp.repeat(keep, experts // config.groups, axis=-1)
