"""The models that learn from icons: sizes, kinds and how they are built."""

from typing import Any, NamedTuple

from experiments.icons.sources import SIZE
from keras_softmoe import datasets, models, routers

VOCABULARY_SIZE, SEQUENCE_LENGTH = 2000, 12
NUM_EXPERTS, GROUP_IMAGES = 8, 32
# Soft minimum of experts for text, and for images.
TEXT_EXPERTS, IMAGE_EXPERTS = 3, 5


class Size(NamedTuple):
    """What the models of one size share.

    Attributes:
        patch_size, num_layers, num_heads, hidden_dim, mlp_dim: as in `ViTMoEBackbone`.
        moe_layers: tuple of int, of V-MoE and Soft MoE.
        limoe_layers: tuple of int, of LIMoE.
        soft_experts: int, of Soft MoE.
        epochs: int, of classifiers.
        limoe_epochs: int.
        batch_size: int.
        learning_rate: float, the peak.
    """

    patch_size: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    mlp_dim: int
    moe_layers: tuple
    limoe_layers: tuple
    soft_experts: int
    epochs: int
    limoe_epochs: int
    batch_size: int
    learning_rate: float


SIZES = {
    "small": Size(8, 6, 4, 128, 256, (3, 4, 5), (1, 3, 5), 16, 16, 10, 128, 1e-3),
    "full": Size(4, 6, 6, 192, 224, (4, 5), (2, 5), 8, 100, 100, 256, 1e-3),
}


class Kind(NamedTuple):
    """A preset.

    Attributes:
        name: str, of the preset, with a place for the size of patches.
        title: str, for its card.
        router: router, or `None`.
        learns_names: bool, whether it learns from names.
    """

    name: str
    title: str
    router: Any = None
    learns_names: bool = False


def kinds(size):
    """The presets of a size, a dict to `Kind`."""
    tokens = (SIZE // size.patch_size) ** 2
    soft_experts = size.soft_experts
    name = f"tiny_patch{size.patch_size}"
    return {
        "dense": Kind(f"vit_{name}_{SIZE}_icons", "Dense ViT"),
        "vmoe": Kind(
            f"vmoe_{name}_{NUM_EXPERTS}e_{SIZE}_icons",
            f"V-MoE ({NUM_EXPERTS} experts, K = 1)",
            # Predictions of an image do not depend on others.
            routers.SoftmaxTokenChoiceRouter(
                NUM_EXPERTS, priority="max", eval_capacity_factor="dropless"
            ),
        ),
        "soft": Kind(
            f"soft_moe_{name}_{soft_experts}e_{SIZE}_icons",
            f"Soft MoE ({soft_experts} experts)",
            routers.SoftRouter(
                soft_experts,
                slots_per_expert=tokens // soft_experts,
                initial_scale="unit_variance",
            ),
        ),
        "limoe": Kind(
            f"limoe_{name}_{NUM_EXPERTS}e_{SIZE}_icons",
            f"LIMoE ({NUM_EXPERTS} experts, K = 1)",
            routers.LIMoERouter(
                NUM_EXPERTS,
                losses=routers.classic_losses()
                + routers.entropy_losses(NUM_EXPERTS, TEXT_EXPERTS, IMAGE_EXPERTS),
            ),
            learns_names=True,
        ),
        "limoe_dense": Kind(
            f"limoe_dense_{name}_{SIZE}_icons",
            "Dense one-tower model, the twin of LIMoE",
            learns_names=True,
        ),
    }


def build(kind, size, bank):
    """A task with new weights."""
    settings = {
        "image_shape": (SIZE, SIZE, 3),
        "patch_size": size.patch_size,
        "num_layers": size.num_layers,
        "num_heads": size.num_heads,
        "hidden_dim": size.hidden_dim,
        "mlp_dim": size.mlp_dim,
        "router": kind.router,
        "moe_layers": (),
    }
    if kind.router is not None:
        layers = size.limoe_layers if kind.learns_names else size.moe_layers
        settings["moe_layers"] = layers
        is_soft = isinstance(kind.router, routers.SoftRouter)
        # Icons share the slots of sparse routers: tokens of one icon resemble each
        # other and would choose the same experts.
        settings["group_images"] = 1 if is_soft else GROUP_IMAGES
    converter = models.ViTMoEImageConverter(
        image_size=(SIZE, SIZE), name="image_converter"
    )
    if not kind.learns_names:
        return models.ViTMoEImageClassifier(
            # Positions are learned: with the fixed table the loss did not fall in the
            # first 200 steps of a trial on 20 concepts.
            models.ViTMoEBackbone(**settings, pooling="gap"),
            num_classes=bank.num_concepts,
            preprocessor=models.ViTMoEImageClassifierPreprocessor(converter),
        )
    tokenizer = models.LIMoETokenizer(vocabulary(bank), name="tokenizer")
    backbone = models.LIMoEBackbone(
        **settings,
        vocabulary_size=tokenizer.vocabulary_size(),
        sequence_length=SEQUENCE_LENGTH,
        embedding_dim=size.hidden_dim,
        mask_padding=True,
    )
    preprocessor = models.LIMoEPreprocessor(
        tokenizer, converter, sequence_length=SEQUENCE_LENGTH, name="preprocessor"
    )
    return models.LIMoEContrastive(backbone, preprocessor)


def vocabulary(bank):
    """The SentencePiece model of the names of training icons."""
    rows, _ = bank.rows("train")
    names = sorted({name for row in rows for name in bank.captions_of(row)})
    return datasets.train_vocabulary(names, VOCABULARY_SIZE)
