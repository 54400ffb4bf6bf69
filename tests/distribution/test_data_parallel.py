"""Replicas on TensorFlow and PyTorch, where Keras cannot place experts.

That replicas with whole groups train like one model the guides show, which are tests
too. On JAX replicas are tested with the other placements.
"""

import json

import keras
import numpy as np

from tests.support.processes import Program

if keras.backend.backend() != "jax":

    def test_replicas_route_smaller_groups_than_one_model(tmp_path):
        file = tmp_path / "losses.json"
        code, output = Program("tests.support.replicas", file).wait()
        assert code == 0, output
        alone, replicas = np.array(json.loads(file.read_text(encoding="utf-8")))
        assert alone.shape == (2,)
        # Far more than rounding errors
        assert abs(replicas - alone)[0] > 1e-4
