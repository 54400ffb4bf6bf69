"""
Title: Switching backends
Author: keras_softmoe authors
Date created: 2026/11/20
Last modified: 2026/11/27
Description: One preset on JAX, TensorFlow and PyTorch, with the same predictions.
Accelerator: None
"""

# ruff: noqa: E402

"""
## One library, three backends

Keras runs on one of three backends, and so does all of `keras_softmoe`: its layers are
written in `keras.ops`, and a preset does not know what it was saved from. The backend
is chosen once, *before* Keras is first imported:

- for one run, with an environment variable: `KERAS_BACKEND=torch python train.py`;
- in a script or notebook, with `os.environ["KERAS_BACKEND"] = "torch"` above all
  imports, the first cell of a notebook;
- for good, with `"backend": "torch"` in `~/.keras/keras.json`.

The variable goes before the file. `keras.backend.backend()` tells what runs. A process
keeps its backend, so this guide, which compares them, starts one process for each.

## What the processes do

Each loads the same preset by name and classifies the same icons. This is an
ordinary script; nothing in it depends on the backend.
"""

import os
import subprocess
import sys
import tempfile

import numpy as np

PRESET = "soft_moe_tiny_patch8_16e_32_icons"
# The tests run this guide with fewer images.
NUM_IMAGES = 8 if os.environ.get("KSM_GUIDE_SHORT") == "1" else 64

SCRIPT = """
import sys
import keras
import numpy as np
import keras_softmoe as ksm

preset, num_images, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
classifier = ksm.models.ViTMoEImageClassifier.from_preset(preset)
icons = ksm.datasets.sample("icons", num_images)
logits = classifier.predict(icons.images, verbose=0)
print(keras.backend.backend(), type(classifier(np.zeros((1, 32, 32, 3)))))
np.save(path, logits)
"""

"""
## Three processes

A backend that is not installed is left out: each is an extra of its own,
`pip install 'keras-softmoe[jax]'` (or `tensorflow`, or `torch`).
"""


def predict(backend, folder):
    """Logits `(NUM_IMAGES, classes)` computed on a backend, `None` if it is absent."""
    path = os.path.join(folder, f"{backend}.npy")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, PRESET, str(NUM_IMAGES), path],
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        capture_output=True,
        text=True,
    )
    if f"No module named '{backend}'" in result.stderr:
        print(backend, "is not installed")
        return None
    if result.returncode:
        raise RuntimeError(result.stderr)
    print(result.stdout.strip())
    return np.load(path)


with tempfile.TemporaryDirectory() as folder:
    logits = {name: predict(name, folder) for name in ("jax", "tensorflow", "torch")}
logits = {name: values for name, values in logits.items() if values is not None}

"""
## The same predictions

The backends add up products in different orders, so the last digits of a float differ.
The decisions do not: routers compute in float32 on every backend, whatever the
precision of the rest, and where two scores are equal the expert, or the token, with the
lower number wins everywhere.
"""

names = list(logits)
for name in names[1:]:
    difference = np.abs(logits[name] - logits[names[0]]).max()
    same = (logits[name].argmax(-1) == logits[names[0]].argmax(-1)).mean()
    print(
        f"{name} against {names[0]}: largest difference of a logit {difference:.1e}, "
        f"same class for {same:.0%} of the images"
    )

"""
## What does differ

- **Tensors.** A model called directly returns the backend's own tensors, as printed
  above, and takes them too. `keras.ops.convert_to_numpy` works on all of them;
  `predict` always returns NumPy arrays.
- **Compilation.** `fit` and `predict` compile on JAX and TensorFlow: the first batch,
  and each new batch shape, takes seconds. PyTorch starts at once.
- **Random numbers.** `keras.utils.set_random_seed(0)` makes a run repeatable on a
  backend; another backend starts from other random weights.
- **Your own code around it.** A training loop in the backend's own style works too: on
  PyTorch a model is a `torch.nn.Module`, on JAX `model.stateless_call` is a pure
  function, on TensorFlow `tf.GradientTape` sees it all.
- **Saved files.** A preset or a `.keras` file made on one backend loads on the others,
  which is what this guide has just done.
"""
