"""Models whose routers have settings that may change after they are compiled."""

import contextlib
import threading
import warnings
from types import SimpleNamespace

import keras
import numpy as np

from keras_softmoe.architecture import moe_layers_of
from keras_softmoe.checks import is_whole_number, quote, received
from keras_softmoe.keras_adapter import runs
from keras_softmoe.routers.recording import is_recording
from keras_softmoe.routers.scores import DROPLESS
from keras_softmoe.sharding.constraints import check_placement
from keras_softmoe.sharding.variables import gather_rows, is_sharded, num_processes

# Held while settings change and while a step is compiled: otherwise the second of two
# threads that start a run after a change would get the old step.
_lock = threading.RLock()


class MutableRouting:
    """Mixin of models that recompile after settings of their routers have changed.

    A compiled step has the settings of its routers built in, their groups, and the
    weights. A subclass has `routers`, a dict from blocks, and is decorated with
    `recompile_on_change`. (KerasHub takes the first base of a task for its kind, so the
    mixin comes last and cannot override Keras' methods.)
    """

    # Settings that each step was compiled with, untracked by Keras, unlike a dict.
    _compiled_settings = None

    def set_routing(self, layers=None, **settings):
        """Change settings of the routers, for the next `predict`, `fit` or `evaluate`.

        Threads that share a model need a lock around `set_routing` and the next call.

        Args:
            layers: int or sequence of int, the MoE blocks to change, `None` for all.
            **settings: new values: `capacity_factor`, `eval_capacity_factor` and
                `random_logits` of sparse routers; `num_selected_experts`, `priority`,
                `keep_fraction` and `normalize_gates` if tokens choose;
                `single_modality_capacity_factor` of LIMoE's. `capacity_factor` alone is
                also that of predictions which had none (`"dropless"`). And of all
                blocks at once `group_images`, see `layers.MoE`.

        Raises:
            ValueError: if a block has no router, a router has no such setting, or a
                value is not accepted. The model is then unchanged.

        Source: V-MoE, sections 2.4 and 4, appendices E.3, E.4, E.7; LIMoE, E.5.

        Examples:
            >>> name = "vmoe_tiny_patch8_8e_32_icons"
            >>> model = ksm.models.ViTMoEImageClassifier.from_preset(name)
            >>> model.set_routing(priority="max", capacity_factor=0.5)
        """
        routers, is_for_all = self.routers, layers is None
        layers = routers if is_for_all else layers
        is_one = isinstance(layers, str) or not np.iterable(layers)
        layers = [layers] if is_one else list(layers)
        # Blocks of two towers have names.
        known = [i for i in layers if isinstance(i, str) or is_whole_number(i, 0)]
        if len(known) < len(layers) or not set(known) <= routers.keys():
            raise ValueError(
                f"`layers` must be among {sorted(routers)}. {received(layers=layers)}"
            )
        if settings and not routers:
            raise ValueError(
                f"A dense model has no routers. Received: {', '.join(settings)}."
            )
        if not settings:
            # Most calls of `from_preset` have none: make no routers for them.
            return
        groups = {n: settings.pop(n) for n in ("group_images",) if n in settings}
        found = {getattr(routers[i], "eval_capacity_factor", None) for i in layers}
        if "capacity_factor" in settings and found == {DROPLESS}:
            settings.setdefault("eval_capacity_factor", None)
        if groups and not is_for_all:
            raise ValueError(
                "`group_images` is one number for all MoE blocks of a model. Received: "
                f"layers={layers}, group_images={groups['group_images']!r}."
            )
        # Check all values before any router changes.
        chosen = [routers[index] for index in layers]
        changed = {id(router): router.with_settings(**settings) for router in chosen}
        mixtures = moe_layers_of(self) if groups else []
        for layer in mixtures:
            layer.check_group_images(router=changed.get(id(layer.router)), **groups)
        with _lock:
            before = self._current_settings()
            for router in chosen:
                router.update(**settings)
            for layer in mixtures:
                layer.group_images = groups["group_images"]
            if self._current_settings() != before:
                # Another thread may be compiling a step with the old settings.
                self._compiled_settings = None

    def _current_settings(self):
        """Return all that a compiled step has built in, to be compared."""
        layers = moe_layers_of(self)
        routing = [(layer.group_images, layer.router.get_config()) for layer in layers]
        return routing, [(weight.path, weight.dtype) for weight in self.weights]


def recompile_on_change(cls):
    """Class decorator: check a model before each run, and recompile after changes."""
    runs.wrap_compilation(cls, _compile_if_changed)
    return cls


@contextlib.contextmanager
def _compile_if_changed(model, step):
    """Yield whether the settings have changed since a step was compiled."""
    _check_run(model, step)
    with _lock:
        if model._compiled_settings is None:
            names = ("train", "test", "predict")
            model._compiled_settings = SimpleNamespace(**dict.fromkeys(names))
        now = model._current_settings()
        yield getattr(model._compiled_settings, step) != now
        setattr(model._compiled_settings, step, now)
    if step == "predict" and num_processes() > 1:
        runs.map_predictions(model, gather_rows)


def _check_run(model, step):
    """Check open scopes of `record`, the optimizer and the distribution of a model."""
    backend, is_compiled = keras.backend.backend(), not model.run_eagerly
    if backend == "jax":
        # Gradients are always traced.
        is_compiled = step == "train" or (model.jit_compile and is_compiled)
    if is_recording() and is_compiled and backend != "torch":
        method = {"train": "fit", "test": "evaluate", "predict": "predict"}[step]
        raise ValueError(
            f"A scope of `routers.record` records nothing of `{method}`, which runs a "
            f"function compiled by {backend}: call the model itself, "
            "`model(inputs)`, in the scope, or compile it with `run_eagerly=True` for "
            f"`evaluate` and `predict`. Received: model={model.name!r}."
        )
    if step == "train":
        _check_optimizer(model)
    distribution = keras.distribution.distribution()
    if distribution is not None:
        check_placement("check_model", model)
    if isinstance(distribution, keras.distribution.ModelParallel):
        return
    sharded = next((v.path for v in model.variables if is_sharded(v)), None)
    if sharded is not None:
        warnings.warn(
            "This model is sharded over devices, but no distribution that shards "
            "models is active: every step gathers the weights of all experts. "
            "Use the one it was built in (`keras.distribution.set_distribution`). "
            f"Received: {sharded!r}, distribution={distribution}.",
            stacklevel=6,
        )


def _check_optimizer(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    steps = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    for router in getattr(model, "routers", {}).values():
        moves = getattr(router, "bias_update_rate", None) is not None
        if moves and router.trainable and router.bias_update_every != steps:
            raise ValueError(
                "The bias of a router moves once for each step of the optimizer. "
                f"Received: bias_update_every={router.bias_update_every} of "
                f"{router.path!r}, gradient_accumulation_steps={steps} of the "
                "optimizer."
            )
    if optimizer is None or not optimizer.built:
        return
    # Keras would fail in the middle of a step, or go on training what was frozen.
    now = {id(v): v.path for v in model.trainable_variables}
    before = {id(v): v.path for v in runs.variables_of(optimizer)}
    one_sided = now.keys() ^ before.keys()
    changed = [path for i, path in (now | before).items() if i in one_sided]
    if changed:
        raise ValueError(
            "Weights were frozen, unfrozen or replaced since the optimizer was built: "
            "call `compile` again, with a new optimizer. Received: the model "
            f"{model.name!r}, changed in {quote(changed[:3])}."
        )
