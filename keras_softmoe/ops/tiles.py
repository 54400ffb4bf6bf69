"""Rows sorted by expert, padded to tiles of one size, for JAX on GPUs of NVIDIA."""

from keras_softmoe.ops.kernels import compiled_on_jax

# The fewest rows in a tile, those of the GPU's own products of matrices
_FEWEST = 16


def chain(stages, x, weights):
    """Return the list of results of consecutive stages."""
    results = []
    for stage, of_stage in zip(stages, weights, strict=True):
        x = stage(x, *of_stage)
        results.append(x)
    return results


@compiled_on_jax("stages")
def in_tiles(rows, weights, count, stages):
    """`map_experts` on GPUs of NVIDIA, where `ragged_dot` multiplies too much.

    XLA expands `ragged_dot` to products of all rows by all kernels there: always up to
    jaxlib 0.10.2 (marin-community/marin#7012), and for the gradients of kernels and in
    float32 after it (openxla/xla#40189). Here each expert's rows are padded to whole
    tiles, and each tile is multiplied by a copy of its expert's kernel. With at least
    16 rows per expert these are at most twice the products, whatever the counts, and
    three copies of the kernels.
    """
    import jax
    from jax import numpy as jnp

    num_rows, num_experts = rows.shape[0], count.shape[0]
    if num_rows == 0:
        first = jax.tree.map(lambda weight: weight[:1], weights)
        return chain(stages, rows[None], first)[-1][0]
    size = max(_FEWEST, 1 << (num_rows // num_experts).bit_length() >> 1)
    num_tiles = num_rows // size + num_experts

    ends = jnp.cumsum(count)
    tiles = (count + size - 1) // size
    end_tiles = jnp.cumsum(tiles)
    # A row of an expert is its place in the tiles plus this.
    shift = ends - count - (end_tiles - tiles) * size

    def expert_of(ends, number):
        found = jnp.searchsorted(ends, jnp.arange(number), side="right")
        return jnp.minimum(found, num_experts - 1)

    expert = expert_of(end_tiles, num_tiles)
    # (tiles, size)
    row = jnp.arange(num_tiles * size).reshape(num_tiles, size) + shift[expert, None]
    row = jnp.where(row < ends[expert, None], row, num_rows)
    x = rows.at[row].get(mode="fill", fill_value=0)
    own = jax.tree.map(
        lambda weight: weight.at[expert].get(indices_are_sorted=True), weights
    )
    results = chain(stages, x, own)[-1]
    place = jnp.arange(num_rows) - shift[expert_of(ends, num_rows)]
    return results.reshape(num_tiles * size, -1)[place]
