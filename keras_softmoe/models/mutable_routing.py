"""Models whose routers have settings that may change after they are compiled."""

import threading
import warnings
from types import SimpleNamespace

import keras
import numpy as np

from keras_softmoe.architecture import moe_layers_of
from keras_softmoe.checks import is_whole_number, quote
from keras_softmoe.keras_adapter.optimizers import variables_of
from keras_softmoe.keras_adapter.runs import map_predictions, wrap_compilation
from keras_softmoe.routers.recording import is_recording
from keras_softmoe.sharding.constraints import check_model
from keras_softmoe.sharding.variables import gather_rows, is_sharded, num_processes

# Held while settings change and while a step is compiled: otherwise the second of two
# threads that start a run after a change would get the old step.
_lock = threading.RLock()


class MutableRouting:
    """Mixin of models that recompile after settings of their routers have changed.

    A compiled `predict`, `fit` or `evaluate` has the settings of its routers built in,
    the groups in which they route, and the weights (others after a part of the model
    was quantized or given LoRA factors). Before each call the model compares them with
    the current ones. A model of another class around ours does not: compile it again.

    A subclass has `routers`, a dict from the index of a block to its router, and is
    decorated with `recompile_on_change`. (KerasHub takes the first base of a task for
    the kind of task, so the mixin comes last and cannot override Keras' methods.)
    """

    # Settings that each step was compiled with. In an object that Keras does not track:
    # a dict would become part of the model.
    _compiled_settings = None

    def set_routing(self, layers=None, **settings):
        """Change settings of the routers, for the next `predict`, `fit` or `evaluate`.

        Args:
            layers: int or sequence of int, the MoE blocks to change, counted as in
                `moe_layers`. `None`: all.
            **settings: new values: `capacity_factor`, `eval_capacity_factor` and
                `random_logits` of all sparse routers; `num_selected_experts` and
                `priority` of those in which tokens choose, of all but LIMoE's also
                `keep_fraction` and `normalize_gates`;
                `single_modality_capacity_factor` of LIMoE's. And of all blocks at once
                `group_images`, the images (or pairs) that are routed together, see
                `layers.MoE`.

        Settings belong to the model, not to a call. If threads share a model, a call
        that runs while another thread changes settings may use the old ones, the new
        ones, or both in different blocks. Give each thread its own model, or guard
        `set_routing` and the call after it by one lock. (On JAX `evaluate` and
        `predict` of one model in several threads take turns, and are refused during
        `fit`.)

        Raises:
            ValueError: if a block has no router, a router has no such setting, a value
                is not accepted, or `group_images` is to change in some blocks only. The
                model is then unchanged.

        Source: V-MoE, sections 2.4 and 4 and appendix E.4: `K` and `C` may differ from
        those in training, "layer-wise" too (appendix E.3). Groups: V-MoE, appendix E.7;
        LIMoE, appendix E.5.

        Examples:
            >>> model = ksm.models.ViTMoEImageClassifier.from_preset(
            ...     "vmoe_tiny_patch4_16e_32_glyphs"
            ... )
            >>> model.set_routing(priority="max", capacity_factor=0.5)
            >>> model.set_routing(layers=[3], num_selected_experts=2)
            >>> model.set_routing(group_images=8)
        """
        routers, chosen = self.routers, layers
        if layers is None:
            layers = routers
        is_one = isinstance(layers, str) or not np.iterable(layers)
        layers = [layers] if is_one else list(layers)
        # Of two towers a block is named by a str.
        known = [i for i in layers if isinstance(i, str) or is_whole_number(i, 0)]
        wrong = len(known) < len(layers) or not set(known) <= routers.keys()
        if wrong:
            raise ValueError(
                "`layers` names blocks without a router. The MoE blocks are "
                f"{sorted(routers)}. Received: layers={quote(layers)}. Name some of "
                "them, or leave `layers` out."
            )
        if settings and not routers:
            raise ValueError(
                "A dense model has no routers to set. Received: "
                f"{', '.join(settings)}. Leave these settings out."
            )
        if not settings:
            # Most calls of `from_preset` have none: make no routers for them.
            return
        groups = {n: settings.pop(n) for n in ("group_images",) if n in settings}
        if groups and chosen is not None:
            raise ValueError(
                "`group_images` is one number for all MoE blocks of a model. Received: "
                f"layers={layers}, group_images={groups['group_images']!r}. Leave "
                "`layers` out, and set other settings of single blocks in another call."
            )
        # Check all values before any router changes.
        changed = {
            id(routers[index]): routers[index].with_settings(**settings)
            for index in layers
        }
        mixtures = moe_layers_of(self) if groups else []
        for layer in mixtures:
            layer.check_group_images(router=changed.get(id(layer.router)), **groups)
        with _lock:
            before = self._current_settings()
            for index in layers:
                routers[index].update(**settings)
            for layer in mixtures:
                layer.group_images = groups["group_images"]
            if self._current_settings() != before:
                # Another thread may be compiling a step with the old settings.
                self._compiled_settings = None

    def _settings_changed(self, step):
        """Whether settings have changed since the step was compiled."""
        if self._compiled_settings is None:
            self._compiled_settings = SimpleNamespace(
                train=None, test=None, predict=None
            )
        now = self._current_settings()
        changed = getattr(self._compiled_settings, step) != now
        setattr(self._compiled_settings, step, now)
        return changed

    def _current_settings(self):
        return (
            {index: router.get_config() for index, router in self.routers.items()},
            [layer.group_images for layer in moe_layers_of(self)],
            [(weight.path, weight.dtype) for weight in self.weights],
        )


def recompile_on_change(cls):
    """Class decorator: check a model before each run, and recompile after changes."""
    wrap_compilation(cls, _compile_if_changed)
    return cls


def _compile_if_changed(model, step, make):
    check_run(model, step)
    with _lock:
        made = make(model._settings_changed(step))
    if step == "predict" and num_processes() > 1:
        map_predictions(model, gather_rows)
    return made


# === Checks before each run ===


def check_run(model, step):
    """Check open scopes of `record` and the distribution of a model before a run.

    Args:
        model: `keras.Model`.
        step: `"train"`, `"test"` or `"predict"`.

    Raises:
        ValueError: if a scope of `routers.record` is open around a compiled step,
            variables do not lie where the active distribution says, the biases of
            routers would not move with the steps of the optimizer, or that was built
            for other variables.
    """
    _check_recording(model, step)
    if step == "train":
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        _check_accumulation(model, optimizer)
        if optimizer is not None and optimizer.built:
            _check_trained_variables(model, variables_of(optimizer))
    check_model(model)
    _warn_if_not_distributed(model)


def _check_recording(model, step):
    if not is_recording() or not _is_traced(model, step):
        return
    method = {"train": "fit", "test": "evaluate", "predict": "predict"}[step]
    raise ValueError(
        f"A scope of `routers.record` records nothing of `{method}`, which runs a "
        f"function compiled by {keras.backend.backend()}. Call the model itself, "
        "`model(inputs)`, in the scope, or compile it with `run_eagerly=True` for "
        f"`evaluate` and `predict`. Received: a scope that is open around `{method}` "
        f"of the model {model.name!r}."
    )


def _check_accumulation(model, optimizer):
    steps = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    for router in getattr(model, "routers", {}).values():
        if getattr(router, "bias_update_rate", None) is None or not router.trainable:
            continue
        if router.bias_update_every != steps:
            raise ValueError(
                "The bias of a router moves once for each step of the optimizer. "
                f"Received: bias_update_every={router.bias_update_every} of "
                f"{router.path!r}, gradient_accumulation_steps={steps} of the "
                "optimizer. Make both equal."
            )


def _check_trained_variables(model, variables):
    """Raise if a model trains other variables than its optimizer was built for.

    Args:
        model: `keras.Model`.
        variables: list of those of the optimizer.

    Raises:
        ValueError: if they differ. (Keras fails in the middle of a step, or goes on
            with a compiled step that still trains what was frozen.)
    """
    now = {id(v): v.path for v in model.trainable_variables}
    before = {id(v): v.path for v in variables}
    changed = [
        path for i, path in (now | before).items() if not (i in now and i in before)
    ]
    if changed:
        raise ValueError(
            "Weights were frozen, unfrozen or replaced since the optimizer was built: "
            "call `compile` again, with a new optimizer. Received: the model "
            f"{model.name!r} with {len(now)} weights to train, an optimizer built for "
            f"{len(before)}; they differ in {quote(changed[:3])}."
        )


def _is_traced(model, step):
    """Whether a step is traced, so that its tensors do not outlive it."""
    backend = keras.backend.backend()
    if backend == "jax":
        # Gradients are traced in any case.
        return step == "train" or (model.jit_compile and not model.run_eagerly)
    return backend == "tensorflow" and not model.run_eagerly


def _warn_if_not_distributed(model):
    if isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return
    sharded = next((v.path for v in model.variables if is_sharded(v)), None)
    if sharded is not None:
        warnings.warn(
            f"{sharded!r} and perhaps more of this model is sharded over devices, but "
            "no distribution that shards models is active: every step gathers the "
            "weights of all experts. Use the model under the distribution that it was "
            "built under: `keras.distribution.set_distribution(distribution)`, or `with"
            " distribution.scope():`. Received: distribution="
            f"{keras.distribution.distribution()}.",
            stacklevel=6,
        )
