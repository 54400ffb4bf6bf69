"""How near routing weights come to one-hot vectors, model by model."""

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np

from keras_softmoe.analysis._soft_statistics import soft_statistics
from keras_softmoe.types import Data


class PeakSweep(NamedTuple):
    """The largest weights of Soft MoEs that differ in one number.

    `M` modes (normalized logits or not), `V` values of the number, `R` seeds, `L`
    blocks.

    Attributes:
        values: `(V,)` array, the numbers: widths, or learning rates.
        normalize: `(M,)` bool array, whether the logits are normalized.
        blocks: tuple of the `L` blocks, as `soft_statistics` names them.
        dispatch: `(M, V, R, L)` float64 array, the mean over slots of the largest
            dispatch weight.
        combine: `(M, V, R, L)` float64 array, the mean over tokens of the largest
            combine weight.
        scores: `(M, V, R)` float64 array, what `score` returned for each model.
            `None` without it.
    """

    values: np.ndarray
    normalize: np.ndarray
    blocks: tuple
    dispatch: np.ndarray
    combine: np.ndarray
    scores: np.ndarray | None


def peak_sweep(
    make_model: Callable,
    values: Sequence,
    data: Data,
    normalize: Sequence = (True, False),
    seeds: int = 1,
    score: Callable | None = None,
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> PeakSweep:
    """Measure the largest routing weights of models that differ in one number.

    Without the normalization of tokens and slots, the softmax of wide models collapses:
    a slot takes in a single token. This makes model after model, with and without it,
    and keeps of each only what was measured.

    Args:
        make_model: callable from `(value, normalize, seed)` to a model as
            `soft_statistics` takes it, trained or not. `normalize` is for its
            `SoftRouter`, the value its width, or the learning rate of its training. All
            models have as many blocks.
        values: sequence of different numbers.
        data: as in `soft_statistics`, but not an iterator, which could be read once
            only.
        normalize: sequence of bool, the modes to compare.
        seeds: int, models for each value and mode (seeds 0, 1, ...).
        score: optional callable from a model to a number, such as its accuracy.
        batch_size: int, inputs of an array at a time.
        preprocessor: as in `soft_statistics`.
        verbose: 0 for silence, 1 for a progress bar over the models, 2 for one line.

    Returns:
        `PeakSweep`.

    Raises:
        ValueError: if there is nothing to sweep, `data` can be read only once, the
            models differ in their number of blocks, or `soft_statistics` refuses one.

    Source: Soft MoE, appendix E (figures 13 and 14).

    Examples:
        >>> def trained(width, normalize, seed):
        ...     keras.utils.set_random_seed(seed)
        ...     router = ksm.routers.SoftRouter(4, normalize=normalize)
        ...     backbone = ksm.models.ViTMoEBackbone(
        ...         (32, 32, 3),
        ...         16,
        ...         num_layers=1,
        ...         num_heads=2,
        ...         hidden_dim=width,
        ...         mlp_dim=width,
        ...         moe_layers=(0,),
        ...         router=router,
        ...     )
        ...     # model.fit(...) comes here
        ...     return backbone
        >>> sweep = ksm.analysis.peak_sweep(
        ...     trained, (8, 16), images / 127.5 - 1, seeds=1
        ... )
        >>> sweep.dispatch.mean(axis=(2, 3)).shape
        (2, 2)
    """
    values, normalize = np.asarray(values), np.asarray(normalize, bool)
    shape = (normalize.size, values.size, seeds)
    if values.ndim != 1 or len(set(values.tolist())) < values.size or 0 in shape:
        raise ValueError(
            "Give at least one number, all different, one mode of normalization and "
            f"one seed. Received: values={values.tolist()}, "
            f"normalize={normalize.tolist()}, seeds={seeds}."
        )
    if hasattr(data, "__next__"):
        raise ValueError(
            "Each model sees the same data, and an iterator can be read only once. "
            "Pass an array, or a list of its batches. "
            f"Received: data={data!r:.200}."
        )
    scores = None if score is None else np.empty(shape)
    bar = keras.utils.Progbar(np.prod(shape), verbose=verbose, unit_name="model")
    blocks, peaks = None, {}
    for done, place in enumerate(np.ndindex(shape), start=1):
        mode, index, seed = place
        model = make_model(values[index].item(), bool(normalize[mode]), seed)
        statistics = soft_statistics(model, data, batch_size, preprocessor, verbose=0)
        # By their number: Keras counts on when it names the layers of the next model.
        blocks = tuple(statistics) if blocks is None else blocks
        if len(blocks) != len(statistics):
            raise ValueError(
                "All models must have as many blocks with soft routers. Received: "
                f"blocks {blocks} of the first one, then {tuple(statistics)} at "
                f"{values[index]}."
            )
        peaks[place] = [(s.dispatch_peak, s.combine_peak) for s in statistics.values()]
        if score is not None:
            scores[place] = score(model)
        # Models refer to themselves, and the next one needs the room.
        del model, statistics
        gc.collect()
        bar.update(done)
    # (M, V, R, L, 2)
    found = np.array(list(peaks.values())).reshape(*shape, len(blocks), 2)
    return PeakSweep(values, normalize, blocks, found[..., 0], found[..., 1], scores)
