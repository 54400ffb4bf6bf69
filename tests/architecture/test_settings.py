"""The records of architectures: names, defaults, checks, and changes.

They are read from configurations by `architecture/reading.py`.
"""

import dataclasses
import inspect
import json

import keras
import pytest

from keras_softmoe import architecture, catalogue, models, routers
from keras_softmoe.layers import MoE
from tests.models.test_two_towers import image_tower, text_tower
from tests.support import tiny, tiny_limoe

ROUTER = routers.SoftRouter(2)
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
VIT = {"image_shape": (8, 8, 3), "patch_size": 4, **SIZES}
TEXT = {"vocabulary_size": 9, "sequence_length": 5, **SIZES}
SETTINGS = {
    architecture.ViT: VIT,
    architecture.TextTower: TEXT,
    architecture.LIMoE: {**VIT, **TEXT},
    architecture.TwoTowers: {
        "image_backbone": architecture.ViT.of(VIT),
        "text_backbone": architecture.TextTower.of(TEXT),
    },
}
BACKBONES = {
    cls: getattr(models, cls.backbone) for cls in architecture.BY_NAME.values()
}


@pytest.mark.parametrize("cls", SETTINGS)
def test_names_and_defaults_are_those_of_the_backbone(cls):
    parameters = inspect.signature(BACKBONES[cls]).parameters
    expected = {
        name: dataclasses.MISSING if p.default is p.empty else p.default
        for name, p in parameters.items()
        if name not in ("name", "trainable")
    }
    assert cls.names() == expected


def test_mixtures_have_the_defaults_of_the_layer():
    parameters = inspect.signature(MoE).parameters
    for name, default in architecture.Mixture.names().items():
        assert parameters[name].default == default


@pytest.mark.parametrize("cls", SETTINGS)
def test_no_setting_has_a_name_of_keras(cls):
    # Each becomes an attribute of the model. These three are properties of it.
    own = {"dtype", "router", "group_images"}
    assert set(cls.names()) & set(dir(keras.Model)) <= own


@pytest.mark.parametrize("cls", SETTINGS)
def test_flat_and_back(cls):
    found = cls.of(SETTINGS[cls])
    # Left out where it is not given
    names = [name for name in cls.names() if name != "pyramid_blocks"]
    assert list(found.flat()) == names
    assert cls.of(found.flat()) == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.dtype = "float16"
    assert (found.replace(dtype="bfloat16").dtype, found.dtype) == ("bfloat16", None)


def test_sizes_are_kept_in_one_form():
    found = architecture.ViT.of({**VIT, "image_shape": [8, 8, 3], "patch_size": [4, 2]})
    assert (found.image_shape, found.patch_size) == ((8, 8, 3), (4, 2))
    assert found.patch_grid == (2, 4)
    sparse = found.replace(moe_layers=[1, 0], router=ROUTER)
    assert sparse.moe_layers == (0, 1) and sparse.routers == {0: ROUTER, 1: ROUTER}
    several = sparse.replace(router=[ROUTER, routers.IdentityRouter(3)])
    assert [r.num_experts for r in several.routers.values()] == [2, 3]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"depth": 3}, "`ViTMoEBackbone` are image_shape, .*Received: also depth"),
        ({"mlp_dims": 3}, r"also mlp_dims. Did you mean `mlp_dim`\?"),
        ({"num_heads": 3}, "must divide it"),
        ({"mlp_dim": 0}, "mlp_dim=0"),
        ({"moe_layers": (2,), "router": ROUTER}, "from 0 to 1"),
        ({"moe_layers": (1,)}, "go together"),
        ({"patch_size": 3}, "cover the image"),
        ({"pooling": "last"}, "Unknown `pooling`"),
        ({"position_embedding": "x"}, "Unknown `position_embedding`"),
        ({"num_registers": -1}, "num_registers=-1"),
        ({"representation_dim": 0}, "representation_dim=0"),
        ({"dispatcher": "fast"}, "Unknown `dispatcher`"),
    ],
)
def test_what_is_refused(changes, message):
    found = architecture.ViT.of(VIT)
    with pytest.raises(ValueError, match=message):
        found.replace(**changes)


def test_missing_settings():
    with pytest.raises(ValueError, match="Received: no image_shape, num_layers"):
        architecture.ViT.of({"patch_size": 4})


def test_widths_of_two_towers():
    found = architecture.TwoTowers.of(SETTINGS[architecture.TwoTowers])
    with pytest.raises(ValueError, match="5 for images, 8 for text"):
        found.replace(image_projection_dim=5)


def two_towers():
    return models.TwoTowerBackbone(image_tower(), text_tower(num_layers=2))


MODELS = {
    "vit": tiny.backbone,
    "dense vit": lambda: tiny.backbone(**tiny.DENSE, group_images=4),
    "text": text_tower,
    "limoe": tiny_limoe.backbone,
    "two towers": two_towers,
}


@pytest.mark.parametrize("name", MODELS)
def test_read_of_a_configuration(name):
    model = MODELS[name]()
    kind = keras.saving.get_registered_name(type(model))
    config = json.loads(json.dumps(model.get_config()))
    found, live = architecture.read(kind, config), model.architecture
    assert type(found) is type(live) and architecture.kind_of(config) == kind

    def plain(settings):
        settings = settings.flat()
        settings |= {
            name: plain(value)
            for name, value in settings.items()
            if isinstance(value, architecture.Settings)
        }
        return {n: x for n, x in settings.items() if n not in ("router", "dtype")}

    assert plain(found) == plain(live)


def test_the_architecture_follows_the_model():
    model = tiny.backbone(router=tiny.SPARSE)
    model.set_routing(capacity_factor=2.0, group_images=5)
    found = model.architecture
    assert found.routers[1].capacity_factor == 2.0 and found.group_images == 5


def test_a_router_that_cannot_be_made():
    config = {**VIT, "moe_layers": (1,), "router": {"class_name": "Nothing"}}
    with pytest.raises(ValueError, match="cannot be made"):
        architecture.read("keras_softmoe>ViTMoEBackbone", config)


def test_presets_go_to_a_record_and_back():
    for name in catalogue.names():
        found = architecture.read(*catalogue.read_config(name))
        assert type(found).of(found.flat()) == found
