"""The main job, on real images: load, probe, fine-tune, look.

Run it with `make demo`, or with any Keras backend:

    KERAS_BACKEND=torch python guides/demo.py

A Soft MoE that was trained on drawn letters and signs, and has never seen a digit,
meets 1,797 handwritten ones. No network is needed.
"""

import os
import pathlib
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import keras_softmoe as ksm

PRESET = "soft_moe_tiny_patch8_16e_32_icons"
# What the tests set: the same steps on few images.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
DRAWS = 2 if SHORT else 10
SHOTS = (1, 2) if SHORT else (1, 5, 10)
EPOCHS = 1 if SHORT else 10
BATCH_SIZE = 32


def main():
    keras.utils.set_random_seed(0)
    start = time.perf_counter()
    train, test = (ksm.datasets.digits(split=split) for split in ("train", "test"))
    if SHORT:
        train, test = ((x[:64], y[:64]) for x, y in (train, test))

    step(1, f"Load the preset {PRESET} on {keras.backend.backend()}")
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(PRESET, num_classes=10)
    describe(classifier.backbone)

    step(2, "Probe it: a linear classifier on its features, from a few digits a class")
    compare_with_pixels(classifier, train, test)

    step(3, f"Fine-tune it on {len(train[0])} digits with `model.fit`")
    fine_tune(classifier, train)
    accuracy = classifier.evaluate(*test, verbose=0)[1]
    print(f"accuracy on the {len(test[0])} digits of the other half: {accuracy:.1%}")

    step(4, "Look at its routing")
    # The first image of each of five classes.
    chosen = [list(test[1]).index(label) for label in (0, 2, 3, 5, 8)]
    path = pathlib.Path("build", f"routing_{keras.backend.backend()}.png").resolve()
    path.parent.mkdir(exist_ok=True)
    routing = ksm.analysis.analyze(
        classifier, test[0][chosen], num_pictures=len(chosen), verbose=0
    )
    routing.plot("slots").savefig(path)
    print("Each map shows what one slot of one expert looks at (orange) and what it")
    print(
        "ignores (blue); none has a colour where it takes in all alike. Saved as", path
    )

    print(f"\nDone in {time.perf_counter() - start:.0f} seconds.")


def step(number, text):
    print(f"\n{number}. {text}")


def describe(backbone):
    router = backbone.router
    cost = f"{backbone.count_params() / 1e6:.1f} M parameters"
    print(
        f"{backbone.num_layers} blocks of width {backbone.hidden_dim}, {cost}; "
        f"blocks {', '.join(map(str, backbone.moe_layers))} hold {router.num_experts} "
        f"experts with {router.slots_per_expert} slots each"
    )


def compare_with_pixels(classifier, train, test):
    options = {"shots": SHOTS, "seeds": DRAWS}
    features = ksm.evaluation.few_shot_probe(classifier, train, test, **options)
    pixels = ksm.evaluation.few_shot_probe(None, train, test, verbose=0, **options)
    print("shots   Soft MoE        raw pixels")
    for shots in SHOTS:
        cells = (
            f"{r[shots].mean:.3f} ± {r[shots].std:.3f}" for r in (features, pixels)
        )
        print(f"{shots:>5}   {'   '.join(cells)}")
    print(f"test accuracy, mean ± standard deviation over {DRAWS} draws of the shots")


def fine_tune(classifier, train):
    steps = EPOCHS * -(-len(train[0]) // BATCH_SIZE)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=1e-3, warmup_steps=max(steps // 10, 1)
    )
    classifier.compile(
        optimizer=keras.optimizers.AdamW(rate, weight_decay=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    classifier.fit(*train, epochs=EPOCHS, batch_size=BATCH_SIZE, verbose=2)


if __name__ == "__main__":
    main()
