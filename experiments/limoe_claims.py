"""What the LIMoE paper found, and whether it shows in the presets and the sweeps."""

import numpy as np

from experiments.lib.cards import read_runs
from experiments.lib.comparisons import Claim, corrected, paired
from experiments.limoe_presets import NAMES
from experiments.limoe_sweeps import RESULTS, runs

METRICS = {
    "zero_shot_new_of_64": "zero-shot accuracy, new combinations",
    "image_to_text_recall_at_1": "recall@1, image to caption",
    "text_dropped": "dropped text tokens",
    "text_experts": "experts of text (their number)",
}
_TASKS = ("zero_shot_new_of_64", "image_to_text_recall_at_1")


def claims():
    """Compare LIMoE's variants as the paper does.

    Returns:
        list of `Claim`. One whose runs are not there, or not with a common seed, has no
        differences.

    Source: LIMoE, sections 3 and 4 and appendices B and E.
    """
    presets = {kind: read_runs(name) for kind, name in NAMES.items()}
    sweeps = {
        file.stem: _by_variant(runs(file)) for file in sorted(RESULTS.glob("*.json"))
    }
    statements = [
        (
            "LIMoE is better than its dense twin of the same FLOP",
            "LIMoE, section 3",
            presets,
            [("limoe", "dense")],
            _TASKS,
        ),
        (
            "With the entropy losses LIMoE is better than with the classic ones alone",
            "LIMoE, section 4.1 and appendix B, table 5",
            sweeps.get("losses", {}),
            [("both", "classic"), ("entropy", "classic")],
            _TASKS,
        ),
        (
            "With the entropy losses fewer text tokens are dropped",
            "LIMoE, section 4.1",
            sweeps.get("losses", {}),
            [("classic", "both")],
            ("text_dropped",),
        ),
        (
            "Text uses more experts the larger its soft minimum",
            "LIMoE, appendix B.2 and figure 10",
            sweeps.get("losses", {}),
            # With smaller minima the training is the same, see `docs/presets.md`.
            [("S=6", "both")],
            ("text_experts",),
        ),
        (
            "Without the classic losses text uses more experts the larger its minimum",
            "LIMoE, appendix B.2 and figure 10",
            sweeps.get("losses", {}),
            [("entropy,S=6", "entropy"), ("entropy", "entropy,S=1")],
            ("text_experts",),
        ),
        (
            "More experts are better",
            "LIMoE, appendix E.2 and figure 12",
            sweeps.get("experts", {}),
            [
                (f"num_experts={many}", f"num_experts={few}")
                for few, many in ((2, 4), (4, 8), (8, 16))
            ],
            _TASKS,
        ),
        (
            "Two experts per token are better than one",
            "LIMoE, appendix E.1 and table 6",
            sweeps.get("choices", {}),
            [("num_selected_experts=2", "num_selected_experts=1")],
            _TASKS,
        ),
        (
            "Small groups do harm",
            "LIMoE, appendix E.5 and figure 16",
            sweeps.get("groups", {}),
            [("group_images=32", "group_images=1")],
            _TASKS,
        ),
        (
            "Batch priority is the best order of dispatch",
            "LIMoE, section 4.2 and figure 6",
            sweeps.get("priority", {}),
            [
                ("priority=sum", f"priority={other}")
                for other in ("position", "random", "image_first", "text_first")
            ],
            _TASKS,
        ),
    ]
    return corrected(
        [
            Claim(text, source, {m: paired(found, pairs, _number, m) for m in metrics})
            for text, source, found, pairs, metrics in statements
        ]
    )


def _by_variant(finished):
    found = {}
    for run in finished:
        found.setdefault(run["variant"], []).append(run)
    return found


def _number(run, metric):
    """One number of a run: of several blocks their mean, of experts hundredths."""
    number = float(np.mean(run[metric]))
    return number / 100 if metric == "text_experts" else number
