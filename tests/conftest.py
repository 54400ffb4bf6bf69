"""Shared fixtures: reproducible tests, and saved noise in place of drawn noise."""

import gc

import hypothesis
import keras
import numpy as np
import pytest

# Tests that do not run on every backend, so that the suites are short and take equally
# long: of what computes without one, and of what is long and made of parts that are
# tested on all. (`models/test_backends.py` compares presets on all of them.)
RUNS_ON = {
    # Figures and tables of arrays, and what is counted over decisions: `test_load.py`,
    # `test_statistics.py` and `test_soft_statistics.py` see those of every backend.
    "analysis/test_by_modality.py": ("torch",),
    "analysis/test_information.py": ("torch",),
    "analysis/test_maps.py": ("torch",),
    "analysis/test_modality_examples.py": ("torch",),
    "analysis/test_monitor.py": ("torch",),
    "analysis/test_plot_*.py": ("torch",),
    "analysis/test_report*.py": ("torch",),
    "analysis/test_streaming.py": ("torch",),
    "analysis/test_tags.py": ("torch",),
    "catalogue/*": ("torch",),
    "checkpoints/test_checkpoint_fuzz.py": ("jax",),
    "checkpoints/test_remote.py": ("tensorflow",),
    "checkpoints/test_safetensors.py": ("tensorflow",),
    "layers/test_dropless_limits.py": ("torch",),
    # What it does in a layer is tested on all: `layers/test_lora.py`,
    # `layers/test_quantized_experts.py`.
    "models/test_adaptation.py": ("torch",),
    "models/test_conversion.py": ("torch",),
    "models/test_data.py": ("torch",),
    "models/test_dense_sources.py": ("tensorflow", "torch"),
    "models/test_torch_files.py": ("jax", "torch"),
    "models/test_upcycling.py": ("tensorflow", "torch"),
    # `timm` and `transformers` are of PyTorch.
    "models/test_torch_judges.py": ("torch",),
    "datasets/*": ("jax",),
    "distribution/test_plan*.py": ("jax",),
    "evaluation/test_cost.py": ("torch",),
    "evaluation/test_limoe_cost.py": ("torch",),
    "evaluation/test_pruning_curve.py": ("torch",),
    "evaluation/test_sweeps.py": ("torch",),
    "experiments/*": ("torch",),
    "models/test_broken_presets.py": ("torch",),
    "models/test_contrastive_input.py": ("torch",),
    "models/test_pruning.py": ("torch",),
    "models/test_token_statistics.py": ("torch",),
    "test_benchmark*.py": ("torch",),
    "test_checks.py": ("torch",),
    "test_files.py": ("torch",),
    "test_package.py": ("jax",),
    "test_pages.py": ("torch",),
    "test_security.py": ("torch",),
    "test_trained_*.py": ("torch",),
    "training/test_contrastive_recipes.py": ("torch",),
    "training/test_finetuning.py": ("torch",),
    "training/test_pair_pipeline.py": ("torch",),
    "training/test_recipes.py": ("torch",),
    "training/test_soups.py": ("torch",),
}
collect_ignore_glob = [
    pattern
    for pattern, backends in RUNS_ON.items()
    if keras.backend.backend() not in backends
]


def pytest_addoption(parser):
    parser.addoption(
        "--all-exports",
        action="store_true",
        help="export every router to every format, and write experiments/EXPORTS.md",
    )


hypothesis.settings.register_profile(
    "reproducible",
    derandomize=True,
    deadline=None,
    max_examples=15,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def reproducible():
    """Same seed before every test, float32 policy again after it."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collection():
    """What a module leaves behind (traces, mostly) is not searched again and again.

    On JAX it grows to gigabytes, and Keras collects garbage once for each layer that it
    quantizes.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_loops(monkeypatch):
    """Long loops run as a graph on TensorFlow: eagerly a thousand steps take a minute.

    On the other backends nothing changes, and short loops stay as they are.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        loop = keras.ops.fori_loop

        def fori_loop(lower, upper, body, start):
            def run(start):
                return loop(lower, upper, body, start)

            return (tf.function(run) if upper > 50 else run)(start)

        monkeypatch.setattr(keras.ops, "fori_loop", fori_loop)


@pytest.fixture
def set_noise(monkeypatch):
    """Callable that makes `keras.random.normal` return saved N(0, 1) samples.

    Takes one array per draw, in order. Returns the list of arrays not yet drawn.
    """

    def install(*samples):
        remaining = list(samples)

        def normal(shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
            sample = np.reshape(remaining.pop(0), tuple(shape))
            return keras.ops.convert_to_tensor(
                mean + stddev * sample, dtype or "float32"
            )

        monkeypatch.setattr(keras.random, "normal", normal)
        return remaining

    return install
