"""Models of LIMoE, whose weights were never released, and their dense twins."""

import functools

from keras_softmoe import routers
from keras_softmoe.architecture import LIMoE
from keras_softmoe.catalogue._papers import LIMOE, LIMOE_H14_BLOCKS, VMOE_SIZES
from keras_softmoe.catalogue._row import (
    IMAGE_SIZE,
    Row,
    experts,
    moe_blocks,
    preset_name,
    vit,
)

_NUM_EXPERTS = 32
# Appendix E.5: routing worked in groups of this size and larger ones.
_GROUP_PAIRS = 32

_TEXT = {
    # Pieces of T5's SentencePiece model, which returns no other ids. (The T5 models
    # have 128 more rows, for sentinels and padding.)
    "vocabulary_size": 32_000,
    "sequence_length": 16,
}

_IMAGE_SIZES = {
    # The paper says 288, of which 14 is no divisor. At 294 an image has 441 patches,
    # 27.6 for each token of a text; appendix G says "close to 1:27". (280 gives 25.)
    "H/14": 294,
}
_EMBEDDING_DIMS = {
    # Appendix A: 512 for all but H/14, for which it is not printed.
    "H/14": 1280,
}

_NOTE = "The vocabulary is T5's SentencePiece model of 32,000 pieces; 0 is the padding."
_H14_NOTE = (
    "Chosen here, since the paper does not print it or it cannot be: images of 294 x "
    "294 pixels (it says 288, which patches of 14 do not divide; at 294 there are 27.6 "
    'patches for each text token, "close to 1:27" in appendix G), and embeddings as '
    "wide as the model (it only says that they are not 512 wide)."
)


def limoe():
    """Return a list of `Row` of all models of LIMoE."""
    return [each for model in LIMOE for each in _pair_of_twins(model)]


def _pair_of_twins(model):
    of_dense, of_limoe, soft_minimum = LIMOE[model]
    image_size = _IMAGE_SIZES.get(model, IMAGE_SIZE)
    dense = {
        **vit(VMOE_SIZES, model, image_size),
        **_TEXT,
        "embedding_dim": _EMBEDDING_DIMS.get(model, 512),
    }
    rest = {
        "source": "LIMoE, appendices A and C.1",
        "note": f"{_NOTE} {_H14_NOTE}" if model == "H/14" else _NOTE,
        "kind": LIMoE,
    }
    names = [
        preset_name(*parts, image_size=image_size)
        for parts in (
            ("limoe_dense", VMOE_SIZES, model),
            ("limoe", VMOE_SIZES, model, f"{_NUM_EXPERTS}e"),
        )
    ]
    title = f"Dense one-tower model {model} of LIMoE"
    if of_dense is None:
        title = f"Dense twin of LIMoE-{model}"
    yield Row(
        names[0],
        title,
        "",
        arguments=dense,
        published=_published(f"Dense {model}", of_dense),
        **rest,
    )
    text_experts, image_experts = soft_minimum
    if model == "H/14":
        layers = tuple(block - 1 for block in LIMOE_H14_BLOCKS)
        where = f"{len(layers)} blocks"
    else:
        layers = moe_blocks(dense["num_layers"], every=2)
        where = "every second block"
    yield Row(
        names[1],
        f"LIMoE-{model}",
        f"{_NUM_EXPERTS} experts in {where}",
        arguments=dense | experts(layers, _GROUP_PAIRS),
        router=functools.partial(_router, text_experts, image_experts),
        twin=names[0],
        published=_published(f"LIMoE {model}", of_limoe)
        | {"text_experts": text_experts, "image_experts": image_experts},
        **rest,
    )


def _router(text_experts, image_experts):
    losses = routers.classic_losses() + routers.entropy_losses(
        _NUM_EXPERTS, text_experts, image_experts
    )
    return routers.LIMoERouter(_NUM_EXPERTS, losses=losses, name="router")


def _published(row, results):
    if results is None:
        return None
    zero_shot, ten_shot, image_of_caption, caption_of_image = results
    return {
        "row": f"table 4, {row}",
        "imagenet_zero_shot": zero_shot,
        "imagenet_10_shot": ten_shot,
        "coco_text_to_image": image_of_caption,
        "coco_image_to_text": caption_of_image,
    }
