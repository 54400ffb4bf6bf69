"""Parts of built models: finding, naming, replacing, tracing and counting them."""

import contextlib
import functools
import math
import re

import keras
from keras.src import backend as keras_backend
from keras.src.backend import compute_output_spec
from keras.src.models.functional import Functional
from keras.src.utils.naming import to_snake_case

# Models that are a graph of layers, with Keras tensors as their ends. Would be replaced
# by: a public `keras.models.Functional`.
FUNCTIONAL = Functional | keras.Sequential


def sublayers(model):
    """Yield `(path, layer, parent)` of all layers in a model, parents first, in order.

    Parts of a layer come in the order in which it got them, layers of a functional
    model in that of its graph, and each once. Paths are names with `/` between them.
    Would be replaced by: a public `keras.Layer.flatten_layers()` in that order.
    """
    seen = {id(model)}
    # Layers to visit, the next one last
    waiting = [(x.name, x, model) for x in reversed(model._layers)]
    while waiting:
        path, layer, parent = waiting.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield path, layer, parent
            inside = reversed(layer._layers)
            waiting += [(f"{path}/{x.name}", x, layer) for x in inside]


def sublayer(parent, name):
    """Return the part of a layer with a name, or in an attribute; `None` without one.

    Would be replaced by: a public dict of the sublayers of a layer.
    """
    for layer in parent._layers:
        if layer.name == name:
            return layer
    held = attributes_of(parent)
    for attribute in (name, f"_{name}"):
        if isinstance(held.get(attribute), keras.Layer):
            return held[attribute]
    return None


def replace_sublayer(parent, old, new):
    """Replace a part of a built layer, in an attribute or in a list in one.

    Would be replaced by: sublayers that can be set in a built layer, as
    https://github.com/keras-team/keras/issues/18601 proposes.
    """
    tracker = parent._tracker
    was_locked = tracker.locked
    tracker.unlock()
    found = False
    try:
        for name, value in attributes_of(parent).items():
            if value is old:
                tracker.untrack(old)
                setattr(parent, name, new)
                found = True
            elif isinstance(value, list) and name != "_layers":
                for index, item in enumerate(value):
                    if item is old:
                        tracker.untrack(old)
                        value[index] = new
                        found = True
    finally:
        if was_locked:
            tracker.lock()
    if not found:
        raise ValueError(
            f"The layer {parent.path!r} must have an attribute with the part that is "
            f"to be replaced. Received: {old.path!r}. Name a layer around it."
        )


def attributes_of(layer):
    """Return a dict of the attributes of a layer; PyTorch has modules elsewhere.

    Would be replaced by: `vars`, if PyTorch's modules were among them.
    """
    return {**vars(layer), **vars(layer).get("_modules", {})}


def forget_calls(layer):
    """Clear the calls of a layer on Keras tensors, as of one that is new.

    Would be replaced by: configurations of graphs that count from the call at hand.
    """
    layer._inbound_nodes.clear()


def share_weights(source, model):
    """Give a model that was built `without_values` the variables of an equal one.

    Would be replaced by: layers that are built with given variables.
    """
    shapes = [[tuple(w.shape) for w in m.weights] for m in (source, model)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "A model is built again from its configuration, with the same weights. "
            f"Received: a `{type(source).__name__}` whose weights have other shapes. "
            "Pass it as its `from_config` or `from_preset` builds it."
        )
    pairs = ([m, *(layer for _, layer, _ in sublayers(m))] for m in (source, model))
    for old, new in zip(*pairs, strict=True):
        given = {}
        for name in ("trainable_variables", "non_trainable_variables"):
            olds, news = (getattr(layer, f"_{name}") for layer in (old, new))
            given |= {id(b): a for a, b in zip(olds, news, strict=True)}
            news[:] = olds
            new._tracker.stored_ids[name] = {id(v) for v in olds}
        for a, b in zip(old._seed_generators, new._seed_generators, strict=True):
            b.state = a.state
        # Configurations of KerasHub lack some settings, and names have counters.
        settings = {
            name: value
            for name, value in vars(old).items()
            if isinstance(value, bool | int | float | str)
            and (name in ("_path", "_trainable") or not name.startswith("_"))
        }
        held = vars(new)
        held |= {name: given.get(id(x), x) for name, x in held.items()} | settings
    if keras.backend.backend() == "torch":
        for layer in model._flatten_layers():
            layer._track_variables()


def renew_parameters(model):
    """Register weights anew. Would be replaced by: lists that follow the variables."""
    if keras.backend.backend() == "torch":
        for layer in model._flatten_layers():
            if hasattr(layer, "_torch_params"):
                layer._track_variables()


def call_symbolically(model, inputs, around=None, start=None, parts=None):
    """Call a model on shapes: it computes no numbers, but calls all its layers.

    `inputs` are (structures of) `keras.KerasTensor` of known sizes. `around` is a dict
    from ids of layers to callables `(call, inputs, *args, **kwargs)` in place of their
    `call`, `start` a callable for the start of each call, and `parts` are the layers of
    a `model` that is a callable. Would be replaced by: a public
    `keras.compute_output_spec`.
    """
    around = around or {}
    is_layer = isinstance(model, keras.Layer)
    if is_layer:
        parts = list(model._flatten_layers())
    training = is_layer and model._call_has_training_arg
    known = {"training": False} if training else {}

    with contextlib.ExitStack() as stack:
        for layer in parts:
            if id(layer) in around:
                layer.call = functools.partial(around[id(layer)], layer.call)
                stack.callback(vars(layer).pop, "call", None)

        def call(inputs):
            if start:
                start()
            # The layer itself may have another `call` now.
            return (model.call if is_layer else model)(inputs, **known)

        return compute_output_spec(call, inputs)


def named_weights(layer):
    """Yield `(path, weight)` of a layer, each once, without counters in names.

    Would be replaced by: names of Keras that are unique in a model.
    """
    seen, taken = set(), set()
    # Layers and weights to visit, the next one last, and the paths that they are in
    waiting = [(layer, None)]
    while waiting:
        part, prefix = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        is_weight, new = isinstance(part, keras.Variable), ""
        if prefix is not None:
            # An automatic name has a counter.
            kind = keras.Variable if is_weight else type(part)
            is_model = issubclass(kind, keras.Model)
            stem = r"\w+" if is_model else to_snake_case(kind.__name__)
            name = part.name
            if re.fullmatch(rf"{stem}_\d+", name):
                name = name.rpartition("_")[0]
            name = new = prefix + name.replace(".", "_")
            count = 0
            while new in taken:
                count += 1
                new = f"{name}_{count}"
            taken.add(new)
        if is_weight:
            yield new, part
            continue
        weights = part._trainable_variables + part._non_trainable_variables
        inside = [*weights, *part._layers]
        waiting += [(x, f"{new}/" if new else "") for x in reversed(inside)]


@contextlib.contextmanager
def counted_products():
    """Count the multiply-adds of Keras' matrix products in this context.

    They are those of `keras.ops.matmul`, `dot`, `tensordot`, `einsum` and
    `dot_product_attention` and of convolutions, in any layer, also in a symbolic call.
    Would be replaced by: a public count of operations in Keras.
    """
    products = Products()
    numpy, nn = keras_backend.numpy, keras_backend.nn
    counters = {
        (numpy, "matmul"): _of_matmul,
        (numpy, "dot"): _of_matmul,
        (numpy, "tensordot"): _of_tensordot,
        (numpy, "einsum"): _of_einsum,
        (nn, "conv"): lambda outputs, inputs, kernel, *args, **kwargs: _times(
            outputs, kernel.shape[:-1]
        ),
        (nn, "depthwise_conv"): lambda outputs, inputs, kernel, *args, **kwargs: _times(
            outputs, kernel.shape[:-2]
        ),
        (nn, "separable_conv"): _of_separable_conv,
        (nn, "conv_transpose"): lambda outputs, inputs, kernel, *args, **kwargs: _times(
            inputs, kernel.shape[:-1]
        ),
        (nn, "dot_product_attention"): _of_attention,
    }
    with contextlib.ExitStack() as stack:
        for (module, name), counter in counters.items():
            function = getattr(module, name)
            stack.callback(setattr, module, name, function)
            setattr(module, name, products.counting(function, counter))
        yield products


class Products:
    """A count that can be paused. Would be replaced by: see `counted_products`."""

    def __init__(self):
        self.total, self._is_paused = 0, False

    @contextlib.contextmanager
    def paused(self):
        """Count nothing in this context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def restart(self):
        """Count from zero."""
        self.total = 0

    def counting(self, function, counter):
        """Return a function that also counts, with `counter(outputs, *arguments)`."""

        def counted(*args, **kwargs):
            if self._is_paused:
                return function(*args, **kwargs)
            # One may call another.
            with self.paused():
                outputs = function(*args, **kwargs)
            self.total += counter(outputs, *args, **kwargs)
            return outputs

        return counted


def _of_matmul(outputs, x1, x2, *args, **kwargs):
    return math.prod(outputs.shape) * (x1.shape[-1] if len(x1.shape) else 1)


def _of_tensordot(outputs, x1, x2, axes=2):
    # Sizes of both are those of the output times the square of the summed ones.
    both = math.prod(x1.shape) * math.prod(x2.shape)
    summed = math.isqrt(both // max(math.prod(outputs.shape), 1))
    return math.prod(outputs.shape) * summed


def _of_einsum(outputs, subscripts, *operands, **kwargs):
    if len(operands) < 2:
        return 0
    sizes, most = {}, 1
    for term, x in zip(subscripts.split("->")[0].split(","), operands, strict=True):
        letters = term.replace(" ", "")
        shape = tuple(x.shape)
        if "..." in letters:
            before, after = map(len, letters.split("..."))
            end = len(shape) - after
            most = max(most, math.prod(shape[before:end]))
            shape, letters = shape[:before] + shape[end:], letters.replace("...", "")
        sizes |= dict(zip(letters, shape, strict=True))
    return most * math.prod(sizes.values())


def _times(x, shape):
    return math.prod(x.shape) * math.prod(shape)


def _of_separable_conv(outputs, inputs, depthwise_kernel, pointwise_kernel, *a, **k):
    *size, channels, multiplier = depthwise_kernel.shape
    units = pointwise_kernel.shape[-1]
    places = math.prod(outputs.shape) // units
    return places * channels * multiplier * (math.prod(size) + units)


def _of_attention(outputs, query, key, value, *args, **kwargs):
    batch, queries, heads, width = query.shape
    keys = key.shape[1]
    return batch * queries * keys * heads * (width + value.shape[-1])
