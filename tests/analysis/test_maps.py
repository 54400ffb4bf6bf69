"""Routing maps against the routers' own decisions, patch by patch."""

import keras
import numpy as np
import pytest

from keras_softmoe.analysis import routing_maps
from keras_softmoe.analysis._maps import RoutingMaps, main_experts
from keras_softmoe.models import (
    ViTMoEBackbone,
    ViTMoEImageClassifier,
    ViTMoEImageClassifierPreprocessor,
    ViTMoEImageConverter,
)
from keras_softmoe.routers import SoftmaxTokenChoiceRouter, SoftRouter

# 2 x 3 patches, so that rows cannot be taken for columns.
GRID = (2, 3)
IMAGE_SHAPE = (8, 12, 3)


def make_backbone(router, **kwargs):
    arguments = {"moe_layers": (1,) if router else (), "router": router, **kwargs}
    return ViTMoEBackbone(IMAGE_SHAPE, 4, 2, 2, 8, 16, **arguments)


def make_images(count):
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, (count, *IMAGE_SHAPE)).astype("float32")


@pytest.mark.parametrize("pooling", ["gap", "token"])
def test_soft_weights_lie_on_the_grid(pooling):
    router = SoftRouter(4, slots_per_expert=2)
    backbone = make_backbone(router, pooling=pooling, moe_layers=(0, 1))
    images = make_images(2)
    maps = routing_maps(backbone, images, layer=1)
    routing = backbone.route(images)[1].routing
    first = int(pooling == "token")
    assert maps.layer == 1
    assert routing_maps(backbone, images).layer == 0
    assert maps.dispatch.shape == maps.combine.shape == (2, *GRID, 4, 2)
    for found, wanted in zip((maps.dispatch, maps.combine), routing, strict=True):
        wanted = keras.ops.convert_to_numpy(wanted)
        for row, column in np.ndindex(GRID):
            token = wanted[:, first + row * GRID[1] + column]
            np.testing.assert_allclose(found[:, row, column], token, rtol=1e-5)
    total = maps.dispatch.sum(axis=(1, 2))
    if pooling == "gap":
        np.testing.assert_allclose(total, 1.0, rtol=1e-5)
    else:
        assert (total < 1.0).all()


def test_seats_of_grouped_images_find_their_image():
    # Six images in groups of four: the second group is half padding.
    router = SoftmaxTokenChoiceRouter(3, 2, capacity_factor=0.6)
    backbone = make_backbone(router, pooling="token", group_images=4)
    images = make_images(6)
    maps = routing_maps(backbone, images)
    routing = backbone.route(images)[1].routing
    token, filled, gate = (keras.ops.convert_to_numpy(part) for part in routing)
    num_tokens = 1 + GRID[0] * GRID[1]
    dispatch, combine = np.zeros((2, *maps.dispatch.shape))
    for group, expert, slot in np.argwhere(filled):
        image, place = divmod(token[group, expert, slot], num_tokens)
        if place > 0:
            seat = (4 * group + image, *divmod(place - 1, GRID[1]), expert, slot)
            dispatch[seat] = 1.0
            combine[seat] = gate[group, expert, slot]
    assert dispatch.sum() > 0
    np.testing.assert_array_equal(maps.dispatch, dispatch)
    np.testing.assert_allclose(maps.combine, combine, rtol=1e-5)


def test_a_task_brings_its_preprocessor():
    backbone = make_backbone(SoftRouter(2))
    preprocessor = ViTMoEImageClassifierPreprocessor(ViTMoEImageConverter())
    task = ViTMoEImageClassifier(backbone, 3, preprocessor=preprocessor)
    pixels = np.random.default_rng(0).integers(0, 256, (2, *IMAGE_SHAPE), "uint8")
    maps = routing_maps(task, pixels)
    np.testing.assert_allclose(maps.images, pixels / 127.5 - 1, atol=1e-6)
    given = routing_maps(backbone, pixels, preprocessor=ViTMoEImageConverter())
    np.testing.assert_allclose(maps.dispatch, given.dispatch, rtol=1e-6)


def test_main_experts():
    # One image of three patches, two experts of two slots.
    combine = np.array(
        [
            # 0.5 + 0.0 against 0.3 + 0.3
            [[0.5, 0.0], [0.3, 0.3]],
            # equal: the lower number
            [[0.2, 0.3], [0.5, 0.0]],
            # no seat
            [[0.0, 0.0], [0.0, 0.0]],
        ]
    )[None, None]
    dispatch = (combine > 0).astype("float32")
    maps = RoutingMaps(dispatch, combine, np.zeros((1, 4, 12, 3)), 0, 3)
    assert main_experts(maps).tolist() == [[[1, 0, -1]]]


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="dense model routes nothing"):
        routing_maps(make_backbone(None), make_images(1))


def test_wrong_arguments():
    backbone = make_backbone(SoftRouter(2))
    with pytest.raises(ValueError, match=r"blocks \(1,\).*layer=0"):
        routing_maps(backbone, make_images(1), layer=0)
    with pytest.raises(ValueError, match="preprocessor.*dtype=uint8"):
        routing_maps(backbone, np.zeros((1, *IMAGE_SHAPE), "uint8"))
    for images in (make_images(1)[0], make_images(1)[:, :4], make_images(0)):
        with pytest.raises(ValueError, match=r"batches of \(8, 12, 3\).*shape="):
            routing_maps(backbone, images)
