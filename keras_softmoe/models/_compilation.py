"""Compiled tasks in files.

Keras does not call a `compile` of a subclass when it loads a file: the model would come
back with other losses and without the state of its optimizer. These functions are what
such a class does in `get_config`, `get_compile_config` and `compile_from_config`.
"""

import contextlib
import contextvars

import keras

from keras_softmoe.models._adaptation import has_factors

_IN_PRESET = contextvars.ContextVar("configuration_is_for_a_preset", default=False)


@contextlib.contextmanager
def preset_is_saved():
    """Scope in which configurations go into presets, which have no optimizer's state.

    A model with LoRA comes back compiled from there, and uncompiled from other files.
    """
    token = _IN_PRESET.set(True)
    try:
        yield
    finally:
        _IN_PRESET.reset(token)


def with_compilation(model, config):
    """The configuration of a model, which tells whether it was ever compiled.

    Its file has no state of an optimizer then: revived it has to be without one. With
    LoRA the state is that of factors, which a file does not have: there it is the sum.
    """
    if model.compiled and (_IN_PRESET.get() or not has_factors(model)):
        return config
    return {**config, "compile": False}


def with_optimizer(model, compile_config, **own):
    """What a model was compiled with, and whether its optimizer has variables yet.

    Empty for a model with LoRA, see `with_compilation`. (Not `None`: Keras compiles the
    clone of a compiled model with it.)

    Args:
        model: `keras.Model`.
        compile_config: dict or `None`, what Keras says of it.
        **own: arguments of `compile` that only `compile_again` is to pass.
    """
    if has_factors(model):
        return {}
    if not compile_config:
        return compile_config
    # Beside the optimizer's arguments, where others than `compile_again` pass it over.
    known = {"is_built": model.optimizer.built, "own": own}
    return {**compile_config, "optimizer": {**compile_config["optimizer"], **known}}


def compile_again(model, compile_config):
    """Compile a model as one was whose `with_optimizer` is given."""
    optimizer = compile_config["optimizer"]
    arguments = keras.saving.deserialize_keras_object(compile_config)
    model.compile(**{**arguments, **optimizer.get("own", {})})
    if optimizer.get("is_built", True):
        model.optimizer.build(model.trainable_variables)
