"""PyTorch's way to an accelerator, seen on a processor.

A fake tensor has a device and a shape, but no values: tensors of two devices in one
operation, and values that are read back, are errors.
"""

import keras
import pytest

from keras_softmoe import routers
from tests.support import tiny, tiny_limoe

torch = pytest.importorskip("torch")

SPARSE = {"group_images": 2}
CLASSIFIERS = {
    "dense": tiny.DENSE,
    "soft": {},
    "token choice": {"router": tiny.SPARSE, **SPARSE},
    "expert choice": {"router": routers.SoftmaxExpertChoiceRouter(4), **SPARSE},
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [*CLASSIFIERS, "limoe"])
def test_all_tensors_are_on_the_device(kind, training):
    from torch._subclasses import FakeTensorMode

    if kind == "limoe":
        model = tiny_limoe.backbone()
        inputs = {
            "images": tiny.images(tiny_limoe.BATCH),
            "token_ids": tiny_limoe.token_ids(),
        }
    else:
        model, inputs = tiny.classifier(**CLASSIFIERS[kind]), tiny.images(4)
    inputs = keras.tree.map_structure(torch.as_tensor, inputs)
    weights = [(v, v.value.detach().cpu()) for v in model.variables]
    with keras.device("cuda:0"), FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(tensor):
            return mode.from_tensor(tensor).to("cuda")

        weights = [(variable, fake(value)) for variable, value in weights]
        for variable, value in weights:
            value.requires_grad_(variable.trainable)
        with keras.StatelessScope(state_mapping=weights):
            outputs = model(keras.tree.map_structure(fake, inputs), training=training)
        outputs = keras.tree.flatten(outputs)
        assert {x.device.type for x in outputs} == {"cuda"}
        sum(x.sum() for x in outputs).backward()


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_model_is_one_graph(kind):
    torch._dynamo.reset()
    model = tiny.classifier(**CLASSIFIERS[kind])
    x = keras.ops.convert_to_tensor(tiny.images(4))
    with torch.no_grad():
        found = torch._dynamo.explain(model)(x)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
