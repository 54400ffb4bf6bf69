"""Files of `timm` and `transformers`, as models of this library.

The judge is a twin of them in NumPy. `test_torch_judges.py` compares with the libraries
themselves, where they are installed. Covers `checkpoints/safetensors.py`.
"""

import json

import keras
import pytest

from keras_softmoe import converters, routers
from tests.support import safetensors_file, tiny, torch_twin
from tests.support.close import assert_near
from tests.support.references import to_numpy

SHAPE = (12, 12, 3)
# Kind, and arguments of the twin.
CASES = {
    "timm": ("timm", {"head": True}),
    "timm, pre-logits": ("timm", {"head": True, "pre_logits": True}),
    "timm, distilled": ("timm", {"distillation": True}),
    "timm, registers": ("timm", {"registers": 4, "layer_scale": True, "positions": 0}),
    "timm, all have positions": ("timm", {"registers": 2, "positions": 3}),
    "vit": ("vit", {"pre_logits": True}),
    "vit, classifier": ("vit", {"prefix": "vit.", "head": True}),
    "deit": ("deit", {"prefix": "deit.", "distillation": True}),
    "dinov2": ("dinov2", {"layer_scale": True}),
    "dinov2, registers": ("dinov2", {"layer_scale": True, "registers": 2}),
}


def twin_of(case):
    kind, arguments = CASES[case]
    return kind, torch_twin.state(kind, **arguments), arguments.get("prefix", "")


def assert_computes(model, tokens, vector):
    images = tiny.images(2, model.input.shape[1:])
    backbone = getattr(model, "backbone", model)
    outputs = backbone(images, training=False)
    assert_close(outputs["sequence_output"], tokens)
    is_task = backbone is not model
    assert_close(model(images) if is_task else outputs["pooled_output"], vector)


def assert_close(ours, expected):
    assert_near(to_numpy(ours), expected, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_file(tmp_path, case):
    kind, arrays, prefix = twin_of(case)
    path = safetensors_file.save(tmp_path / "model.safetensors", arrays)
    about = {"num_attention_heads": torch_twin.HEADS}
    (tmp_path / "config.json").write_text(json.dumps(about))
    model = converters.dense_model(path)
    assert hasattr(model, "backbone") == ("head" in CASES[case][1])
    expected = torch_twin.forward(kind, arrays, tiny.images(2, SHAPE), prefix)
    assert_computes(model, *expected)
    if keras.backend.backend() != "torch" and "registers" not in case:
        # Two are enough where compiling takes long.
        return
    router = routers.SoftmaxTokenChoiceRouter(
        4, num_selected_experts=2, capacity_factor=2.0, normalize_gates=True
    )
    assert_computes(converters.upcycle(tmp_path, (1,), router), *expected)
