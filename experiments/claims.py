"""The page of every claim of the papers that is asked here, and its verdict.

`python -m experiments.pages` writes it, `experiments/CLAIMS.md`, from what is
committed: the JSON of the router study and of upcycling, the metadata of the presets
and the sweeps of LIMoE. Nothing is trained.
"""

from pathlib import Path
from typing import Any, NamedTuple

from experiments import limoe_claims, preset_claims
from experiments.lib.comparisons import (
    in_words,
    looked_at,
    overview,
    reading,
    run_and_not,
)
from experiments.lib.runs import read_json
from experiments.router_study.claims import claims as claims_of_study
from experiments.router_study.scales import SCALES
from experiments.router_study.tables import METRICS, NOT_ASKED
from experiments.upcycling import tables as upcycling
from experiments.upcycling.plans import PLANS

HERE = Path(__file__).resolve().parent
ELSEWHERE_UNASKED = """\
- *More experts per token, or batch priority, in fine-tuning; few slots in fine-tuning*
  (V-MoE, appendices C.4, E.4 and E.5, figure 36): every model here, dense or mixture,
  is at 99 % on the digits after fine-tuning, so that nothing can show.
- *Larger batches and groups help* (V-MoE, appendix E.7 and figure 40): takes batches of
  thousands of images. Of LIMoE, groups of one pair are compared with those of 32.
- *The share of images to text* (LIMoE, figure 5), *routers for each modality* (LIMoE,
  appendix E.3 and table 7): can be run (`limoe_sweeps --sweep ratio`, `LIMoERouter`)
  and were not.
- *Experts can be pruned after training* (LIMoE, appendix E.4): shown by
  `guides/limoe_routing.py`, one model.
- *Mixtures trained on public pairs of images and text* (Soft MoE, appendix F; LIMoE,
  appendix E.6): takes data of hundreds of millions of pairs."""


class Section(NamedTuple):
    """What is asked of one experiment.

    Attributes:
        title: str.
        text: str, where there is more.
        claims: list of `Claim`.
        metrics: dict from metrics to what they are called.
    """

    title: str
    text: str
    claims: Any
    metrics: dict


def page():
    """The page, Markdown."""
    parts = ["# The claims of the papers, and what shows here"]
    found = sections()
    rows = ["| claim | what shows |", "|---|---|"]
    for section in found:
        rows.append(f"| **{section.title}** | |")
        rows.append(overview(section.claims, section.metrics))
    parts.append("\n".join(rows))
    for section in found:
        read = reading if section is found[0] else looked_at
        parts += [
            f"## {section.title}",
            section.text,
            read(section.claims),
            in_words(section.claims, section.metrics),
        ]
    parts += ["## Not asked", f"{NOT_ASKED}\n{ELSEWHERE_UNASKED}"]
    return "\n\n".join(parts) + "\n"


def sections():
    """List of `Section`: what is asked of each experiment."""
    found = []
    for scale in SCALES:
        file = HERE / "router_study" / scale / "results.json"
        if file.exists():
            text = f"[Tables, figures and set-up](router_study/{scale})"
            claims, not_run = run_and_not(claims_of_study(read_json(file)))
            text = f"{text}. {not_run}".rstrip()
            found.append(Section(f"Routers, scale `{scale}`", text, claims, METRICS))
    text = (
        "[Cards](../docs/presets.md); larger models than the study's, half of whose "
        "glyphs lie anywhere in the image."
    )
    claims = preset_claims.claims()
    found.append(Section("Presets", text, claims, preset_claims.METRICS))
    for plan in PLANS:
        file = HERE / "upcycling" / plan / "results.json"
        if file.exists():
            text = f"[Tables and set-up](upcycling/{plan})"
            claims = upcycling.claims(read_json(file))
            title = f"Upcycling, plan `{plan}`"
            found.append(Section(title, text, claims, upcycling.METRICS))
    text = "[Presets and sweeps](../docs/presets.md) of images with captions."
    found.append(Section("LIMoE", text, limoe_claims.claims(), limoe_claims.METRICS))
    return found
