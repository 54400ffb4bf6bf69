"""Replicas on TensorFlow and PyTorch, where Keras cannot place experts.

On JAX replicas are tested with the other placements.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]

if keras.backend.backend() != "jax":

    @pytest.fixture(scope="module")
    def losses():
        """Dict from the case to the losses of one model and those of two replicas."""
        result = subprocess.run(
            [sys.executable, "-m", "tests.distribution.replicas"],
            cwd=ROOT,
            env={**os.environ, "KERAS_BACKEND": keras.backend.backend()},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        found = json.loads(result.stdout)
        return {case: np.array(values) for case, values in found.items()}

    def test_replicas_with_whole_groups_train_like_one_model(losses):
        alone, replicas = losses["whole groups"]
        assert alone.shape == (4,)
        assert len(set(np.round(alone, 3))) == 4
        np.testing.assert_allclose(replicas, alone, atol=1e-5)

    def test_replicas_route_smaller_groups_than_one_model(losses):
        alone, replicas = losses["groups larger than a share"]
        assert abs(replicas - alone)[0] > 1e-3
