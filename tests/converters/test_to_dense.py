"""Models with experts that become dense ones."""

import keras
import numpy as np
import pytest

from keras_softmoe import converters, layers, models, routers
from keras_softmoe.keras_adapter.surgery import sublayers
from tests.support import tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.families import FAMILIES, ROUTER, inputs_of
from tests.support.layer_checks import assert_same_weights
from tests.support.references import to_numpy

# The last layer of an MLP, by its path in the dense model
LAST = {"ViT": "mlp/dense_2", "DINOv2, SwiGLU": "mlp/weights_out", "CLIP": "dense_2"}


def change(moe):
    """Give experts different weights."""
    rng = np.random.default_rng(0)
    for weight in moe.experts.weights:
        weight.assign(to_numpy(weight) + 0.2 * rng.normal(size=weight.shape))


def loads_of(model, x):
    with routers.record() as decisions:
        model(x)
    return [
        to_numpy(decision.summary["load"]).sum(axis=0)
        for decision in decisions.values()
    ]


@pytest.mark.parametrize("family", LAST)
def test_models_of_keras_hub(family, capsys):
    """Equal experts give the dense model back, others their mean by load."""
    dense = FAMILIES[family]()
    x = inputs_of(dense, 3)
    sparse = converters.add_experts(dense, (1,), ROUTER, verbose=0)
    same = converters.to_dense_model(sparse, x, batch_size=2)
    assert "1 mixtures of" in capsys.readouterr().out
    assert type(same) is type(dense) and same.feature_difference < 1e-5
    assert_same_weights(same, dense, atol=1e-6)
    moe = sparse.moe_layers[1]
    change(moe)
    before = [to_numpy(weight).copy() for weight in sparse.weights]
    (load,) = loads_of(sparse, x)
    bank = getattr(moe.experts, "output_dense", None)
    bias = to_numpy(moe.experts.weights[-1] if bank is None else bank.bias)
    for data, share in ((x, load / load.sum()), (None, np.full(4, 0.25))):
        mean = converters.to_dense_model(sparse, data, verbose=0)
        last = [y for path, y, _ in sublayers(mean) if path.endswith(LAST[family])]
        expected = np.tensordot(share, bias, 1).reshape(-1)
        assert_near(to_numpy(last[1].bias), expected, atol=1e-6)
    assert all(map(np.array_equal, before, map(to_numpy, sparse.weights)))
    distance = converters.to_dense_model(sparse, x, verbose=0).feature_difference
    assert 1e-4 < distance < 10


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    def build(self, inputs_shape):
        self.scale = self.add_weight(
            shape=inputs_shape[-1:], initializer="ones", trainable=False
        )

    def call(self, inputs):
        return inputs * self.scale


def test_a_weight_that_is_not_trained_before_others():
    mlp = keras.Sequential([Scaled(), keras.layers.Dense(8)], name="mlp")
    dense = keras.Sequential([keras.Input((4, 8)), mlp])
    sparse = converters.add_experts(dense, (0,), ROUTER, sites=["mlp"], verbose=0)
    same = converters.to_dense_model(sparse, verbose=0)
    assert_same_weights(same, dense, atol=1e-6)


def test_classifier_of_ours():
    classifier = tiny.classifier(router=ROUTER)
    backbone = classifier.backbone
    images = tiny.images(4)
    block = backbone.moe_layers[0]
    moe = backbone.blocks[block].moe
    change(moe)
    dense = converters.to_dense_model(classifier, images, verbose=0)
    assert type(dense) is type(classifier) and not dense.backbone.moe_layers
    assert dense.feature_difference > 0
    load = loads_of(backbone, images)[0]
    kernel = to_numpy(moe.experts.intermediate_dense.kernel)
    assert_near(
        to_numpy(dense.backbone.blocks[block].mlp.intermediate_dense.kernel),
        np.tensordot(load / load.sum(), kernel, 1),
        atol=1e-6,
    )
    np.testing.assert_array_equal(
        to_numpy(dense.output_dense.kernel), to_numpy(classifier.output_dense.kernel)
    )


def test_shared_expert():
    """The MLP computes the sum; blocks without experts compute what they did."""
    x = tiny.images(4)
    sparse = tiny.backbone(router=ROUTER, shared_mlp_dim=5, pooling="map")
    moe = sparse.blocks[1].moe
    for weight in moe.experts.weights:
        weight.assign(np.broadcast_to(to_numpy(weight)[:1], weight.shape))
    dense = converters.to_dense_model(sparse, x, verbose=0)
    assert dense.mlp_dim == 12 + 5 and not dense.moe_layers
    assert dense.feature_difference < 1e-5
    # New units of other MLPs are ready for training, and change nothing.
    kernel = to_numpy(dense.blocks[0].mlp.output_dense.kernel)
    assert np.all(kernel[12:] == 0) and np.all(kernel[:12] != 0)
    assert np.all(to_numpy(dense.blocks[0].mlp.intermediate_dense.kernel) != 0)
    moe.experts.output_dense.set_weights(
        [np.zeros_like(w) for w in moe.experts.output_dense.get_weights()]
    )
    mlp = converters.to_dense_model(sparse, verbose=0).blocks[1].mlp
    tokens = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("float32")
    expected = to_numpy(moe(tokens))
    assert_near(to_numpy(mlp(tokens)), expected, atol=1e-6)
    np.testing.assert_allclose(
        to_numpy(moe.shared_mlp(tokens)), expected, rtol=0, atol=0
    )


def test_soft_router_by_its_combine_weights():
    vit = FAMILIES["ViT"]()
    x = inputs_of(vit, 2)
    soft = converters.add_experts(vit, (1,), routers.SoftRouter(3), verbose=0)
    moe = soft.moe_layers[1]
    # Other combine weights than even ones
    moe.router.weights[-1].assign(moe.router.weights[-1] * 20)
    change(moe)
    dense = converters.to_dense_model(soft, x, verbose=0)
    with routers.record() as decisions:
        soft(x)
    (decision,) = decisions.values()
    weights = to_numpy(decision.routing.combine).sum(axis=(0, 1, 3))
    last = [y for path, y, _ in sublayers(dense) if path.endswith("mlp/dense_2")][1]
    bias = to_numpy(moe.experts.output_dense.bias)
    expected = np.tensordot(weights / weights.sum(), bias, 1)[0]
    assert_near(to_numpy(last.bias), expected, atol=1e-6)


def test_images_and_texts():
    limoe = tiny_limoe.backbone()
    x = tiny_limoe.pairs(4)
    dense = converters.to_dense_model(limoe, x, verbose=0)
    assert type(dense) is models.LIMoEBackbone and not dense.moe_layers
    assert 0 < dense.feature_difference < 10


def test_refusals():
    with pytest.raises(ValueError, match="A dense model has no experts"):
        converters.to_dense_model(tiny.backbone(**tiny.DENSE))
    with pytest.raises(ValueError, match="from `add_experts`.*model=<MLP"):
        converters.to_dense_model(layers.MLP(3))
    vit = FAMILIES["ViT"]()
    parts = converters.upcycle(
        vit, (1,), routers.SoftmaxTokenChoiceRouter(4, 2), split=2
    )
    with pytest.raises(ValueError, match="expert_mlp_dim=6"):
        converters.to_dense_model(parts)
    shared = converters.add_experts(vit, (1,), ROUTER, start="shared", verbose=0)
    x = inputs_of(vit)
    assert_near(shared.predict_on_batch(x), vit.predict_on_batch(x), atol=1e-5)
    with pytest.raises(ValueError, match="shared_mlp_dim=12 in block 1"):
        converters.to_dense_model(shared)
    lora = converters.add_experts(vit, (1,), ROUTER, verbose=0)
    lora.enable_lora(2)
    with pytest.raises(ValueError, match="without LoRA factors.*Merge.*merge_lora"):
        converters.to_dense_model(lora)
    with pytest.raises(ValueError, match='start="shared".*dense_1.*"copies"'):
        converters.add_experts(FAMILIES["CLIP"](), (1,), ROUTER, start="shared")
