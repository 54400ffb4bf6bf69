"""Embeddings of classes from their names, for zero-shot classification."""

from collections import Counter

import numpy as np

# Texts that are encoded in one call: a bound on memory, far above a batch.
_TEXTS_PER_CALL = 8192


def class_embeddings(encode_text, class_names, templates):
    """Compute embeddings of classes from their names, averaged over templates.

    Args:
        encode_text: callable from a list of `N` str to `(N, D)` embeddings.
        class_names: `C` strings, all different.
        templates: strings, each with `{}` where the name goes.

    Returns:
        `(C, D)` float32 array, of length 1 in each row.

    Raises:
        ValueError: if names or templates cannot be used, or the callable does not
            return embeddings.

    Source: LIMoE, appendix D.2, which follows Radford et al. 2021 (CLIP), section
    3.1.4.
    """
    names, templates = check_names(class_names), _check_templates(templates)
    total = 0.0
    step = max(1, _TEXTS_PER_CALL // len(names))
    for start in range(0, len(templates), step):
        part = templates[start : start + step]
        texts = [text.replace("{}", name) for text in part for name in names]
        found = np.asarray(encode_text(texts))
        if found.ndim != 2 or len(found) != len(texts):
            raise ValueError(
                "`encode_text` must return one embedding for each text. "
                f"Received: shape={found.shape} for {len(texts)} texts."
            )
        # (templates, C, D)
        found = unit(found).reshape(len(part), len(names), -1)
        total = total + found.sum(axis=0)
    return unit(total).astype("float32")


def unit(embeddings):
    """Rows of length 1, in float64; a row of zeros stays one."""
    embeddings = embeddings.astype("float64")
    length = np.linalg.norm(embeddings, axis=-1, keepdims=True)
    return embeddings / np.where(length > 0, length, 1.0)


def check_names(class_names):
    """Return a list of the names of classes, or raise if they cannot be used."""
    names = _strings("class_names", class_names, 'class_names=["cat", "dog"]')
    if len(set(names)) < len(names):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        raise ValueError(
            "The names of classes must all differ. Received: class_names with "
            f"{', '.join(map(repr, repeated[:5]))} more than once. Name them "
            'in words ("crane bird", "construction crane"), or merge them.'
        )
    return names


def _check_templates(templates):
    templates = _strings("templates", templates, 'templates=["a photo of a {}."]')
    without = [text for text in templates if "{}" not in text]
    if without:
        raise ValueError(
            "Each template needs {} where the name of the class goes. Received: "
            f"templates with {without[0]!r}. Write, for example, 'a photo of a {{}}.'."
        )
    return templates


def _strings(name, values, example):
    is_one = isinstance(values, str) or not np.iterable(values)
    values = [values] if is_one else list(values)
    wrong = [v for v in values if not isinstance(v, str) or not v.strip()]
    if is_one or wrong or not values:
        found = repr(wrong[0] if wrong else values[0]) if values else "none"
        raise ValueError(
            f"`{name}` must be a list of strings, one or more, none of them empty. "
            f"Received: {name} {'=' if is_one else 'with'} {found}. Pass, for example, "
            f"{example}."
        )
    return [str(value) for value in values]
