"""What presets of icons are measured on: styles and concepts that they never saw."""

import numpy as np

import keras_softmoe as ksm
from experiments.icons.pictures import plain
from keras_softmoe import evaluation

SHOTS = (1, 5)
_DRAWS = 10
_BATCH_SIZE = 128
# Icons that are searched, and the places in which a right one is looked for.
NUM_SEARCHED, PLACES = 1_000, (1, 10)
_SEED = 56
_NUM_PAIRS = 512


def style_accuracy(classifier, bank):
    """Accuracy on trained concepts in styles never seen, a float."""
    rows, labels = bank.rows("held_out_styles")
    pictures = plain(bank.pictures[rows])
    predicted = classifier.predict(pictures, batch_size=_BATCH_SIZE, verbose=0)
    return float(np.mean(predicted.argmax(-1) == labels))


def few_shot(model, bank):
    """Accuracy on concepts never seen, with a few icons of each, drawn ten times.

    Args:
        model: task, or `None` for the pixels as features.
        bank: `Bank`.

    Returns:
        dict from the number of icons of a concept, a str, to a list of accuracies.
    """
    pairs, _ = new_concept_rows(bank)
    parts = [(plain(bank.pictures[rows]), labels) for rows, labels in pairs]
    if model is None:
        parts = [(x[..., 0].reshape(len(x), -1) / 255.0, y) for x, y in parts]
    found = evaluation.few_shot_probe(
        model,
        *parts,
        shots=SHOTS,
        seeds=_DRAWS,
        batch_size=_BATCH_SIZE,
        verbose=0,
    )
    return {str(shots): list(map(float, r.accuracies)) for shots, r in found.items()}


def new_concept_rows(bank):
    """Icons to learn from and icons to test, of other families of sets.

    Returns:
        Two pairs `(rows, labels)` of concepts that both have enough icons of, and the
        number of each label among the concepts that are held out.
    """
    rows, labels = bank.rows("held_out_concepts")
    families = np.unique(bank.family[rows])
    chosen = np.random.default_rng(_SEED).permutation(families)[::2]
    is_support = np.isin(bank.family[rows], chosen)
    count = labels.max() + 1
    known = np.bincount(labels[is_support], minlength=count) > max(SHOTS)
    known &= np.bincount(labels[~is_support], minlength=count) > 0
    parts = (is_support & known[labels], ~is_support & known[labels])
    number = np.cumsum(known) - 1
    pairs = [(rows[part], number[labels[part]]) for part in parts]
    return pairs, np.flatnonzero(known)


def found_by_word(model, bank):
    """How often a word finds an icon of its concept in styles never seen.

    Each concept among 1,000 icons is asked for by its most frequent name in training.

    Returns:
        dict that JSON can hold: `"queries"`, an int; `"found"`, dict from the number of
        places to the share of words with a right icon in them; `"chance"`, the same if
        icons were in random order.
    """
    rows, labels = searched(bank)
    concepts = np.unique(labels)
    words = names_in_training(bank)
    images = model.encode_image(plain(bank.pictures[rows]), batch_size=_BATCH_SIZE)
    texts = model.encode_text([words[concept] for concept in concepts])
    order = np.argsort(-np.asarray(texts) @ np.asarray(images).T, axis=1, kind="stable")
    right = labels[order] == concepts[:, None]
    counts = np.bincount(labels)[concepts]
    return {
        "queries": len(concepts),
        "found": {str(k): float(right[:, :k].any(1).mean()) for k in PLACES},
        "chance": {str(k): chance(counts, len(rows), k) for k in PLACES},
    }


def chance(counts, total, places):
    """Mean probability that one of `counts` of `total` icons is in random places."""
    left = total - np.arange(places)
    missed = np.prod(np.maximum(left - counts[:, None], 0) / left, axis=1)
    return float(np.mean(1 - missed))


def searched(bank):
    """Rows and labels of the icons that are searched, a part of the new styles."""
    rows, labels = bank.rows("held_out_styles")
    chosen = np.random.default_rng(_SEED).permutation(len(rows))[:NUM_SEARCHED]
    return rows[chosen], labels[chosen]


def names_in_training(bank):
    """The most frequent name of each trained concept, a list of str."""
    rows, labels = bank.rows("train")
    first = bank.caption[bank.caption_start[rows]]
    pairs, counts = np.unique(np.stack([labels, first]), axis=1, return_counts=True)
    # Sorted by concept; of each one the most frequent first
    order = np.lexsort((-counts, pairs[0]))
    _, starts = np.unique(pairs[0][order], return_index=True)
    return bank.captions[pairs[1][order[starts]]].tolist()


def experts_by_modality(model, bank):
    """How experts share patches and pieces of text on new styles.

    Returns:
        dict from the block to a dict: `"image"` and `"text"`, shares of the tokens of
        that modality by their first choice, one for each expert, and `"dropped"`.
    """
    rows, labels = searched(bank)
    words = names_in_training(bank)
    routing = ksm.analysis.analyze(
        model,
        plain(bank.pictures[rows[:_NUM_PAIRS]]),
        captions=[words[label] for label in labels[:_NUM_PAIRS]],
        num_pictures=1,
        verbose=0,
    )
    return {
        str(block): {
            **{
                name: np.round(count / max(count.sum(), 1), 4).tolist()
                for name, count in s.routed.items()
            },
            "dropped": {name: round(float(x), 4) for name, x in s.dropped.items()},
        }
        for block, s in routing.modalities.items()
    }
