"""Embeddings of images, texts and positions, and learned tokens."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_softmoe.checks import check_choice, check_whole_numbers, pair
from keras_softmoe.keras_adapter.layers import Layer
from keras_softmoe.ops import position
from keras_softmoe.ops.kernels import patches, reshape
from keras_softmoe.ops.numbers import Constant
from keras_softmoe.types import Tensor

POSITION_EMBEDDINGS = ("learned", "sincos2d", "none")


@keras.saving.register_keras_serializable(package="keras_softmoe")
class PatchEmbedding(Layer):
    """Split images into patches and project each to a token.

    Args:
        patch_size: int or `(height, width)` of a patch in pixels.
        hidden_dim: int, width `D` of a token.
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps `(B, height, width, channels)` images, channels last regardless of
    `keras.config.image_data_format()`, to `(B, S, D)` tokens, row by row.

    Raises:
        ValueError: if a size is not a positive integer.

    Source: Dosovitskiy et al. 2021, section 3.1.

    Examples:
        >>> layer = ksm.layers.PatchEmbedding(patch_size=8, hidden_dim=32)
        >>> layer(np.zeros((2, 32, 32, 3))).shape
        (2, 16, 32)
    """

    config_arguments = ("patch_size", "hidden_dim")

    def __init__(self, patch_size: int | Sequence[int], hidden_dim: int, **kwargs):
        check_whole_numbers(1, hidden_dim=hidden_dim)
        super().__init__(**kwargs)
        patch_size = pair(patch_size)
        self.keep_arguments(locals())
        self.projection = keras.layers.Conv2D(
            hidden_dim,
            kernel_size=patch_size,
            strides=patch_size,
            padding="valid",
            data_format="channels_last",
            kernel_initializer="lecun_normal",
            dtype=self.dtype_policy,
            name="projection",
        )

    def build(self, images_shape):
        self.projection.build(images_shape)

    def call(self, images):
        # Patches do not overlap: a convolution is one product each, row by row.
        # (B, rows, columns, D)
        grid = patches(images, self.projection.kernel, self.projection.bias)
        _, rows, columns, width = grid.shape
        return reshape(grid, (-1, rows * columns, width))

    def compute_output_shape(self, images_shape):
        batch, rows, columns, width = self.projection.compute_output_shape(images_shape)
        return (batch, rows * columns, width)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class PositionEmbedding(Layer):
    """Add to each token an embedding of its position in the image.

    Weights of another grid of patches are resampled on loading, for other resolutions.

    Args:
        grid: `(rows, columns)` of patches, or an int for both.
        kind: `"learned"` (for each token) or `"sincos2d"` (fixed, for patches only).
        has_class_token: bool, whether the first is a class token, never resampled.
        resampling: method of resampling weights: `"bilinear"` with aligned corners
            (V-MoE, original ViT, big_vision), `"bicubic"` with `a = -0.75` (PyTorch's
            `interpolate`, `transformers`), or `"bicubic_antialias"` with `a = -0.5` and
            a kernel that is wider for smaller grids (`timm`).
        **kwargs: `name`, `trainable` and `dtype`, as in `keras.layers.Layer`.

    Maps `(B, S, D)` to `(B, S, D)`.

    Raises:
        ValueError: if the number of tokens does not fit the grid, an argument is not
            among the accepted values, or saved weights have another width.

    Source: V-MoE, section 4.4 (resolution); Soft MoE, released code (`sincos2d`).

    Examples:
        >>> layer = ksm.layers.PositionEmbedding(grid=(4, 4), kind="sincos2d")
        >>> layer(np.zeros((2, 16, 32))).shape
        (2, 16, 32)
    """

    config_arguments = ("grid", "kind", "has_class_token", "resampling")

    def __init__(
        self,
        grid: int | Sequence[int],
        kind: str = "learned",
        has_class_token: bool = False,
        resampling: str = "bilinear",
        **kwargs,
    ):
        check_choice("resampling", resampling, position.RESAMPLINGS)
        super().__init__(**kwargs)
        check_choice("kind", kind, POSITION_EMBEDDINGS[:2])
        grid = pair(grid, "grid")
        self.keep_arguments(locals())

    def build(self, tokens_shape):
        _, num_tokens, width = tokens_shape
        rows, columns = self.grid
        if num_tokens != rows * columns + self.has_class_token:
            raise ValueError(
                f"A grid of {rows} x {columns} patches has not {num_tokens} tokens. "
                f"Received: tokens_shape={tokens_shape}, grid={self.grid}, "
                f"has_class_token={self.has_class_token}."
            )
        if self.kind == "sincos2d":
            table = position.sincos_2d_table(rows, columns, width)
            # (1, S, D), zero for the class token
            table = np.pad(table, ((int(self.has_class_token), 0), (0, 0)))[None]
            self._table = Constant(table)
        else:
            self.embedding = self.add_weight(
                shape=(1, num_tokens, width),
                initializer=keras.initializers.RandomNormal(stddev=0.02),
                name="embedding",
            )

    def call(self, tokens):
        is_fixed = self.kind == "sincos2d"
        table = self._table.on(tokens) if is_fixed else self.embedding
        return tokens + ops.cast(table, tokens.dtype)

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.kind == "learned":
            # The number of tokens is the same for 2 x 8 and 4 x 4 patches.
            store["grid"] = np.asarray(self.grid, "int32")

    def load_own_variables(self, store):
        # A fixed table is computed for the grid; a learned one fits its own grid only.
        if self.kind == "sincos2d":
            return
        table = np.asarray(store["0"])
        self.embedding.assign(self.resample(table, tuple(np.asarray(store["grid"]))))

    def resample(self, table: ArrayLike, grid: Sequence[int] | None = None) -> Tensor:
        """Resample a `(1, S', D)` table of another grid to the grid of this layer.

        Args:
            table: `(1, S', D)` array of learned position embeddings (and class token).
            grid: `(rows, columns)` of the table. A square if `None`.
        """
        first = int(self.has_class_token)
        if grid is None:
            # Tables of other libraries do not say their grid.
            side = round((table.shape[1] - first) ** 0.5)
            grid = (side, side)
        num_tokens, width = grid[0] * grid[1] + first, self.embedding.shape[-1]
        if table.shape != (1, num_tokens, width):
            raise ValueError(
                "These position embeddings do not fit the model. Expected shape "
                f"{(1, num_tokens, width)} for a grid of {grid[0]} x {grid[1]} patches"
                f"{' and a class token' if first else ''}. Received: "
                f"shape={table.shape}."
            )
        if tuple(grid) == self.grid:
            return table
        # The class token has no place in the image: only patches are resampled.
        patches = np.reshape(table[:, first:], (*grid, width))
        patches = position.resample_position_grid(patches, *self.grid, self.resampling)
        patches = reshape(patches, (-1, width))
        others = ops.convert_to_tensor(table[:, :first])
        return ops.concatenate([others, patches[None]], axis=1)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class TokenEmbedding(Layer):
    """Embed the tokens of a text and add learned position embeddings.

    Ids `(B, sequence_length)` become `(B, sequence_length, output_dim)` tokens. With
    `mask_padding`, padding (id 0) is masked for the layers that follow, as by
    `keras.layers.Embedding(mask_zero=True)`; else it is an ordinary token.

    Source: LIMoE, section 2; initial weights: Soft MoE's released code (two towers).
    """

    config_arguments = (
        *("vocabulary_size", "sequence_length", "output_dim", "mask_padding"),
    )

    def __init__(
        self,
        vocabulary_size: int,
        sequence_length: int,
        output_dim: int,
        mask_padding: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_whole_numbers(
            1,
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            output_dim=output_dim,
        )
        self.keep_arguments(locals())
        self.supports_masking = mask_padding
        initial = keras.initializers.RandomNormal(stddev=output_dim**-0.5)
        self.token_embedding = keras.layers.Embedding(
            vocabulary_size,
            output_dim,
            embeddings_initializer=initial,
            dtype=self.dtype_policy,
            name="token_embedding",
        )

    def build(self, token_ids_shape):
        if token_ids_shape[-1] != self.sequence_length:
            raise ValueError(
                f"The texts must have {self.sequence_length} tokens. Received: "
                f"token_ids_shape={token_ids_shape}."
            )
        self.token_embedding.build(token_ids_shape)
        self.position_embedding = self.add_weight(
            shape=(1, self.sequence_length, self.output_dim),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="position_embedding",
        )

    def call(self, token_ids):
        # Position embeddings are float32 weights and follow the compute dtype.
        tokens = self.token_embedding(token_ids)
        return tokens + ops.cast(self.position_embedding, tokens.dtype)

    def compute_mask(self, token_ids, previous_mask=None):
        """Return a `(B, S)` bool mask, `False` for padding; `None` without masking."""
        return ops.not_equal(token_ids, 0) if self.mask_padding else None

    def compute_output_shape(self, token_ids_shape):
        return (*token_ids_shape, self.output_dim)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class ClassToken(Layer):
    """Prepend a learned token to the others.

    Maps `(B, S, D)` to `(B, S + 1, D)`.

    Source: Dosovitskiy et al. 2021, section 3.1.

    Examples:
        >>> ksm.layers.ClassToken()(np.zeros((2, 16, 32))).shape
        (2, 17, 32)
    """

    def build(self, tokens_shape):
        self.class_token = self.add_weight(
            shape=(1, 1, tokens_shape[-1]), initializer="zeros", name="class_token"
        )

    def call(self, tokens):
        token = ops.cast(self.class_token, tokens.dtype)
        # Broadcast without the batch size, which may be unknown.
        token = token + ops.zeros_like(tokens[:, :1])
        return ops.concatenate([token, tokens], axis=1)

    def compute_output_shape(self, tokens_shape):
        batch, num_tokens, width = tokens_shape
        return (batch, num_tokens + 1, width)


@keras.saving.register_keras_serializable(package="keras_softmoe")
class Registers(Layer):
    """Insert learned tokens that belong to no patch before the patches.

    For registers and DeiT's distillation token. They include position embeddings.
    Tokens `(B, S, D)` become `(B, S + num_registers, D)`; a class token remains first.

    Source: Darcet et al. 2024 (registers), section 2.2; Touvron et al. 2021, section 4.
    """

    config_arguments = ("num_registers", "has_class_token")

    def __init__(self, num_registers: int, has_class_token: bool = False, **kwargs):
        check_whole_numbers(1, num_registers=num_registers)
        super().__init__(**kwargs)
        num_registers = int(num_registers)
        self.keep_arguments(locals())

    def build(self, tokens_shape):
        self.registers = self.add_weight(
            shape=(1, self.num_registers, tokens_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="registers",
        )

    def call(self, tokens):
        # After the class token, which stays the first, and before the patches
        first = int(self.has_class_token)
        registers = ops.cast(self.registers, tokens.dtype)
        # Broadcast without the batch size, which may be unknown.
        registers = registers + ops.zeros_like(tokens[:, :1])
        parts = [tokens[:, :first], registers, tokens[:, first:]]
        return ops.concatenate(parts[1 - first :], axis=1)

    def compute_output_shape(self, tokens_shape):
        batch, num_tokens, width = tokens_shape
        return (batch, num_tokens + self.num_registers, width)
