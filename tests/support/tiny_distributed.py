"""Models with eight experts, and data, for programs that run on eight devices."""

import keras
import numpy as np

from keras_softmoe import layers, models, routers, training

IMAGE_SHAPE = (8, 8, 3)
NUM_CLASSES = 3
NUM_EXPERTS = 8

# Images of a batch, and what is left over after the whole batches.
BATCH, REST = 16, 12

# Made when they are asked for: their random states are the first thing that JAX
# computes, before which several processes have to find each other.
ROUTERS = {
    "soft": lambda: routers.SoftRouter(NUM_EXPERTS, slots_per_expert=2),
    "token choice": lambda: routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS, num_selected_experts=2, priority="max", capacity_factor=0.75
    ),
    "expert choice": lambda: routers.SoftmaxExpertChoiceRouter(NUM_EXPERTS),
    "sinkhorn token choice": lambda: routers.SinkhornTokenChoiceRouter(NUM_EXPERTS),
    "sparse transport": lambda: routers.SparseTransportExpertChoiceRouter(
        NUM_EXPERTS, num_iterations=3
    ),
    "identity": lambda: routers.IdentityRouter(NUM_EXPERTS),
}

# Tokens of two images compete for the same slots.
GROUPS = {"token choice": 2}


def backbone(kind="soft", **changes):
    """A ViT of one block, which mixes experts."""
    arguments = {
        "image_shape": IMAGE_SHAPE,
        "patch_size": 2,
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 16,
        # Nothing but experts has a size that five divides.
        "mlp_dim": 20,
        "moe_layers": (0,),
        "router": changes.pop("router", None) or ROUTERS[kind](),
        "group_images": GROUPS.get(kind, 1),
        # The batch path of small groups is a product. This is the other one.
        "dispatcher": "gather",
        "pooling": "gap",
        **changes,
    }
    return models.ViTMoEBackbone(**arguments)


def classifier(kind="soft", **changes):
    """A classifier with dropout, the same weights each time, ready to train."""
    keras.utils.set_random_seed(3)
    model = models.ViTMoEImageClassifier(
        backbone(kind, **changes), NUM_CLASSES, dropout=0.1
    )
    model.compile(training.Adam(3e-3))
    return model


def limoe():
    """A model of images and captions of two blocks, one of which mixes experts."""
    return models.LIMoEBackbone(
        image_shape=IMAGE_SHAPE,
        patch_size=4,
        vocabulary_size=11,
        sequence_length=3,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=20,
        embedding_dim=24,
        moe_layers=(1,),
        router=routers.LIMoERouter(NUM_EXPERTS),
        group_images=2,
        image_pooling="map",
    )


def in_own_model(built=True):
    """A user's model around the layer, built at once or by its first batch."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            *([keras.Input((4, 8))] if built else []),
            layers.SoftMoE(NUM_EXPERTS, mlp_dim=20),
            keras.layers.Flatten(),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )


def images(count, seed=0):
    """Noise, in which the class of an image is its colour."""
    x = np.random.default_rng(seed).normal(size=(count, *IMAGE_SHAPE)).astype("f4")
    return x + np.eye(NUM_CLASSES, dtype="f4")[labels(count)][:, None, None]


def labels(count):
    return np.arange(count) * 7 % NUM_CLASSES


def batches(count, size=BATCH):
    """`tf.data` batches in a fixed order."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((images(count), labels(count))).batch(
        size
    )


class StepLosses(keras.callbacks.Callback):
    """Keeps the loss of each step, of which Keras logs the mean in its epoch.

    Of steps that were done before an interruption it is their mean.
    """

    def __init__(self):
        super().__init__()
        self.values = []
        self._mean = 0

    def on_train_batch_end(self, batch, logs=None):
        mean = float(logs["loss"])
        self.values.append(mean * (batch + 1) - self._mean * batch)
        self._mean = mean


def with_any_experts():
    """Two mixtures in a row: a template's experts, and gated ones."""
    keras.utils.set_random_seed(3)
    expert = keras.Sequential(
        [keras.layers.Dense(20, "relu", name="in"), keras.layers.Dense(8, name="out")]
    )
    first = layers.MoE(
        ROUTERS["token choice"](), expert=expert, shared_mlp_dim=20, group_images=2
    )
    second = layers.MoE(ROUTERS["soft"](), 20, activation="silu", gated=True)
    model = keras.Sequential([keras.Input((4, 8)), first, second])
    model.compile("sgd", "mse")
    return model
