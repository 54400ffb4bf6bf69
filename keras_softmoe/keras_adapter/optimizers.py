"""Averages, variables and counts of optimizers."""

from types import SimpleNamespace

import keras


class OwnAverages:
    """Mixin for an optimizer that calls `update_averages` after every step.

    With `use_ema=True` Keras updates the averages by a fixed rule.
    Would be replaced by: a public `Optimizer.update_averages`.
    """

    def _update_model_variables_moving_average(self, trainable_variables):
        self.update_averages(trainable_variables)


class InOnePass:
    """Mixin for an optimizer that on PyTorch updates variables in one pass.

    `update_together(gradients, variables, learning_rate)` returns pairs of gradient and
    variable that are left to `update_step`.
    Would be replaced by: a public `Optimizer.update_steps` of all variables.
    """

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if keras.backend.backend() == "torch":
            left = self.update_together(grads, trainable_variables, learning_rate)
            grads, trainable_variables = zip(*left, strict=True) if left else ((), ())
        super()._backend_update_step(grads, trainable_variables, learning_rate)


def averages_of(optimizer):
    """Return the averages of an optimizer with `use_ema=True`, variables or `None`.

    Would be replaced by: a public `Optimizer.averages`.
    """
    return optimizer._model_variables_moving_average


def variables_of(optimizer):
    """Return the list of variables that an optimizer was built for.

    Would be replaced by: a public `Optimizer.trainable_variables`.
    """
    return optimizer._trainable_variables


def index_of(optimizer, variable):
    """Return the index of a variable among those that an optimizer was built for.

    Would be replaced by: a public `Optimizer.get_variable_index`.
    """
    return optimizer._get_variable_index(variable)


def num_gradients(optimizer):
    """Return the number of gradients applied to an optimizer, an int tensor.

    `Optimizer.iterations` counts several accumulated gradients as one.
    Would be replaced by: a public counterpart of `Optimizer.iterations`.
    """
    return optimizer._iterations + 0


class MuonByShape:
    """Mixin, in front of `keras.optimizers.Muon`, for shapes other than the variables'.

    `shape_of(variable)` returns the shape by which Muon or AdamW is chosen.
    Would be replaced by: a public method of `Muon` that chooses.
    """

    def _should_use_adamw(self, variable):
        like = SimpleNamespace(path=variable.path, shape=self.shape_of(variable))
        return super()._should_use_adamw(like)
