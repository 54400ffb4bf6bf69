"""What is not tested everywhere, and why: all of it is here.

`RUNS_ON` lists files that are not collected on some backends, `REASONS` why a test of
the others is skipped. A test that is skipped for another reason fails (`conftest.py`).
Nothing is skipped for want of a file of this repository.
"""

import importlib

import keras
import pytest

BACKEND = keras.backend.backend()

REASONS = {
    # The feature belongs to some backends.
    "distribution": "Keras distributes models on JAX only; `distribution/"
    "test_backends.py` tests what others say",
    "refusal": "not refused on this backend, which has a test of what it does",
    "stream": "PyTorch refuses it; a test of that is beside this one",
    "own loop": "a loop, compiler or format of another backend",
    "own onnx": "TensorFlow writes ONNX itself, with no other process to tell",
    # The same code everywhere, tested where that is quick.
    "one file": "what another process writes is the same from everywhere",
    "one backend": "the same code on all backends, tested on another one",
    "page": "this page is tested on another backend",
    # What a machine need not have.
    "package": "a package that the extra `test` does not ask for, such as timm, is "
    "missing or does not fit the others",
    "browser": "there is no Chromium",
    "mount": "nothing can be mounted here",
}

# Files that do not run on every backend, so that the suites are short and take equally
# long: of what computes without one, and of what is long and made of parts that are
# tested on all. (`models/test_backends.py` compares presets on all of them.)
RUNS_ON = {
    # Figures and tables of arrays, and sums over decisions: `test_blocks.py` and
    # `test_soft.py` see decisions of every backend.
    "analysis/test_concentration.py": ("torch",),
    "analysis/test_examples.py": ("torch",),
    "analysis/test_figures.py": ("torch",),
    "analysis/test_maps.py": ("torch",),
    "analysis/test_masked_padding.py": ("torch",),
    "analysis/test_modalities.py": ("torch",),
    "analysis/test_monitor.py": ("torch",),
    "analysis/test_page.py": ("torch",),
    "analysis/test_panels_*.py": ("torch",),
    "analysis/test_report*.py": ("torch",),
    "analysis/test_routing.py": ("torch",),
    "analysis/test_streaming.py": ("torch",),
    "analysis/test_words.py": ("torch",),
    "catalogue/*": ("torch",),
    "checkpoints/test_checkpoint.py": ("torch",),
    "checkpoints/test_checkpoint_fuzz.py": ("jax",),
    "checkpoints/test_hostile_checkpoints.py": ("torch",),
    "checkpoints/test_remote.py": ("tensorflow",),
    "checkpoints/test_safetensors.py": ("tensorflow",),
    "checkpoints/test_vit*.py": ("torch",),
    # Each use of Keras is tested on all where the library makes it.
    "test_keras_adapter.py": ("torch",),
    "sharding/*": ("torch",),
    "layers/test_dropless_limits.py": ("torch",),
    # What it does in a layer is tested on all: `layers/test_lora.py`,
    # `layers/test_quantized_experts.py`.
    "backbones/test_adaptation.py": ("torch",),
    "models/test_conversion.py": ("torch",),
    "backbones/test_data.py": ("torch",),
    "models/test_dense_sources.py": ("tensorflow", "torch"),
    "models/test_torch_files.py": ("torch",),
    "models/test_upcycling.py": ("torch",),
    # `timm` and `transformers` are of PyTorch.
    "models/test_torch_judges.py": ("torch",),
    "datasets/*": ("jax",),
    "distribution/test_plan*.py": ("jax",),
    "architecture/*": ("torch",),
    "evaluation/test_cost.py": ("torch",),
    "evaluation/test_described.py": ("torch",),
    "evaluation/test_limoe_cost.py": ("torch",),
    "evaluation/test_pruning.py": ("torch",),
    "evaluation/test_sweep*.py": ("torch",),
    "examples/test_types.py": ("torch",),
    "experiments/*": ("torch",),
    "models/test_broken_presets.py": ("torch",),
    "backbones/test_contrastive_preprocessor.py": ("torch",),
    "backbones/test_pruning.py": ("torch",),
    "models/test_token_statistics.py": ("torch",),
    "reference/test_coverage.py": ("torch",),
    "test_benchmark*.py": ("torch",),
    "test_checks.py": ("torch",),
    "test_files.py": ("torch",),
    "test_imports.py": ("torch",),
    "test_language.py": ("torch",),
    "test_moved.py": ("torch",),
    "test_package.py": ("jax",),
    "test_pages.py": ("torch",),
    "test_security.py": ("torch",),
    "test_trained_*.py": ("torch",),
    # A hundredth of what `make torture` does on each backend.
    "torture/*": ("torch",),
    "training/test_contrastive_recipes.py": ("torch",),
    "training/test_finetuning.py": ("torch",),
    "training/test_pair_pipeline.py": ("torch",),
    "training/test_recipes.py": ("torch",),
    "training/test_soups.py": ("torch",),
}


def only_on(*backends, because):
    """Mark of tests that run on some backends only.

    Args:
        *backends: str, names of backends.
        because: str, a key of `REASONS`.
    """
    return pytest.mark.skipif(BACKEND not in backends, reason=REASONS[because])


def needs(name):
    """A module of a package that the extra `test` does not ask for, or a skip."""
    # A release may not fit the other packages that are installed.
    try:
        return importlib.import_module(name)
    except Exception:
        pytest.skip(REASONS["package"])
