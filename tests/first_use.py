"""What a user does first with an installed wheel: run outside of the checkout."""

import keras
import numpy as np

import keras_softmoe as ksm

PRESET = "soft_moe_tiny_patch8_16e_32_icons"


def main():
    tokens = np.random.default_rng(0).normal(size=(2, 16, 32))
    assert ksm.layers.SoftMoE(num_experts=4, mlp_dim=64)(tokens).shape == (2, 16, 32)

    folder = ksm.presets.describe(PRESET).path
    assert folder.parent.name == "_presets", f"not an installed wheel: {folder}"
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(PRESET)
    images = np.zeros((2, 32, 32, 3), "uint8")
    probabilities = classifier.predict(images, verbose=0)
    assert probabilities.shape == (2, 1229) and np.isfinite(probabilities).all()
    classifier.compile("sgd")
    classifier.fit(images, np.array([0, 1]), verbose=0)
    print(f"keras_softmoe {ksm.__version__} runs on {keras.backend.backend()}")


if __name__ == "__main__":
    main()
