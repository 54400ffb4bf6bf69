"""One page with every claim of the papers that is asked here, and its verdict.

    python -m experiments.claims

writes `experiments/CLAIMS.md` from what is committed: the JSON of the router study and
of upcycling, the metadata of the presets and the sweeps of LIMoE. Nothing is trained.
"""

from pathlib import Path

from experiments import limoe_claims, preset_claims
from experiments.comparisons import in_words, looked_at, reading
from experiments.router_study.claims import claims as claims_of_study
from experiments.router_study.scales import SCALES
from experiments.router_study.tables import METRICS, NOT_ASKED
from experiments.runs import read_json
from experiments.upcycling import tables as upcycling
from experiments.upcycling.plans import PLANS
from keras_softmoe.files import replaced_file

HERE = Path(__file__).resolve().parent
PAGE = HERE / "CLAIMS.md"


def main():
    with replaced_file(PAGE) as file:
        file.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: written")


def page():
    """The page, Markdown."""
    parts = ["# The claims of the papers, and what shows here"]
    for scale in SCALES:
        file = HERE / "router_study" / scale / "results.json"
        if not file.exists():
            continue
        found = claims_of_study(read_json(file))
        parts += [
            f"## Routers, scale `{scale}`",
            f"[Tables, figures and set-up](router_study/{scale})",
            reading(found),
            in_words(found, METRICS),
        ]
    found = preset_claims.claims()
    parts += [
        "## Presets",
        "[Cards](../docs/presets.md); larger models than the study's, half of whose "
        "glyphs lie anywhere in the image",
        looked_at(found),
        in_words(found, preset_claims.METRICS),
    ]
    for plan in PLANS:
        file = HERE / "upcycling" / plan / "results.json"
        if not file.exists():
            continue
        found = upcycling.claims(read_json(file))
        parts += [
            f"## Upcycling, plan `{plan}`",
            f"[Tables and set-up](upcycling/{plan})",
            looked_at(found),
            in_words(found, upcycling.METRICS),
        ]
    found = limoe_claims.claims()
    parts += ["## LIMoE", looked_at(found), in_words(found, limoe_claims.METRICS)]
    parts += ["## Not asked", NOT_ASKED]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
