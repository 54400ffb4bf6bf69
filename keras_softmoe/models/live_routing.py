"""Settings of routers that may change while a model lives."""

import functools

from keras_softmoe.models.spreading import gather_predictions, warn_if_misplaced
from keras_softmoe.ops.placement import report_model
from keras_softmoe.routers.limoe import LIMoERouter
from keras_softmoe.routers.token_choice import TokenChoiceRouter

# What `from_preset` takes beside the arguments of the classes.
LIVE_SETTINGS = tuple(
    dict.fromkeys((*TokenChoiceRouter.mutable_settings, *LIMoERouter.mutable_settings))
)


class LiveRouting:
    """Mixin of models whose compiled functions follow their routers.

    A compiled `predict`, `fit` or `evaluate` has the settings of its routers built
    in. Before each call the model compares, and compiles anew after a change. A model
    of another class around ours does not: compile it again.

    A subclass has `routers`, a dict from the index of a block to its router, and is
    decorated with `follows_routers`. (KerasHub takes the first base of a task for the
    kind of task, so the mixin comes last and cannot override Keras' methods itself.)
    """

    def set_routing(self, layers=None, **settings):
        """Change settings of the routers, for the next `predict`, `fit` or `evaluate`.

        Args:
            layers: int or sequence of int, the MoE blocks to change, counted as in
                `moe_layers`. `None`: all.
            **settings: what to change: `capacity_factor`, `eval_capacity_factor` and
                `random_logits` of all sparse routers; `num_selected_experts` and
                `priority` of those in which tokens choose, of all but LIMoE's also
                `keep_fraction` and `normalize_gates`;
                `single_modality_capacity_factor` of LIMoE's.

        Raises:
            ValueError: if a block has no router, a router has no such setting, or a
                value is not accepted. The model is then unchanged.

        Source: V-MoE, sections 2.4 and 4 and appendix E.4: `K` and `C` may differ from
        those in training, "layer-wise" too (appendix E.3).

        Example:

        >>> model.set_routing(priority="max", capacity_factor=0.5)
        >>> model.set_routing(layers=[3], num_selected_experts=1)
        """
        routers = self.routers
        if layers is None:
            layers = routers
        layers = [layers] if isinstance(layers, int | str) else list(layers)
        wrong = [index for index in layers if index not in routers]
        if wrong:
            raise ValueError(
                "`layers` names blocks without a router. The MoE blocks are "
                f"{sorted(routers)}. Received: layers={layers}."
            )
        if settings and not routers:
            raise ValueError(
                "A dense model has no routers to set. Received: "
                f"{', '.join(settings)}. Leave these settings out."
            )
        if not settings:
            # `from_preset` mostly has none: spare it the making of routers.
            return
        # All of them first, so that a refused value leaves no router changed.
        for index in layers:
            routers[index].with_settings(**settings)
        for index in layers:
            routers[index].update(**settings)

    def rerouted(self, function):
        """Whether the routers have changed since this was asked for a function.

        Args:
            function: `"train"`, `"test"` or `"predict"`.

        Returns:
            bool. `True` too if it was never asked.
        """
        now = {index: router.get_config() for index, router in self.routers.items()}
        before = self.__dict__.setdefault("_compiled_routing", {})
        changed = before.get(function) != now
        before[function] = now
        return changed


def follows_routers(cls):
    """Class decorator: the model compiles anew what its routers have outdated."""
    for function in ("train", "test", "predict"):
        name = f"make_{function}_function"
        setattr(cls, name, _following(getattr(cls, name), function))
    return cls


def _following(make_function, function):
    # Keras asks for these functions before each `fit`, `evaluate` and `predict`.
    @functools.wraps(make_function)
    def make(self, force=False):
        report_model(self)
        warn_if_misplaced(self)
        made = make_function(self, force or self.rerouted(function))
        if function == "predict":
            gather_predictions(self)
        return made

    return make


def pop_live_settings(arguments):
    """Take the settings of routers out of the arguments of `from_preset`."""
    return {name: arguments.pop(name) for name in LIVE_SETTINGS if name in arguments}
