"""The pyramid of a ViT, and segmentation on it.

Covers `models/image_segmenter.py`, `models/image_preprocessor.py`, `models/vit.py`,
`layers/pooling.py`, `architecture/towers.py`, `evaluation/model_cost.py`.
"""

import keras
import keras_hub
import numpy as np
import pytest

from keras_softmoe import converters, distribution, evaluation, exporting, models
from tests import skips
from tests.converters.test_tasks_with_experts import difference
from tests.support import close, tiny
from tests.support.layer_checks import from_preset, randomize, reloaded
from tests.support.references import to_numpy
from tests.support.tasks import deeplab, retinanet

hub = keras_hub.models
SIZES = {"image_shape": (64, 64, 3), "patch_size": 16}


def images(*size, number=2):
    rng = np.random.default_rng(0)
    return rng.normal(size=(number, *(size or (64, 64)), 3)).astype("float32")


def segmenter(decoder_dim=4, backbone=None, **head):
    known = {"preprocessor": None, "decoder_dim": decoder_dim, **head}
    backbone = backbone or tiny.backbone(**SIZES, router=tiny.SPARSE)
    model = models.ViTMoEImageSegmenter(backbone, 3, **known)
    randomize(model)
    return model


def mean_iou(masks, outputs):
    pairs = [(to_numpy(masks) == c, outputs.argmax(-1) == c) for c in range(3)]
    found = [(a & b).sum() / (a | b).sum() for a, b in pairs if (a | b).any()]
    return np.mean(found)


# === Pyramid ===


@pytest.mark.parametrize("pooling", ["token", "gap"])
def test_maps_are_the_patches(pooling):
    backbone = tiny.backbone(**SIZES, pooling=pooling, num_registers=2)
    assert isinstance(backbone, hub.FeaturePyramidBackbone)
    x = images()
    maps = keras.Model(backbone.inputs, backbone.pyramid_outputs)([x])
    maps = {name: to_numpy(value) for name, value in maps.items()}
    tokens = to_numpy(backbone(x)["sequence_output"])
    patches = tokens[:, 2 + (pooling == "token") :].reshape(2, 4, 4, -1)
    close.assert_near(maps["P4"], patches)
    windows = patches.reshape(2, 2, 2, 2, 2, -1)
    close.assert_near(maps["P5"], windows.max((2, 4)))
    # Between the centres of patches, a quarter of the way
    row = 0.75 * patches[:, 0, 0] + 0.25 * patches[:, 0, 1]
    close.assert_near(maps["P3"][:, 0, 1], row, atol=1e-6)
    assert maps["P2"].shape == (2, 16, 16, 8)


def test_maps_of_chosen_blocks(tmp_path):
    backbone = tiny.backbone(**SIZES, pyramid_blocks=(0, 1))
    assert backbone.get_config()["pyramid_blocks"] == (0, 1)
    assert "pyramid_blocks" not in tiny.backbone().get_config()
    maps = keras.Model(backbone.inputs, backbone.pyramid_outputs)
    first = keras.Model(backbone.inputs, backbone.get_layer("block_0").output)
    expected = backbone.get_layer("encoder_norm")(first([images()]))[:, 1:]
    expected = to_numpy(expected).reshape(2, 4, 4, -1)
    found = to_numpy(maps([images()])["P2"])
    close.assert_near(found[:, 0, 0], expected[:, 0, 0], atol=1e-6)
    again = from_preset(backbone, tmp_path / "preset")
    graph = keras.Model(again.inputs, again.pyramid_outputs)
    assert difference(maps, graph, [images()]) == 0
    for wrong in ((), (2,), 1, (0,) * 7):
        with pytest.raises(ValueError, match="`pyramid_blocks` has one to 6 block"):
            tiny.backbone(pyramid_blocks=wrong)


@pytest.mark.filterwarnings("ignore:The structure of `inputs` doesn't match")
@pytest.mark.parametrize("make", [deeplab, retinanet])
def test_tasks_of_kerashub_on_our_pyramid(make, tmp_path):
    router = tiny.routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=4.0, normalize_gates=True
    )
    dense = tiny.backbone(**SIZES, **tiny.DENSE)
    sparse = converters.upcycle(dense, (1,), router)
    tasks = [make(encoder) for encoder in (dense, sparse)]
    heads = []
    for task, encoder in zip(tasks, (dense, sparse), strict=True):
        own = {id(weight) for weight in encoder.weights}
        heads.append([w for w in task.weights if id(w) not in own])
    for old, new in zip(*heads, strict=True):
        new.assign(to_numpy(old))
    assert difference(*tasks, images()) < 1e-5
    assert (
        difference(tasks[1], reloaded(tasks[1], tmp_path, compile=False), images()) == 0
    )


# === Segmenter ===


@tiny.FITTING
def test_fit_and_figures():
    converter = models.ViTMoEImageConverter(image_size=(64, 64))
    preprocessor = models.ViTMoEImageSegmenterPreprocessor(converter)
    model = segmenter(preprocessor=preprocessor)
    model.compile(keras.optimizers.Adam(3e-2))
    # Classes by brightness, in images of another size
    masks = np.repeat(np.arange(3), 16)[None, :, None] * np.ones((8, 1, 40), int)
    x = (120 * masks[..., None] * np.ones(3)).astype("uint8")
    history = model.fit(x, masks, epochs=25, batch_size=4, verbose=0).history
    assert history["mean_iou"][-1] > 0.75 > history["mean_iou"][0]
    assert "routing_loss" in history
    found = model.evaluate(x, masks[..., None], verbose=0, return_dict=True)
    predicted, expected = model.predict(x, verbose=0), preprocessor(x, masks)[1]
    assert found["mean_iou"] == pytest.approx(mean_iou(expected, predicted), abs=1e-5)
    model.fit(x, masks, sample_weight=np.zeros(8), verbose=0)
    assert model.predict(x[:0], verbose=0).shape == (0, 64, 64, 3)


def test_any_loss_has_figures():
    masks = np.random.default_rng(0).integers(3, size=(2, 64, 64))
    model, found = segmenter(), []
    for loss, y in (("mse", np.eye(3)[masks]), (lambda y, x: x[..., 0], masks)):
        model.compile(loss=loss)
        found.append(model.evaluate(images(), y, verbose=0, return_dict=True))
    expected = mean_iou(masks, model.predict(images(), verbose=0))
    for result in found:
        assert result["mean_iou"] == pytest.approx(expected, abs=1e-5)


def test_pixels_of_an_ignored_class_do_not_count():
    loss = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=255)
    model = segmenter()
    model.compile(loss=loss)
    masks = np.random.default_rng(0).integers(3, size=(2, 64, 64))
    masks[:, :32] = 255
    found = model.evaluate(images(), masks, verbose=0, return_dict=True)
    predicted = model.predict(images(), verbose=0)[:, 32:]
    expected = mean_iou(masks[:, 32:], predicted)
    assert found["mean_iou"] == pytest.approx(expected, abs=1e-5)


def test_pixels_have_weights():
    """As if pixels of weight 0 were of an ignored class; of another size, resized."""
    converter = models.ViTMoEImageConverter(image_size=(64, 64))
    preprocessor = models.ViTMoEImageSegmenterPreprocessor(converter)
    model = segmenter(preprocessor=preprocessor)
    rng = np.random.default_rng(0)
    x, masks = 255 * rng.random((2, 32, 32, 3)), rng.integers(3, size=(2, 32, 32))
    weight = np.ones((2, 32, 32), "float32")
    weight[:, :16] = 0
    model.compile(keras.optimizers.SGD(0.1), weighted_metrics="auto")
    found = model.evaluate(x, masks, None, weight, verbose=0, return_dict=True)
    predicted = model.predict(x, verbose=0)[:, 32:]
    expected = mean_iou(preprocessor(x, masks)[1][:, 32:], predicted)
    assert found["weighted_mean_iou"] == pytest.approx(expected, abs=1e-5)
    assert found["mean_iou"] != pytest.approx(expected, abs=1e-5)
    loss = keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")
    of_half = loss(preprocessor(x, masks)[1][:, 32:], predicted) / (2 * 64 * 64)
    assert found["loss"] == pytest.approx(float(of_half), rel=1e-4)
    history = model.fit(x, masks[..., None], sample_weight=weight[..., None], verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    for wrong in (weight[:, 1:], np.ones((2, 3))):
        with pytest.raises(ValueError, match=r"of each pixel of a mask, \('N', 32, 32"):
            model.fit(x, masks, sample_weight=wrong, verbose=0)


@pytest.mark.parametrize("pads", [False, True])
def test_images_and_masks_are_resized_alike(pads):
    masks = np.zeros((1, 20, 40), "uint8")
    masks[:, 4:10, 12:30] = 3
    arguments = {"pad_to_aspect_ratio": True} if pads else {}
    converter = models.ViTMoEImageConverter(
        (10, 10),
        scale=1.0,
        offset=0.0,
        interpolation="nearest",
        **{"crop_to_aspect_ratio": not pads, **arguments},
    )
    preprocessor = models.ViTMoEImageSegmenterPreprocessor(converter, pad_label=0)
    x, y = preprocessor(masks[..., None].astype("float32"), masks)
    assert np.array_equal(to_numpy(x)[..., 0], to_numpy(y)) and to_numpy(y).max() == 3
    _, y, weight = preprocessor(x, masks, masks / 3)
    assert np.array_equal(to_numpy(y) / 3, to_numpy(weight))
    assert preprocessor(x, masks[..., None])[1].shape == (1, 10, 10, 1)


@tiny.LOADING
@pytest.mark.parametrize("decoder_dim", [None, 4])
def test_files(decoder_dim, tmp_path):
    converter = models.ViTMoEImageConverter(image_size=(64, 64))
    preprocessor = models.ViTMoEImageSegmenterPreprocessor(converter, pad_label=2)
    model = segmenter(decoder_dim, preprocessor=preprocessor, activation="softmax")
    assert to_numpy(model(images())).sum(-1) == pytest.approx(1, abs=1e-5)
    assert difference(model, reloaded(model, tmp_path), images()) == 0
    folder = tmp_path / "preset"
    loaded = from_preset(model, folder, hub.ImageSegmenter)
    assert type(loaded) is type(model) and loaded.preprocessor.pad_label == 2
    assert difference(model, loaded, images()) == 0
    other = type(model).from_preset(str(folder), image_shape=(48, 32, 3))
    assert other.predict(images(9, 7), verbose=0).shape == (2, 48, 32, 3)
    quantized = type(model).from_preset(str(folder))
    quantized.quantize("int8")
    assert difference(quantized, reloaded(quantized, tmp_path), images()) == 0


def test_upcycled_from_its_preset(tmp_path):
    model = segmenter(backbone=tiny.backbone(**SIZES, **tiny.DENSE))
    model.save_to_preset(str(tmp_path))
    router = tiny.routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=None, normalize_gates=True
    )
    for source in (model, str(tmp_path)):
        sparse = converters.upcycle(source, (1,), router)
        assert type(sparse) is type(model) and sparse.backbone.moe_layers == (1,)
        assert difference(model, sparse, images()) < 1e-5


@tiny.LOADING
def test_from_the_preset_of_a_classifier():
    cls, name = models.ViTMoEImageSegmenter, "vmoe_tiny_patch8_8e_32_icons"
    model = cls.from_preset(name, num_classes=2)
    assert model.predict(images(32, 32), verbose=0).shape == (2, 32, 32, 2)
    assert isinstance(model.preprocessor, cls.preprocessor_cls)


def test_wrong_masks_are_refused():
    model = segmenter()
    for masks, message in (
        (np.full((2, 64, 64), 3), r"from 0 to 2, one for each pixel. Received: .*3"),
        (np.zeros((2, 32, 64)), r"must have the shape \('N', 64, 64\)"),
        (np.full((2, 64, 64), "a"), "masks of dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(images(), masks, verbose=0)
    with pytest.raises(ValueError, match="Weigh classes in the `loss`"):
        model.fit(images(), np.zeros((2, 64, 64)), class_weight={0: 2.0}, verbose=0)


def test_cost_plan_and_ways_to_experts():
    model = segmenter(backbone=tiny.backbone(**SIZES, router=tiny.SOFT))
    found = evaluation.cost(model)
    of_backbone = evaluation.cost(model.backbone)
    assert found.parameters == model.count_params()
    # Projections of 340 places, a convolution, and classes at 256 places
    products = 340 * 8 * 4 + 256 * (9 * 4 * 4 + 4 * 3)
    extra = found.gflop_per_image - of_backbone.gflop_per_image
    assert extra == pytest.approx(2e-9 * products, rel=1e-6)
    with pytest.raises(ValueError, match="`cost` counts the name or directory"):
        distribution.plan(model, devices=2, memory=1e9)
    with pytest.raises(ValueError, match="get experts from `ksm.converters.upcycle`"):
        converters.add_experts(model, (1,), tiny.SOFT)


@skips.only_on("torch", because="one file")
def test_exported_file(tmp_path):
    import torch

    model = segmenter()
    exporting.export_model(model, tmp_path / "s.pt2", format="torch", verbose=False)
    run = torch.export.load(tmp_path / "s.pt2").module()
    x = torch.tensor(images())
    close.assert_near(to_numpy(run(x)), to_numpy(model(x)), atol=1e-4)
