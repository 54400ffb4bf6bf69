"""The routers that seat single tokens, as templates for the tests."""

import keras

from keras_softmoe import ops, routers
from tests.support.references import to_numpy

WIDTH = 4

# No noise unless a test asks for it.
PLAIN = {"noise_std": 0.0}


def _made(cls, choices=None, **defaults):
    """Callable from the number of experts (and overrides) to a router."""

    def make(num_experts, **kwargs):
        own = {"num_selected_experts": min(choices, num_experts)} if choices else {}
        return cls(num_experts, **{**own, **defaults, **kwargs})

    return make


# Name -> callable from the number of experts (and overrides) to a router.
SPARSE = {
    "softmax_token_choice": _made(
        routers.SoftmaxTokenChoiceRouter, 2, priority="max", **PLAIN
    ),
    "balanced_token_choice": _made(
        routers.SoftmaxTokenChoiceRouter, 2, priority="max", bias_update_rate=0.5
    ),
    "sinkhorn_token_choice": _made(routers.SinkhornTokenChoiceRouter, **PLAIN),
    "softmax_expert_choice": _made(routers.SoftmaxExpertChoiceRouter, **PLAIN),
    "sinkhorn_expert_choice": _made(routers.SinkhornExpertChoiceRouter, **PLAIN),
    "sparse_transport": routers.SparseTransportExpertChoiceRouter,
    "expert_race": _made(routers.ExpertRaceRouter, 2),
}
# Those with all balancing losses
TOKEN_CHOICE = ["softmax_token_choice", "sinkhorn_token_choice"]
EXPERT_CHOICE = ["softmax_expert_choice", "sinkhorn_expert_choice", "sparse_transport"]
# A bias and a threshold that change decisions
BIAS, THRESHOLD = [0.4, -0.3, 0.2, 0.0, -0.1], 0.25
PLANS = ["sinkhorn_token_choice", "sinkhorn_expert_choice", "sparse_transport"]


def losses(**weights):
    """Losses with weights by the names of their functions: `losses(z_loss=0.5)`."""
    return [routers.RoutingLoss(getattr(ops, f), weight=w) for f, w in weights.items()]


def build(name, num_experts=4, **kwargs):
    """A built router."""
    router = SPARSE[name](num_experts, **kwargs)
    router.build((None, None, WIDTH))
    if name == "balanced_token_choice":
        router.bias.assign(BIAS[:num_experts])
    if name == "expert_race":
        router.threshold.assign(THRESHOLD)
    return router


def as_numpy(decision):
    """Routing and summary of a decision, as NumPy arrays."""
    routing = [to_numpy(x) for x in decision.routing]
    return routing, {k: to_numpy(v) for k, v in decision.summary.items()}


def call(router, tokens, valid=None, **kwargs):
    """What the router decides for NumPy tokens, as NumPy arrays."""
    if valid is not None:
        valid = keras.ops.convert_to_tensor(valid)
    tokens = keras.ops.convert_to_tensor(tokens)
    return as_numpy(router(tokens, valid=valid, **kwargs))


def call_in_training(router):
    """Callable from tokens and a mask to a decision in training, as NumPy arrays.

    On JAX and TensorFlow it is compiled once. The weights of the router are moved.
    """
    backend = keras.backend.backend()

    def call(tokens, valid):
        return router(tokens, valid=valid, training=True)

    if backend == "tensorflow":
        import tensorflow as tf

        call = tf.function(call)
    elif backend == "jax":
        import jax

        stateless = jax.jit(
            lambda state, tokens, valid: router.stateless_call(
                *state, tokens, valid=valid, training=True
            )
        )

        def call(tokens, valid):
            variables = router.non_trainable_variables
            state = (
                [v.value for v in router.trainable_variables],
                [v.value for v in variables],
            )
            decision, moved = stateless(state, tokens, valid)
            for variable, value in zip(variables, moved, strict=True):
                variable.assign(value)
            return decision

    def called(*arrays):
        return as_numpy(call(*map(keras.ops.convert_to_tensor, arrays)))

    return called
