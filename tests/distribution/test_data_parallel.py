"""Replicas on TensorFlow and PyTorch, where Keras cannot place experts.

That replicas with whole groups train like one model the guides show, which are tests
too. On JAX replicas are tested with the other placements.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]

if keras.backend.backend() != "jax":

    def test_replicas_route_smaller_groups_than_one_model():
        result = subprocess.run(
            [sys.executable, "-m", "tests.distribution.replicas"],
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": keras.backend.backend()},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        alone, replicas = np.array(json.loads(result.stdout))
        assert alone.shape == (4,)
        assert abs(replicas - alone)[0] > 1e-3
