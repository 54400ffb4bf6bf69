"""Rows of the catalogue for released checkpoints of tiny models."""

from keras_softmoe import architecture, catalogue
from keras_softmoe.catalogue.row import Release, Row


def add(name, model, checkpoint, accuracy=None, crop=False, **settings):
    """Add a row to the catalogue of this process.

    Args:
        name: str, of the preset.
        model: `ViTMoEImageClassifier` of the architecture.
        checkpoint: str, URL of its weights.
        accuracy: dict, the published accuracy.
        crop: bool, see `Release`.
        **settings: other settings of the backbone than the model's.
    """
    kind, config = "keras_softmoe>ViTMoEBackbone", model.backbone.get_config()
    arguments = {**architecture.read(kind, config).flat(), **settings}
    router = arguments.pop("router")
    catalogue.rows()[name] = Row(
        name,
        "A tiny one",
        "",
        "the tests",
        arguments,
        router and (lambda: router),
        release=Release(
            checkpoint, model.num_classes, "trained on nothing", accuracy or {}, crop
        ),
    )
