"""The main job, on real icons: load, probe, fine-tune, look, and find by words.

Run it with `make demo`, or with any Keras backend:

    KERAS_BACKEND=torch python guides/demo.py

A Soft MoE that was trained on icons of 1,229 concepts meets 129 others, and a LIMoE
that was trained on icons and their names finds icons by words. No network is needed.
"""

import os
import pathlib
import time

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from matplotlib.figure import Figure

import keras_softmoe as ksm

PRESET = "soft_moe_tiny_patch8_16e_32_icons"
LIMOE = "limoe_tiny_patch8_8e_32_icons"
WORDS = (
    *("home", "calendar", "shopping cart", "key", "airplane", "megaphone"),
    *("bell", "train", "heart", "laptop", "gift", "anchor"),
)
# What the tests set: the same steps on few icons.
SHORT = os.environ.get("KSM_GUIDE_SHORT") == "1"
DRAWS = 2 if SHORT else 10
SHOTS = (1, 2) if SHORT else (1, 5)
# Of new concepts, for fine-tuning: so many, and icons of each
CONCEPTS, ICONS = (4, 8) if SHORT else (20, 20)
EPOCHS = 1 if SHORT else 10
BATCH_SIZE = 32
NUM_SEARCHED = 128 if SHORT else 1_000
PLACES = 8


def main():
    keras.utils.set_random_seed(0)
    start = time.perf_counter()
    folder = pathlib.Path("build").resolve()
    folder.mkdir(exist_ok=True)
    backend = keras.backend.backend()
    new, other = map(ksm.datasets.sample, ("new_icons", "other_new_icons"))
    # The concepts with most icons
    concepts = np.argsort(-np.bincount(new.labels), kind="stable")[:CONCEPTS]

    step(1, f"Load the preset {PRESET} on {backend}")
    classifier = ksm.models.ViTMoEImageClassifier.from_preset(
        PRESET, num_classes=CONCEPTS
    )
    describe(classifier.backbone)

    step(2, "Probe it: a linear classifier on its features, from a few icons a concept")
    pairs = [(s.images, s.labels) for s in (new, other)]
    if SHORT:
        pairs = [part(s, concepts, 16) for s in (new, other)]
    compare_with_pixels(classifier, *pairs)

    train, test = part(new, concepts, ICONS), part(other, concepts)
    step(3, f"Fine-tune it on {len(train[0])} icons with `model.fit`")
    names = ", ".join(new.class_names[i] for i in concepts[:4])
    print(f"{CONCEPTS} of the new concepts: {names}, ...")
    fine_tune(classifier, train)
    accuracy = classifier.evaluate(*test, verbose=0)[1]
    print(f"accuracy on {len(test[0])} icons in other styles: {accuracy:.1%}", end=" ")
    print(f"(chance {1 / CONCEPTS:.1%})")

    step(4, "Look at its routing")
    # The first icon of each of four concepts
    chosen = [list(test[1]).index(label) for label in range(4)]
    routing = ksm.analysis.analyze(
        classifier, test[0][chosen], num_pictures=len(chosen), verbose=0
    )
    path = folder / f"routing_{backend}.png"
    routing.plot("slots").savefig(path)
    print("Each map shows what one slot of one expert looks at (orange) and what it")
    print(
        "ignores (blue); none has a colour where it takes in all alike. Saved as", path
    )

    step(5, f"Find icons by words, with {LIMOE}")
    find_by_words(folder / f"found_{backend}.png")

    print(f"\nDone in {time.perf_counter() - start:.0f} seconds.")


def step(number, text):
    print(f"\n{number}. {text}")


def describe(backbone):
    router = backbone.router
    cost = f"{backbone.count_params() / 1e6:.1f} M parameters"
    slots = f"{router.slots_per_expert} slot{'s' * (router.slots_per_expert > 1)}"
    print(
        f"{backbone.num_layers} blocks of width {backbone.hidden_dim}, {cost}; "
        f"blocks {', '.join(map(str, backbone.moe_layers))} hold {router.num_experts} "
        f"experts with {slots} each"
    )


def part(sample, concepts, count=None):
    """Icons of some concepts, at most `count` of each, and labels from 0 on."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(sample.labels == c)) for c in concepts]
    rows = [found[:count] for found in rows]
    labels = np.repeat(np.arange(len(concepts)), [len(found) for found in rows])
    return sample.images[np.concatenate(rows)], labels


def compare_with_pixels(classifier, train, test):
    options = {"shots": SHOTS, "seeds": DRAWS}
    features = ksm.evaluation.few_shot_probe(classifier, train, test, **options)
    # Icons are grey: one channel of their pixels says all.
    grey = ((x[..., :1] / 255, y) for x, y in (train, test))
    pixels = ksm.evaluation.few_shot_probe(None, *grey, verbose=0, **options)
    print("icons   Soft MoE        raw pixels")
    for shots in SHOTS:
        cells = (
            f"{r[shots].mean:.3f} ± {r[shots].std:.3f}" for r in (features, pixels)
        )
        print(f"{shots:>5}   {'   '.join(cells)}")
    print(f"accuracy on {len(test[0]):,} icons of {len(set(train[1]))} new concepts")
    print(f"in other styles, mean ± standard deviation over {DRAWS} draws")


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


def find_by_words(path):
    model = ksm.models.LIMoEContrastive.from_preset(LIMOE)
    icons = ksm.datasets.sample("icons", NUM_SEARCHED)
    present = np.unique(icons.labels)
    names = [icons.class_names[label] for label in present]
    # (names, icons): of each name the nearest icons first
    scores = model.encode_text(names) @ model.encode_image(icons.images).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :PLACES]
    is_right = icons.labels[order] == present[:, None]

    rows = [names.index(word) for word in WORDS if word in names]
    figure = Figure(figsize=(7.2, 0.68 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), PLACES, squeeze=False)
    for row, line in zip(rows, axes, strict=True):
        line[0].set_ylabel(names[row], rotation=0, ha="right", va="center")
        for ax, icon, right in zip(line, order[row], is_right[row], strict=True):
            ax.imshow(icons.images[icon])
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=bool(right), color="tab:green", linewidth=3)
    figure.savefig(path, dpi=120)

    chance = np.mean([np.mean(icons.labels == label) for label in present])
    first, among = is_right[:, 0].mean(), is_right.any(axis=1).mean()
    print(f"The first {PLACES} icons of {len(rows)} words, right ones framed:", path)
    print("An icon is right if its authors gave it a name of that concept.")
    print(
        f"Of the names of the {len(names)} concepts that {len(icons.images):,} icons in"
    )
    print(
        f"new styles show, {first:.1%} find one of theirs in first place (chance",
        end=" ",
    )
    print(f"{chance:.1%}) and {among:.1%} among the first {PLACES}.")


if __name__ == "__main__":
    main()
