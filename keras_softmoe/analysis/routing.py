"""`analyze`: statistics of all routers from one pass, and in the logs of training."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_softmoe.analysis import streaming
from keras_softmoe.analysis.blocks import BlockReducer, check_labels
from keras_softmoe.analysis.figures import FIGURES, draw
from keras_softmoe.analysis.maps import ExampleReducer, MapReducer, PatchReducer
from keras_softmoe.analysis.modalities import ModalityReducer, WordReducer
from keras_softmoe.analysis.report import name_of, text_of, write_report
from keras_softmoe.analysis.soft import SoftReducer
from keras_softmoe.checks import check_choice, check_whole_numbers
from keras_softmoe.evaluation.sweeps import keep_settings
from keras_softmoe.types import Data, Figure, Texts


class Routing(NamedTuple):
    """The routing of a model on some data, see `analyze`.

    Attributes:
        blocks: dict from each MoE block, as `observe` names it, to `BlockStatistics`.
        soft: dict from each block with a `SoftRouter` to `SoftStatistics`.
        modalities: dict to `ModalityStatistics`, for a LIMoE whose tokens choose.
        maps: dict from each block to `RoutingMaps` of some images or pairs.
        model: str, the name of the model.

    Examples:
        >>> routing = ksm.analysis.analyze(sparse, images)
        >>> {block: found.dropped for block, found in routing.blocks.items()}
        >>> figure = routing.plot("experts_per_image")
    """

    blocks: dict
    soft: dict
    modalities: dict
    maps: dict
    model: str

    def __repr__(self):
        return text_of(self)

    @property
    def figures(self) -> list:
        """List of str, the figures that can be drawn, see the table of figures."""
        return [
            name
            for name, row in FIGURES.items()
            if len(self._drawable(name)) >= row.least_blocks
        ]

    def plot(self, figure: str, blocks: Sequence | None = None, **options) -> Figure:
        """Draw a figure.

        Args:
            figure: str, one of `figures`.
            blocks: sequence of blocks, by default all that apply (or one, the first).
            **options: the options of the figure, see the table of figures.
        """
        check_choice("figure", figure, self.figures)
        found = self._drawable(figure)
        if blocks is None:
            blocks = list(found)
            blocks = blocks[:1] if FIGURES[figure].is_of_one_block else blocks
        blocks = list(blocks)
        if not blocks or any(block not in found for block in blocks):
            raise ValueError(
                f"The figure {figure!r} needs one or more of the blocks {list(found)}. "
                f"Received: blocks={blocks}."
            )
        return draw(figure, [found[block] for block in blocks], options)

    def save(
        self,
        path: str | os.PathLike,
        title: str | None = None,
        class_names: Sequence | None = None,
    ) -> Path:
        """Write a page with all figures: one HTML file, which needs no other.

        Args:
            path: str or path of the file, which is replaced when the page is complete.
            title: str, heading of the page. By default with the name of the model.
            class_names: optional sequence of str, names of the classes.

        Returns:
            `pathlib.Path` of the file.
        """
        return write_report(self, path, title, class_names)

    def _drawable(self, figure):
        """Return the statistics to which a figure applies, a dict from blocks."""
        row = FIGURES[figure]
        parts = getattr(self, row.part)
        return {block: found for block, found in parts.items() if row.applies(found)}


def analyze(
    model: keras.Model,
    data: Data = None,
    labels: ArrayLike | None = None,
    captions: Texts | None = None,
    tagger: Callable | None = None,
    num_pictures: int = 0,
    capacity_factors: Sequence = (),
    batch_size: int = 64,
    preprocessor: Callable | None = None,
    verbose: int = 1,
) -> Routing:
    """Count the routing decisions of a model, in one pass over data.

    All that applies to the model is counted: the load of experts, their work by place
    and class, the weights of soft routers, images and text of a LIMoE. Memory does not
    grow with the data. Images and captions that are given together compete for slots,
    as in training; either alone has the capacity for one modality.

    Args:
        model: as in `observe`.
        data: as in `observe`; for a LIMoE an array of images, or `None` for text alone.
        labels: optional `(N,)` int array, classes of the images, counted from 0.
        captions: for a LIMoE `N` str or `(N, S)` ints, or `None` for images alone.
        tagger: for a LIMoE, callable from a list of words to a list of their tags, such
            as `lambda words: [tag for _, tag in nltk.pos_tag(words)]`.
        num_pictures: int, how many of the first images or pairs (of one batch) to keep.
        capacity_factors: sequence of floats, to show patches that kept images discard.
        batch_size: int, inputs of an array at a time, of pairs whole groups.
        preprocessor: as in `observe`; without one, images are `[-1, 1]`, text is ids.
        verbose: 0 for silence, 1 for a progress bar, 2 for one line.

    Source: V-MoE, section 5 and appendices D and E; Soft MoE, section 3.6 and
    appendices B, E, H and I; LIMoE, appendices B.2, E.4, F and G.

    Examples:
        >>> routing = ksm.analysis.analyze(soft, images, labels, num_pictures=2)
        >>> {block: s.imbalance for block, s in routing.blocks.items()}
        >>> routing.soft[3].dispatch.needed(0.9)  # of 64 tokens
        >>> figure = routing.plot("tokens_per_slot")
        >>> routing.save("report.html")
    """
    check_whole_numbers(0, num_pictures=num_pictures)
    backbone, _ = streaming.backbone_of(model, preprocessor)
    routers = streaming.routers_of(backbone)
    if labels is not None and hasattr(data, "shape"):
        check_labels(len(data), labels)
    # A LIMoE routes images in pairs, too, unless they come in batches.
    is_array = data is None or hasattr(data, "shape")
    is_limoe, pairs = streaming.is_limoe(backbone), None
    if captions is not None or (is_limoe and is_array):
        pairs = streaming.Pairs(model, data, captions, preprocessor)
    if capacity_factors and (not num_pictures or is_limoe):
        raise ValueError(
            "`capacity_factors` needs `num_pictures` and a `ViTMoEBackbone`. Received: "
            f"num_pictures={num_pictures} with {type(backbone).__name__}."
        )
    for block, router in routers.items():
        if capacity_factors and "eval_capacity_factor" not in router.mutable_settings:
            raise ValueError(
                "`capacity_factors` needs routers with a capacity. Received: "
                f"block {block} with {type(router).__name__}."
            )
    reducers = _reducers(backbone, routers, labels, tagger, num_pictures, pairs)
    run = list(reducers.values())
    if pairs is None:
        results = streaming.observe(model, data, run, batch_size, preprocessor, verbose)
    else:
        results = pairs.observe(run, batch_size, verbose)
    found = dict(zip(reducers, results, strict=True))
    modalities = found.get("modalities", {})
    for block, words in found.get("words", {}).items():
        modalities[block] = modalities[block]._replace(words=words)
    maps = found.get("maps", {})
    for name in ("patches", "examples"):
        for block, kept in found.get(name, {}).items():
            maps[block] = maps[block]._replace(**{name: kept})
    if capacity_factors:
        _add_discarded(maps, backbone, capacity_factors)
    return Routing(found["blocks"], found["soft"], modalities, maps, name_of(model))


def _reducers(backbone, routers, labels, tagger, num_pictures, pairs):
    """Return a dict of the reducers that apply, by the parts of the result."""
    blocks = BlockReducer(backbone, routers, labels)
    reducers = {"blocks": blocks, "soft": SoftReducer(routers)}
    if pairs is not None and pairs.tokens_choose:
        reducers["modalities"] = ModalityReducer(pairs)
    if tagger is not None:
        if "modalities" not in reducers:
            raise ValueError(
                "`tagger` needs a LIMoE whose tokens choose experts. "
                f"Received: {type(backbone).__name__}."
            )
        reducers["words"] = WordReducer(pairs, tagger)
    if num_pictures:
        has_patches = hasattr(backbone, "patch_grid")
        if pairs is None and not (has_patches and streaming.tokens_per_input(backbone)):
            raise ValueError(
                "`num_pictures` needs a `ViTMoEBackbone` with images or a "
                "`LIMoEBackbone` with arrays of images and captions. Received: "
                f"num_pictures={num_pictures} with {type(backbone).__name__}."
            )
        reducers["maps"] = MapReducer(backbone, num_pictures, pairs)
        if pairs is None:
            choosing = [b for b, router in routers.items() if streaming.chooses(router)]
            reducers["patches"] = PatchReducer(backbone, choosing)
        elif pairs.tokens_choose:
            reducers["examples"] = ExampleReducer(pairs)
    return reducers


def _add_discarded(maps, backbone, capacity_factors):
    """Route the images of maps at other capacities, and add the discarded patches."""
    discarded = {block: {} for block in maps}
    images = next(iter(maps.values())).images
    with keep_settings(backbone):
        for factor in capacity_factors:
            # Not `capacity_factor`, which `eval_capacity_factor` may replace.
            backbone.set_routing(eval_capacity_factor=factor)
            reducers = [MapReducer(backbone, len(images))]
            (found,) = streaming.observe(backbone, [images], reducers, verbose=0)
            for block, at_factor in found.items():
                discarded[block][factor] = at_factor.main_experts < 0
    for block, found in discarded.items():
        maps[block] = maps[block]._replace(discarded=found)


class RoutingMonitor(keras.callbacks.Callback):
    """Callback that adds the routing of some data to the logs of each epoch.

    For each MoE block by its name in `analysis.observe`: `dispatch_sharpness_BLOCK` and
    `combine_sharpness_BLOCK` of a soft router, 1 if it does not route; `dropped_BLOCK`,
    `imbalance_BLOCK` and `demand_imbalance_BLOCK` of the others. For a LIMoE whose
    tokens choose experts, `usage` is measured, too.

    Args:
        data: as in `analyze`; a few hundred inputs are enough.
        captions: for a LIMoE, `N` str or `(N, sequence_length)` ints.
        every: int, steps between measurements of the usage; `None` for each epoch.
        last: int, how many of the last measurements of the usage are averaged.
        batch_size: int, inputs of an array at a time.
        preprocessor: as in `analysis.observe`.

    Source: Soft MoE, appendix E (figures 13 and 14); LIMoE, appendix E.4.

    Examples:
        >>> monitor = ksm.analysis.RoutingMonitor(images, captions, every=1)
        >>> limoe.fit(images, captions, epochs=1, callbacks=[monitor])
        >>> used = monitor.usage("text")
        >>> pruned = ksm.models.prune_experts(limoe, used, num_experts=4)
    """

    def __init__(
        self,
        data: Data = None,
        captions: Texts | None = None,
        every: int | None = None,
        last: int = 50,
        batch_size: int = 64,
        preprocessor: Callable | None = None,
    ):
        super().__init__()
        check_whole_numbers(1, last=last)
        if every is not None:
            check_whole_numbers(1, every=every)
        self.data, self.captions = data, captions
        self.every, self.last = every, last
        self.batch_size = batch_size
        self.preprocessor = preprocessor
        self._shares = deque(maxlen=last)

    def usage(self, modality: str | None) -> dict:
        """Return the mean share of a modality's tokens that each expert processes.

        `modality` is `"image"` or `"text"`. Returns a dict of `(E,)` arrays by block.
        """
        blocks = self._shares[0] if self._shares else {}
        measured = next(iter(blocks.values()), {})
        if modality not in measured:
            raise ValueError(
                "There is a usage of modalities that were measured in a training: "
                f"{list(measured)}. Received: modality={modality!r}."
            )
        return {
            block: np.mean([shares[block][modality] for shares in self._shares], axis=0)
            for block in blocks
        }

    def on_train_begin(self, logs=None):
        self._shares.clear()
        self._steps = 0
        # Fail before training starts.
        if self.model.built:
            self._analyzed()

    def on_epoch_begin(self, epoch, logs=None):
        self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        # With several steps in an execution `batch` is the last of them.
        before, self._steps = self._steps, self._steps + batch + 1 - self._batches
        self._batches = batch + 1
        if self.every and before // self.every != self._steps // self.every:
            self._note_usage(self._analyzed().modalities)

    def on_epoch_end(self, epoch, logs=None):
        routing = self._analyzed()
        if self.every is None:
            self._note_usage(routing.modalities)
        if logs is None:
            return
        for block, statistics in routing.soft.items():
            logs[f"dispatch_sharpness_{block}"] = statistics.dispatch_sharpness
            logs[f"combine_sharpness_{block}"] = statistics.combine_sharpness
        for block, statistics in routing.blocks.items():
            if block not in routing.soft:
                logs[f"dropped_{block}"] = statistics.dropped
                logs[f"imbalance_{block}"] = statistics.imbalance
                if statistics.demand is not None:
                    logs[f"demand_imbalance_{block}"] = statistics.demand_imbalance

    def _analyzed(self):
        return analyze(
            self.model,
            self.data,
            captions=self.captions,
            batch_size=self.batch_size,
            preprocessor=self.preprocessor,
            verbose=0,
        )

    def _note_usage(self, modalities):
        if modalities:
            self._shares.append(
                {
                    block: {m: s.assigned[m] / s.num_tokens[m] for m in s.num_tokens}
                    for block, s in modalities.items()
                }
            )
