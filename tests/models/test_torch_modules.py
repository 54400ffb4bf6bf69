"""Layers and models as PyTorch modules: parameters, `state_dict`, dtype, `train()`.

Tests `keras_adapter/torch_modules.py`.
"""

import copy
import io
import warnings

import keras
import numpy as np
import pytest
import torch

from keras_softmoe import converters, layers, models, routers
from keras_softmoe.keras_adapter.surgery import named_weights
from keras_softmoe.routers import router as router_file
from tests.support import hub, tiny, tiny_limoe
from tests.support.close import assert_near
from tests.support.layer_checks import assert_trained
from tests.support.references import assert_all_equal

SPARSE = {"router": tiny.SPARSE}
TOKENS = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
TOKENS = keras.ops.convert_to_tensor(TOKENS)


class Block(torch.nn.Module):
    """A module of PyTorch around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.inner = inner

    def forward(self, x):
        return self.linear(x) + self.inner(x)


class Subclassed(keras.Model):
    """A user's model with a module of PyTorch beside our layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.SoftMoE(2, 3), layers.SoftMoE(2, 3)
        self.norm = torch.nn.BatchNorm1d(6)

    def call(self, x):
        return self.norm(self.second(self.first(x))[:, 0])


def built(layer):
    layer.build((None, 5, 6))
    return layer


def soft_moe(**kwargs):
    return built(layers.SoftMoE(2, 3, **kwargs))


def template():
    expert = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(6)])
    return built(layers.MoE(routers.SoftRouter(2), expert=expert))


def subclassed():
    model = Subclassed()
    model(TOKENS)
    return model


def towers():
    text = models.TextMoEBackbone(20, 4, **tiny.SIZES_OF_BLOCKS)
    image = tiny.backbone(num_layers=1, **tiny.DENSE)
    backbone = models.TwoTowerBackbone(image, text, text_projection_dim=8)
    return models.TwoTowerContrastive(backbone)


def of_backbones(*backbones):
    """A user's functional model: a head on features of images, one input for each."""
    inputs = [keras.Input(tiny.IMAGE_SHAPE) for _ in backbones]
    pairs = zip(backbones, inputs, strict=True)
    features = [backbone(x)["pooled_output"] for backbone, x in pairs]
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Add()(features)))


def adapted(model):
    """Give the first backbone in a model factors of LoRA, after the model was made."""
    parts = [model, *model.layers]
    next(x for x in parts if isinstance(x, models.ViTMoEBackbone)).enable_lora(2)
    return model


def quantized(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.quantize("int8")
    return model


def reloaded(model):
    model.save("model.keras")
    return keras.saving.load_model("model.keras")


def from_preset():
    tiny.classifier().save_to_preset("preset")
    return models.ViTMoEImageClassifier.from_preset("preset")


def with_experts(name):
    return converters.add_experts(hub.make(name), (1,), tiny.SPARSE, verbose=0)


def same_twice():
    backbone = tiny.backbone()
    return of_backbones(backbone, backbone)


MODELS = {
    "layer": soft_moe,
    "templates": template,
    "in PyTorch": lambda: Block(soft_moe()),
    "Sequential": lambda: keras.Sequential([keras.Input((5, 6)), soft_moe()]),
    "subclass": subclassed,
    "classifier": lambda: tiny.classifier(**SPARSE),
    "LoRA": lambda: adapted(tiny.classifier(**SPARSE)),
    "int8": lambda: quantized(tiny.classifier(**SPARSE)),
    "preset": from_preset,
    "LIMoE": lambda: models.LIMoEContrastive(tiny_limoe.backbone()),
    "two towers": towers,
    "two towers, file": lambda: reloaded(towers()),
    "two backbones": lambda: of_backbones(tiny.backbone(), tiny.backbone()),
    "two, LoRA": lambda: adapted(of_backbones(tiny.backbone(), tiny.backbone())),
    "twice": same_twice,
    "add_experts": lambda: with_experts("ViTBackbone"),
    "add_experts(task)": lambda: with_experts("ViTImageClassifier"),
    "to_dense_model": lambda: converters.to_dense_model(
        with_experts("ViTImageClassifier"), verbose=0
    ),
}


def weights_of(model):
    if isinstance(model, Block):
        return [*model.inner.weights]
    return model.weights


@tiny.LOADING
@pytest.mark.parametrize("name", MODELS)
def test_each_weight_is_a_parameter_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = MODELS[name]()
    weights = weights_of(model)
    assert len(weights) > 4
    expected = sorted(id(weight.value) for weight in weights)
    own = {id(p) for p in model.linear.parameters()} if name == "in PyTorch" else set()
    listed = [p for _, p in model.named_parameters(remove_duplicate=False)]
    assert sorted(id(p) for p in listed if id(p) not in own) == expected
    for parameter in listed:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    model.zero_grad()
    assert [w.path for w in weights if w.value.grad is not None] == []
    # One more instance has other counters in its names.
    values = model.state_dict()
    assert len(values) == len(weights) + len(own) + len(list(model.buffers()))
    other = MODELS[name]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    # Keras does not see that its own modules or those of PyTorch get new parameters.
    assign = name not in ("subclass", "to_dense_model")
    other.load_state_dict(torch.load(file), assign=assign)
    assert_all_equal(weights_of(other), weights)


def test_names_have_no_counters():
    names = [name for name, _ in named_weights(of_backbones(*map(_named, "ab")))]
    assert len(names) == len(set(names))
    assert names[0] == "a/patch_embedding/projection/kernel"
    assert "b/block_1/moe/router/mu" in names
    assert names[-2:] == ["dense/kernel", "dense/bias"]
    pair = [keras.layers.Dense(2), keras.layers.Dense(2)]
    names = [name for name, _ in named_weights(keras.Sequential(pair))]
    assert names == []
    both = keras.Sequential([keras.Input((2,)), *pair])
    names = [name for name, _ in named_weights(both)]
    assert names == ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"]


def _named(name):
    return tiny.backbone(name=name)


def test_models_without_our_layers_are_as_keras_makes_them():
    x = keras.Input((2,))
    plain = keras.Model(x, keras.layers.Dense(2, name="head")(x))
    assert type(plain.torch_params) is torch.nn.ParameterDict
    assert set(plain.torch_params) == {"head/kernel", "head/bias"}


def test_gradients_of_two_towers_are_cleared():
    """As many `fit`s of one step, with gradients cleared by hand between them."""
    x = [tiny.images(2), tiny.images(2, seed=1)]
    data = {"x": x, "y": tiny.labels(2), "batch_size": 2, "verbose": 0}
    results = []
    for by_hand in (False, True):
        model = of_backbones(_named("a"), _named("b"))
        values = np.random.default_rng(0)
        for weight in model.weights:
            weight.assign(0.3 * values.normal(size=weight.shape))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        for _ in range(3 if by_hand else 1):
            for weight in model.trainable_weights:
                weight.value.grad = None
            model.fit(**data, epochs=1 if by_hand else 3)
        results.append(model.get_weights())
    for one, other in zip(*results, strict=True):
        assert_near(one, other, rtol=1e-5, atol=1e-6)


def test_a_loop_of_pytorch_trains_what_it_is_given():
    block = copy.deepcopy(Block(soft_moe()))
    before = [w.numpy().copy() for w in block.inner.weights]
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
    torch.sum(block(TOKENS) ** 2).backward()
    optimizer.step()
    assert_trained(block.inner, before, least=0)


@pytest.mark.parametrize(
    ("make", "name"),
    [(soft_moe, "layer"), (lambda: tiny.classifier(), "model"), (template, "template")],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_is_refused(make, name, dtype):
    model = make()
    known = {p.dtype for p in model.parameters()}
    message = rf"Received: {dtype} .*dtype='float32'.*`dtype='{str(dtype)[6:]}'`"
    with pytest.raises(ValueError, match=message):
        model.to(dtype)
    assert {p.dtype for p in model.parameters()} == known == {torch.float32}
    assert model.float() is model
    assert model.to("cpu") is model


def test_the_dtype_of_the_policy_is_taken():
    block = Block(soft_moe(dtype="bfloat16")).to(torch.bfloat16)
    # That of the router stays.
    assert block.inner.moe.router.mu.value.dtype == torch.float32
    assert block(TOKENS.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="'bfloat16'"):
        block.float()


@pytest.fixture
def said():
    """Warnings of a test, all of them."""
    router_file._warn_of_mode.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found
    router_file._warn_of_mode.cache_clear()


def sparse_moe(**kwargs):
    router = routers.SoftmaxTokenChoiceRouter(2, **kwargs)
    return built(layers.MoE(router, mlp_dim=3, group_images=2))


def test_train_of_a_module_is_said_not_to_reach_routers(said):
    block = Block(sparse_moe()).train()
    block(TOKENS)
    block(TOKENS)
    assert len(said) == 1
    assert "`training=True`" in str(said[0].message)
    assert block.inner.losses == []
    block.inner(TOKENS, training=True)
    assert len(block.inner.losses) == 1


def test_train_of_a_model_and_of_an_unbuilt_layer_is_said(said):
    tiny.classifier(**SPARSE).train()(tiny.images(2))
    assert len(said) == 1
    router_file._warn_of_mode.cache_clear()
    moe = layers.MoE(routers.SoftmaxTokenChoiceRouter(2), mlp_dim=3, group_images=2)
    Block(moe).train()(TOKENS)
    assert len(said) == 2


@pytest.mark.filterwarnings("error")
def test_where_nothing_is_said(said):
    block = Block(sparse_moe())
    # Keras' own way, in which modules begin in the mode of training
    block(TOKENS)
    block.train()
    block.inner(TOKENS, training=True)
    block.inner(TOKENS, training=False)
    with torch.no_grad():
        block(TOKENS)
    block.eval()
    block(TOKENS)
    # Without losses, noise and state, training changes nothing.
    Block(sparse_moe(noise_std=0.0, losses=())).train()(TOKENS)
    Block(soft_moe()).train()(TOKENS)
    model = tiny.classifier(**SPARSE)
    model.fit(tiny.images(2), tiny.labels(2), batch_size=2, verbose=0)
    model(tiny.images(2))
    model.predict(tiny.images(2), verbose=0)
    model.evaluate(tiny.images(2), tiny.labels(2), verbose=0)
    assert [str(w.message) for w in said if "`training=" in str(w.message)] == []


def test_parameters_of_an_unbuilt_layer(said):
    block = Block(layers.SoftMoE(2, 3))
    assert len(list(block.parameters())) == 2
    assert "`layer.build(shape)`" in str(said[0].message)
    block(TOKENS)
    del said[:]
    assert len(list(block.parameters())) == 2 + 6
    assert said == []
