"""Whether the presets with experts are better than their dense twin."""

import numpy as np

from experiments.cards import read_metadata
from experiments.comparisons import Claim, corrected, paired
from experiments.glyph_presets import ROOT, TWINS
from experiments.router_study.claims import HEADLINE

METRICS = {
    "center": "accuracy on glyphs that fill the image",
    "anywhere": "accuracy on glyphs anywhere",
    "few_shot": "5-shot accuracy on digits",
    "fine_tuned": "fine-tuned accuracy on digits",
}
# Those with several seeds, trained on the same images at the same cost.
_VARIANTS = {
    "Dense": "dense",
    "Soft MoE": "soft",
    "token choice with batch priority": "token_choice",
}
_PAIRS = (
    ("Soft MoE", "Dense"),
    ("token choice with batch priority", "Dense"),
    ("Soft MoE", "token choice with batch priority"),
)


def claims():
    """Compare the presets with each other.

    Returns:
        list of `Claim`. One whose presets have no common seed has no differences.
    """
    found = trainings()
    return corrected(
        [
            Claim(text, source, {m: paired(found, [pair], _number, m) for m in METRICS})
            for (text, source), pair in zip(HEADLINE, _PAIRS, strict=True)
        ]
    )


def trainings():
    """Dict from what each variant is called to its runs, as its metadata have them."""
    return {
        variant: read_metadata(ROOT / "presets" / TWINS[twin][0]).get("runs", [])
        for variant, twin in _VARIANTS.items()
    }


def _number(run, metric):
    if metric in run["upstream_accuracy_by_layout"]:
        return run["upstream_accuracy_by_layout"][metric]
    values = run["few_shot"]["model"]["5"] if metric == "few_shot" else run[metric]
    return float(np.mean(values))
