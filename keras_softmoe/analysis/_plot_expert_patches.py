"""Figures of the patches that the experts of a block take, found in any data."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe import drawing
from keras_softmoe.analysis import _pictures as pictures
from keras_softmoe.analysis._inputs import backbone_of, check_block
from keras_softmoe.analysis._statistics import experts_of_tokens
from keras_softmoe.analysis._streaming import observe
from keras_softmoe.types import Figure

# Light blue, around the images.
_OUTSIDE = "#D6E9F5"
# So many experts are shown, and so many patches of each.
_MOST_EXPERTS = 8
_MOST_PATCHES = 10
_SIDE = 0.62


class ExpertPatches(NamedTuple):
    """The patches that each expert of a block takes with the largest weights.

    Attributes:
        layer: int, the block.
        share: `(E,)` float64 array, which part each expert takes of all patches that
            are taken.
        pictures: list of `E` arrays `(n, 3 h, 3 w, channels)` float32 in `[-1, 1]`, a
            patch of `h` by `w` pixels and what is around it, NaN outside the image.
        weights: list of `E` arrays `(n,)`, the weights of the expert's output, falling.
    """

    layer: int
    share: np.ndarray
    pictures: list
    weights: list


def plot_expert_patches(
    model: keras.Model,
    images: ArrayLike,
    layer: int | None = None,
    experts: Sequence | None = None,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> Figure:
    """Show the patches that experts take: those of one expert side by side.

    One row for each expert, with its share of all patches that are taken; in the row
    the patches that it takes with the largest weights, of an image one at most. Each
    patch is framed, with its neighbours around it (light blue outside the image) and
    its weight below.

    Args:
        model: `ViTMoEBackbone`, or a task that has one (its `preprocessor`, if any, is
            applied to the images).
        images: `(N, height, width, channels)` array; the more, the clearer what the
            patches of an expert have in common.
        layer: int, a block out of `moe_layers`. The first one if `None`.
        experts: sequence of experts to show. The 8 that take most if `None`.
        batch_size: int, images routed at a time.
        preprocessor: callable applied to the images. By default a task's own.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        ValueError: if the model is dense, the block is not one of its MoE blocks, an
            expert does not exist, or the images are not ones that the model takes.

    Source: the same for a LIMoE is in its appendix F.2 (figures 23 to 25).

    Examples:
        >>> figure = ksm.analysis.plot_expert_patches(sparse, images, layer=3)
        >>> figure.savefig("patches.png")
    """
    drawing.import_matplotlib()
    reducers = [PatchReducer(model, layer)]
    (found,) = observe(model, images, reducers, batch_size, preprocessor, verbose)
    return draw_expert_patches(found, experts)


class PatchReducer:
    """Reducer to the `ExpertPatches` of one block, see `observe`.

    Args:
        model: `ViTMoEBackbone`, or a task that has one.
        layer: int, a block out of `moe_layers`. The first one if `None`.

    Raises:
        ValueError: if the model is dense or the block is not one of its MoE blocks.
    """

    def __init__(self, model, layer=None):
        backbone, _ = backbone_of(model)
        self._layer = check_block(backbone, layer)
        self._grid = backbone.patch_grid
        self._num_tokens = backbone.output["sequence_output"].shape[1]
        num_experts = backbone.routers[self._layer].num_experts
        self._count = np.zeros(num_experts)
        # Pairs of weight and picture of each expert, the largest weight first.
        self._best = [[] for _ in range(num_experts)]

    def update(self, name, decision, inputs):
        if name != self._layer:
            return
        num_patches = self._grid[0] * self._grid[1]
        # (images, patches, E) each, without a class token and padding
        taken, weights = (
            x.reshape(-1, self._num_tokens, x.shape[-1])[: len(inputs), -num_patches:]
            for x in experts_of_tokens(decision)[:2]
        )
        self._count += taken.sum((0, 1))
        weights = np.where(taken, weights, -1.0)
        patches = weights.argmax(axis=1)
        for expert, best in enumerate(self._best):
            weight = weights[np.arange(len(inputs)), patches[:, expert], expert]
            for image in np.argsort(-weight, kind="stable")[:_MOST_PATCHES]:
                if weight[image] >= 0:
                    place = np.unravel_index(patches[image, expert], self._grid)
                    picture = _with_neighbours(inputs[image], place, self._grid)
                    best.append((weight[image], picture))
            best.sort(key=lambda pair: -pair[0])
            del best[_MOST_PATCHES:]

    def result(self):
        return ExpertPatches(
            self._layer,
            self._count / max(self._count.sum(), 1),
            [np.array([picture for _, picture in best]) for best in self._best],
            [np.array([weight for weight, _ in best]) for best in self._best],
        )


def draw_expert_patches(found, experts=None):
    """The figure of `plot_expert_patches`, of `ExpertPatches`."""
    count = len(found.share)
    if experts is None:
        experts = np.argsort(-found.share, kind="stable")[:_MOST_EXPERTS].tolist()
    experts = drawing.chosen_experts(experts, count)
    figure = drawing.new_figure(
        1.2 + _SIDE * _MOST_PATCHES, 0.6 + (_SIDE + 0.2) * len(experts)
    )
    axes = figure.subplots(len(experts), _MOST_PATCHES, squeeze=False)
    for row, expert in zip(axes, experts, strict=True):
        row[0].set_ylabel(
            f"expert {expert}\n{100 * found.share[expert]:.1f}%",
            fontsize=8,
            rotation=0,
            ha="right",
            va="center",
        )
        for index, ax in enumerate(row):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            if index < len(found.weights[expert]):
                _draw_patch(ax, found.pictures[expert][index])
                weight = found.weights[expert][index]
                ax.set_xlabel(f"{weight:.2f}", fontsize=6, labelpad=1)
    title = f"Patches that experts take with the largest weights, block {found.layer}"
    even = f"beside them, the expert's share of all patches (even: {100 / count:.3g}%)"
    figure.suptitle(f"{title}\n{even}", fontsize=9)
    return figure


def _with_neighbours(image, place, grid):
    """The patch at a place of the grid and the eight around it, NaN outside."""
    height, width = image.shape[0] // grid[0], image.shape[1] // grid[1]
    top, left = place[0] * height, place[1] * width
    around = ((height, height), (width, width), (0, 0))
    padded = np.pad(image, around, constant_values=np.nan)
    return padded[top : top + 3 * height, left : left + 3 * width]


def _draw_patch(ax, picture):
    height, width = picture.shape[0] // 3, picture.shape[1] // 3
    matplotlib = drawing.import_matplotlib()
    outside = np.isnan(picture).any(axis=-1)
    covered = np.ma.masked_where(~outside, outside)
    pictures.draw_picture(ax, np.nan_to_num(picture))
    colors = matplotlib.colors.ListedColormap([_OUTSIDE])
    pictures.draw_map(ax, picture, covered, cmap=colors)
    frame = matplotlib.patches.Rectangle(
        (width, height), width, height, fill=False, ec=drawing.PALETTE[1], lw=1.0
    )
    ax.add_patch(frame)
