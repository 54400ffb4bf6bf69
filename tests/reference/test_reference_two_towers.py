"""Two towers, images and text, against the released code's numbers (files f)."""

import keras
import numpy as np
import pytest

from keras_softmoe import routers
from keras_softmoe.ops.contrastive import sigmoid_contrastive_loss
from tests.reference.test_reference_models import make_router
from tests.support.gradients import outputs
from tests.support.references import Reference, check_auxiliary_loss, finish, to_numpy

TOWERS = (
    "f_two_tower_dense f_two_tower_moe f_two_tower_pool_first f_two_tower_pool_gap "
    "f_two_tower_pool_gmp f_two_tower_tiny_norm"
).split()
TOLERANCE = 1e-4


def make_model(reference):
    """`TwoTowerContrastive` of the configuration, with the saved parameters."""
    from keras_softmoe import converters, models

    config = reference.config
    _, height, width, channels = reference.given("images").shape
    _, length = reference.given("texts").shape
    image, text = config["image_model"], config["text_model"]
    patch_height, patch_width = image["patch_size"]
    num_patches = height // patch_height * (width // patch_width)
    towers = (
        models.ViTMoEBackbone(
            image_shape=(height, width, channels),
            patch_size=(patch_height, patch_width),
            pooling=image["classifier"],
            **encoder_arguments(image, num_patches),
        ),
        models.TextMoEBackbone(
            vocabulary_size=text["vocab_size"],
            sequence_length=length,
            pooling=text["pool_type"],
            **encoder_arguments(text, length),
        ),
    )
    backbone = models.TwoTowerBackbone(
        *towers,
        image_projection_dim=image["num_classes"],
        text_projection_dim=text["num_classes"],
        logit_scale=config["scale_init"],
        logit_bias=config["bias_init"],
    )
    # What it starts from is what theirs starts from.
    starts = {"s": backbone.get_layer("contrastive_scale").log_scale}
    if config["bias_init"] is not None:
        starts["b"] = backbone.get_layer("contrastive_scale").logit_bias
    for name, variable in starts.items():
        expected = config["s_and_b_init"][name]
        np.testing.assert_allclose(to_numpy(variable), expected, rtol=1e-6)
    model = models.TwoTowerContrastive(backbone)
    converters.load_vmoe_params(model, reference.given_under("params/"))
    return model


def encoder_arguments(model, num_tokens):
    encoder = model["encoder"]
    arguments = {
        "num_layers": encoder["num_layers"],
        "num_heads": encoder["num_heads"],
        "hidden_dim": model["hidden_size"],
        "mlp_dim": encoder["mlp_dim"],
        "use_qk_norm": encoder["attention_qk_norm"],
    }
    if "position_emb" in encoder:
        arguments["position_embedding"] = encoder["position_emb"]["name"]
    if "moe" in encoder:
        moe = encoder["moe"]
        assert moe["group_size"] % num_tokens == 0
        arguments |= {
            "moe_layers": tuple(moe["layers"]),
            "router": make_router(moe, noisy=False),
            "group_images": moe["group_size"] // num_tokens,
        }
    return arguments


@pytest.mark.parametrize("name", TOWERS)
def test_two_towers(name):
    reference = Reference(name)
    model = make_model(reference)
    images, texts = reference.given("images"), reference.given("texts")
    pairs = {"images": images, "token_ids": texts}
    num_texts = reference.given("logits_rectangular").shape[1]

    def run(pairs):
        found = model(pairs)
        fewer = {**found, "text_embedding": found["text_embedding"][:num_texts]}
        return found, model.logits(found), model.logits(fewer)

    found, logits, rectangle = outputs(run, pairs)
    reference.check("zimg", found["image_embedding"], TOLERANCE)
    reference.check("ztxt", found["text_embedding"], TOLERANCE)
    reference.check("logits", logits, TOLERANCE)
    reference.check("sigmoid_loss", sigmoid_contrastive_loss(logits), TOLERANCE)
    reference.check("metrics/scale", found["logit_scale"][0], TOLERANCE)
    for modality, inputs in (("image", images), ("text", texts)):
        tower = getattr(model.backbone, f"{modality}_backbone")
        total = sum_of_losses(tower, inputs)
        key = {"image": "img", "text": "txt"}[modality]
        check_auxiliary_loss(reference, f"metrics/{key}/auxiliary_loss", total)
    reference.check("logits_rectangular", rectangle, TOLERANCE)

    if "logits_bf16" in reference:
        # Soft routers always round the tokens, others where they are told to.
        tower = model.backbone.image_backbone
        for index in tower.moe_layers:
            tower.blocks[index].moe.dispatch_dtype = "bfloat16"
        _, rounded, _ = outputs(lambda pairs: run(pairs), pairs)
        reference.check("logits_bf16", rounded, TOLERANCE)
    reference.given_under("grads/")
    reference.leave({(r"f_two_tower_dense", "loss"): "compared beside the gradients"})
    finish(reference)


def sum_of_losses(tower, inputs):
    """Balancing losses of a tower's blocks, one for each group."""
    if not tower.moe_layers:
        return np.zeros(())

    def losses(x):
        with routers.record() as decisions:
            tower(keras.ops.cast(x, tower.input.dtype))
        return [decision.summary["auxiliary_loss"] for decision in decisions.values()]

    return sum(outputs(losses, inputs), start=np.zeros(()))


def test_gradients_of_fit():
    """A step of gradient descent at a rate of one subtracts the saved gradients."""
    from keras_softmoe import converters

    reference = Reference("f_two_tower_dense")
    model = make_model(reference)
    before = converters.to_vmoe_params(model)
    assert before.keys() == reference.given_under("params/").keys()
    model.compile(keras.optimizers.SGD(1.0), loss="sigmoid")
    images, texts = reference.given("images"), reference.given("texts")
    history = model.fit(images, texts, batch_size=len(images), verbose=0)
    reference.check("loss", history.history["loss"][0], TOLERANCE)
    after = converters.to_vmoe_params(model)
    for name in before:
        change = before[name] - after[name]
        reference.check(f"grads/{name}", change, TOLERANCE)
    finish(reference, "grads/")
    finish(reference, "loss")


def test_evaluate_reports_their_loss():
    """It is the mean over rows of the saved losses; `fit` does so above."""
    reference = Reference("f_two_tower_moe")
    model = make_model(reference)
    model.compile(keras.optimizers.SGD(0.0), loss="sigmoid")
    images, texts = reference.given("images"), reference.given("texts")
    expected = reference.given("sigmoid_loss").mean()
    settings = {"batch_size": len(images), "verbose": 0}
    found = model.evaluate(images, texts, return_dict=True, **settings)
    np.testing.assert_allclose(found["loss"], expected, rtol=TOLERANCE)
