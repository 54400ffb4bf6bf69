"""Every claim of the papers that is asked here, and its verdict.

`python -m experiments.pages` writes it into `docs/results/appendix.md`, from what is
committed: the JSON of the router study and of upcycling, the metadata of the presets
and the sweeps of LIMoE. Nothing is trained.
"""

from pathlib import Path
from typing import Any, NamedTuple

from experiments import limoe_claims, preset_claims
from experiments.lib.comparisons import (
    corrected,
    in_words,
    overview,
    reading,
    run_and_not,
)
from experiments.lib.runs import read_json
from experiments.router_study.claims import claims as claims_of_study
from experiments.router_study.scales import SCALES
from experiments.router_study.tables import METRICS
from experiments.upcycling import tables as upcycling
from experiments.upcycling.plans import PLANS

# Models whose steps are timed, of those with six seeds.
STEPS = {
    "soft_1s": "Soft MoE",
    "softmax_token_choice_k1_bpr": "token choice with batch priority",
}
HERE = Path(__file__).resolve().parent
NOT_RUN = """\
Trainings are counted at three seeds, of models as large as the study's, some minutes of
a core each, where nothing else is said.

- *A mixture is worth a dense model of several times its cost* (V-MoE, section 3.3;
  Soft MoE, section 3.3): not run. Needs dense models and mixtures of four sizes, 36
  trainings, at a task on which a larger dense model is better.
- *A learned router is better than a random one, when both are trained*: the claim above
  is of trained models whose routers are replaced afterwards, the test of V-MoE,
  appendix E.1. Of trained ones see [the study on
  letters](evidence.md#thousands-of-classes).
- *Other numbers of experts per token at inference* (V-MoE, appendix E.4, figures 33 to
  35): not run. Needs no training, `evaluation.routing_sweep` of the trained presets
  with other `num_selected_experts`; and 12 trainings for the paper's comparison with
  models that were trained so.
- *Smaller batches at inference fill the experts unevenly* (V-MoE, appendix E.7 and
  figure 40): not run. Needs no training, but the preset with two choices measured in
  groups of one image to many.
- *More experts per token, batch priority and few slots in fine-tuning* (V-MoE,
  appendices C.4 and E.5, figure 36): not run. Every model here, dense or mixture, is at
  99 % on the digits after fine-tuning, so that nothing can show; needs another task.
- *Soft MoE without normalized inputs fails as it gets wider* (Soft MoE, appendix E,
  figures 13 and 14): not run. Needs 30 trainings, of five widths with and without.
- *Contrastive training of two towers, with Soft MoE, expert choice or no experts in
  that of images* (Soft MoE, section 4 and appendix F.1): not run. Needs 9 trainings of
  two towers on the captioned shapes. With the paper's own data, 275 million public
  pairs, it cannot be run here.
- *LIMoE on public pairs* (LIMoE, appendix E.6): cannot be run here with its data, 400
  million pairs.
- *The share of images to text* (LIMoE, figure 5), *K with adjusted losses and batch
  priority* (appendix E.1, table 6), *routers for each modality* (appendix E.3, table
  7), *groups of more sizes* (appendix E.5, figure 16): not run. The library has all of
  them (`limoe_sweeps --sweep ratio`, `LIMoERouter`, `group_images`); needs 9 trainings
  or more each.
- *Experts can be pruned after training* (LIMoE, appendix E.4): shown for one model by
  `guides/limoe_routing.py`. An interval needs no training, but the other seeds' models,
  which were not kept.
- *Routing distributions and experts for concepts* (V-MoE, section 5; LIMoE, section 4
  and appendix F.1): pictures, see `analysis.analyze` and `guides/limoe_routing.py`.
- *Soft MoE is fast with thousands of experts* (Soft MoE, section 3.5): asked by the
  benchmarks, with up to 1,024.
- *Gains hold from JFT to ImageNet and at 15 billion parameters* (V-MoE, sections 3.3
  and 3.6; LIMoE, section 4): cannot be run here, the data were never released."""


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


def text():
    """All claims, and those that are not asked, Markdown without a title."""
    found = sections()
    every = [claim for section in found for claim in section.claims]
    rows = ["| claim | what shows |", "|---|---|"]
    for section in found:
        rows.append(f"| **{section.title}** | |")
        rows.append(overview(section.claims, section.metrics))
    parts = [reading(every), "\n".join(rows)]
    for section in found:
        listed = in_words(section.claims, section.metrics)
        parts += [f"### {section.title}", section.text, listed]
    parts += ["### Not run", NOT_RUN]
    return "\n\n".join(parts) + "\n"


def survivors(found):
    """What stands after the correction.

    Args:
        found: list of `Section`.

    Returns:
        list of triples: a `Section`, a `Claim`, and a metric.
    """
    return [
        (section, claim, metric)
        for section in found
        for claim in section.claims
        for metric in claim.differences
        if claim.survives(metric)
    ]


def sections():
    """List of `Section`: what is asked of each experiment.

    Holm's correction is for the differences of all of them together.
    """
    found = _sections()
    claims = iter(corrected([claim for s in found for claim in s.claims]))
    return [s._replace(claims=[next(claims) for _ in s.claims]) for s in found]


def _sections():
    found = []
    for scale in SCALES:
        file = HERE / "router_study" / scale / "results.json"
        if file.exists():
            results = read_json(file)
            claims, not_run = run_and_not(claims_of_study(results))
            times = results["times"]["steps"]
            slower = ", ".join(
                f"{times[name]['ratio']:.2f} ({title})"
                for name, title in STEPS.items()
                if name in times
            )
            text = (
                "[Set-up and tables](#the-router-study). *Of the same FLOP* is not of "
                f"the same time: a training step takes {slower} of the dense model's. "
                "Models with six seeds were looked at with three first. "
                f"{not_run}"
            )
            title = f"Routers, scale `{scale}`"
            found.append(Section(title, text.rstrip(), claims, METRICS))
    text = (
        "[Presets](../presets.md), larger models than the study's, half of whose "
        "glyphs lie anywhere in the image. They were looked at with three seeds, four, "
        "and six. What the first two claims are worth is said with [the "
        "evidence](evidence.md): the dense twin is at the edge of the rates that it "
        "bears, and with random routers the same model of token choice is above it too."
    )
    claims = preset_claims.claims()
    found.append(Section("Presets", text, claims, preset_claims.METRICS))
    for plan in PLANS:
        file = HERE / "upcycling" / plan / "results.json"
        if file.exists():
            text = "[Set-up and tables](#upcycling); not the published protocol."
            claims = upcycling.claims(read_json(file))
            title = f"Upcycling, plan `{plan}`"
            found.append(Section(title, text, claims, upcycling.METRICS))
    text = (
        "[Presets](../presets.md) of images with captions, and [sweeps](#limoe-sweeps)."
    )
    found.append(Section("LIMoE", text, limoe_claims.claims(), limoe_claims.METRICS))
    return found
