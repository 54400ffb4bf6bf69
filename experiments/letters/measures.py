"""What a trained model is asked: accuracy, transfer, and how it routes."""

import functools

import keras
import numpy as np

import keras_softmoe as ksm
from experiments.letters.models import NUM_TOKENS, VIEWS, ViewRouter
from keras_softmoe import routers

# No model is trained with it. Splits have streams of their own.
TEST_SEED = 10_000
# Images of which logits are averaged by position, and with which others are swapped.
_VIEWED_IMAGES = 256
_SHOTS, _DRAWS = (1, 5), 10
# Slots per token at inference, beside those of training.
_CAPACITIES = (0.5, 0.25)


def accuracy(classifier, images, labels):
    """Share of the images that are put into their class, a float."""
    logits = classifier.predict(images, batch_size=64, verbose=0)
    return float(np.mean(np.argmax(logits, axis=-1) == labels))


def measure(classifier, letters, scale):
    """All that is measured of a model after training.

    Args:
        classifier: `ViTMoEImageClassifier`.
        letters: `pictures.Letters`.
        scale: `models.Scale`.

    Returns:
        dict that JSON can hold: `"accuracy"` on new pictures of the trained letters;
        `"new_fonts"`, in fonts never seen; `"few_shot"`, of classes never seen, by
        shots; of mixtures `"blocks"`, a dict from blocks to what is counted there; of
        V-MoE `"slots"`, the accuracy with fewer slots with and without batch priority;
        and with a `ViewRouter` `"views"`, if it sees position or content alone. A
        model whose weights are not finite has no right answers, and no other numbers.
    """
    weights = (keras.ops.convert_to_numpy(w.value) for w in classifier.weights)
    if not all(np.isfinite(weight).all() for weight in weights):
        nothing = dict.fromkeys(map(str, _SHOTS), 0.0)
        return {"accuracy": 0.0, "new_fonts": 0.0, "few_shot": nothing}
    images, labels = letters.take(scale.test_images, TEST_SEED)
    new_fonts = letters.take(scale.test_images, TEST_SEED, "new_fonts")
    found = {
        "accuracy": accuracy(classifier, images, labels),
        "new_fonts": accuracy(classifier, *new_fonts),
        "few_shot": few_shot(classifier, letters, scale),
    }
    if classifier.backbone.moe_layers:
        found["blocks"] = counted(classifier, images, labels)
    if isinstance(classifier.backbone.router, routers.SoftmaxTokenChoiceRouter):
        found["slots"] = fewer_slots(classifier, images, labels)
    if isinstance(classifier.backbone.router, ViewRouter):
        found["views"] = with_views(classifier, images, labels)
    return found


def few_shot(classifier, letters, scale):
    """Accuracy of a probe on classes never seen, by shots: a mean over draws."""
    images, labels = letters.take(2 * scale.test_images, TEST_SEED, "new_classes")
    half = len(labels) // 2
    train, test = (images[:half], labels[:half]), (images[half:], labels[half:])
    result = ksm.evaluation.few_shot_probe(
        classifier, train, test, shots=_SHOTS, seeds=_DRAWS, verbose=0
    )
    return {str(shots): result[shots].mean for shots in _SHOTS}


def counted(classifier, images, labels):
    """Dropped tokens, shares of position and class, alignment of slots, by block."""
    routing = ksm.analysis.analyze(classifier, images, labels, verbose=0)
    found = {}
    for name, block in routing.blocks.items():
        found[str(name)] = {
            "dropped": block.dropped,
            "imbalance": block.imbalance,
            "position_share": block.information.position_share,
            "label_share": block.information.label_share,
        }
    for name, block in routing.soft.items():
        found[str(name)] |= {
            # `None` with one slot or one expert.
            "cosine_within": _number(block.cosine_within_experts),
            "cosine_between": _number(block.cosine_between_experts),
            "sharpness": [block.dispatch_sharpness, block.combine_sharpness],
        }
    return found


def fewer_slots(classifier, images, labels):
    """Accuracy by slots per token and by priority."""
    sweep = ksm.evaluation.routing_sweep(
        classifier,
        (images, labels),
        verbose=0,
        capacity_factor=_CAPACITIES,
        priority=("max", "position"),
    )
    found = {}
    for row in sweep.rows:
        place = found.setdefault(str(row.settings["capacity_factor"]), {})
        place[row.settings["priority"]] = float(row.scores["accuracy"].mean())
    return found


def with_views(classifier, images, labels):
    """Accuracy if the routers see position alone, content alone or another image."""
    backbone = classifier.backbone
    found = {}
    for name, view in VIEWS.items():
        seen = [r for r in backbone.routers.values() if isinstance(r, ViewRouter)]
        for router in seen:
            router.view = functools.partial(view, positions=NUM_TOKENS)
        try:
            right = 0
            for start in range(0, len(labels), _VIEWED_IMAGES):
                part = slice(start, start + _VIEWED_IMAGES)
                # Eagerly: what is compiled has no view.
                pixels = classifier.preprocessor(images[part])
                features = backbone(pixels, training=False)["pooled_output"]
                logits = classifier.output_dense(features)
                logits = keras.ops.convert_to_numpy(logits)
                right += int(np.sum(np.argmax(logits, axis=-1) == labels[part]))
            found[name] = right / len(labels)
        finally:
            for router in seen:
                router.view = None
    return found


def _number(value):
    return None if np.isnan(value) else float(value)
