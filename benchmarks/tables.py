"""Tables of what was timed, from the files that `run.py` writes, for pages of the site.

`python -m experiments.pages` puts them in their places. A ratio is our time over a
rival's in the same round of turns (median, least and largest): under 1 is faster.
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MACHINES = ("cpu", "intel_xeon")
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
PASSES = ("forward", "forward+backward")

# Rows of the benchmarks, by section, and what they are called.
LAYERS = {
    "soft_128x1": "`SoftRouter`, 128 experts, 1 slot",
    "soft_32x6": "`SoftRouter`, 32 experts, 6 slots",
    "token_choice": '`SoftmaxTokenChoiceRouter`, `priority="max"`',
    "biased_token_choice": "... with `bias_update_rate=0.001`",
    "whole_images": "... of whole images, 4 experts",
    "expert_choice": "`SoftmaxExpertChoiceRouter`",
    "sinkhorn_expert_choice": "`SinkhornExpertChoiceRouter`",
    "sparse_transport": "`SparseTransportExpertChoiceRouter`",
    "expert_race": "`ExpertRaceRouter`",
}
TITLES = {
    **LAYERS,
    "dropless": "token choice that drops nothing",
    "token_choice_dispatch": "token choice, 4,616 tokens: gather",
    "expert_choice_dispatch": "expert choice, 4,616 tokens: gather",
    "soft_moe": "Soft MoE S/16 of 128 experts",
    "soft_moe_whole_batch": "Soft MoE S/16 of 128 experts, 32 images",
    "dense_vit": "dense ViT S/16",
}
SECTIONS = ("layers", "reference", "models", "scaling")
# Files of one GPU, and their columns.
GPU = {
    "jax_bf16": "JAX, bfloat16",
    "torch_bf16": "PyTorch, bfloat16",
    "torch_f32": "PyTorch, float32",
    "jax_f32": "JAX, float32",
}


def tables():
    """Dict from the titles of tables to their text: those that are committed."""
    return {
        "speed in short": in_short(),
        "layers measured": layers_measured(),
        "layers on a GPU": layers_on_gpu(),
        "steps on a GPU": steps_on_gpu(),
    }


def on_the_site():
    """Dict from the titles of tables to their text: those of the site alone."""
    return {"speed": everything(), "others on a GPU": others_on_gpu()}


def table(heads, rows):
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def read(machine):
    """What was measured on a machine: dict from backends to contents."""
    return json.loads((RESULTS / f"{machine}.json").read_text(encoding="utf-8"))


def by_backend():
    """What was measured on the first machine, by the titles of backends."""
    found = read(MACHINES[0])
    return {title: found[name] for name, title in BACKENDS.items()}


def rows_of(content, section, name=None, kind=None):
    """Rows of a section, all or those of a name and a pass."""
    return [
        row
        for row in content["sections"].get(section, ())
        if name in (None, row["name"]) and kind in (None, row["pass"])
    ]


def in_short():
    """Our times over those of others: their range over two CPUs."""
    packages = ("soft-moe-pytorch", "soft-mixture-of-experts")
    model, twin = "Soft MoE S/16 of 128 experts", "its dense twin"
    wanted = (
        ("layers", "the papers' own code (JAX)", "reference", None, None, None),
        ("layers", "two packages for PyTorch", "layers", None, None, packages),
        ("dense ViT S/16", "KerasHub, `transformers`", "models", None, None,
         ("keras-hub", "transformers")),
        ("layers with any router", "a dense MLP", "layers", None, None, ("dense",)),
        (f"{model}, predicting", twin, "models", "soft_moe", "forward", None),
        (f"{model}, a training step with 32 images", twin, "models",
         "soft_moe_whole_batch", None, None),
        (f"{model}, the same with 8", twin, "models", "soft_moe", "fit", None),
    )  # fmt: skip
    files = [content for machine in MACHINES for content in read(machine).values()]
    lines = []
    for ours, other, section, name, kind, rivals in wanted:
        ratios = [
            ratio["median"]
            for content in files
            for row in rows_of(content, section, name, kind)
            for rival, ratio in row["ratios"].items()
            if rivals is None or rival in rivals
        ]
        lines.append([ours, other, f"{min(ratios):.2f} to {max(ratios):.2f}"])
    text = "Range over two CPUs and all backends; under 1 is faster.\n"
    return f"{text}\n{table(['ours', 'over that of', 'ratio of times'], lines)}"


def layers_measured():
    """Time of layers with each router over that of a dense MLP, by backend."""
    files = by_backend()
    heads = ["router", *(f"{title}, {kind}" for title in files for kind in PASSES)]
    lines = []
    for name, title in LAYERS.items():
        cells = []
        for content in files.values():
            for kind in PASSES:
                (row,) = rows_of(content, "layers", name, kind)
                cells.append(f"{row['ratios']['dense']['median']:.2f}")
        lines.append([title, *cells])
    return table(heads, lines)


def everything():
    """All that was timed against something on one processor, memory, conditions."""
    files = by_backend()
    compared = dict.fromkeys(
        (section, row["name"], row["pass"], rival)
        for section in SECTIONS
        for content in files.values()
        for row in rows_of(content, section)
        for rival in row["ratios"]
    )
    lines = []
    for section, name, kind, rival in compared:
        cells = []
        for content in files.values():
            rows = rows_of(content, section, name, kind)
            cells.append(_ratio(rows[0], rival) if rows else "")
        lines.append([TITLES.get(name, name), rival, kind, *cells])
    parts = [table(["ours", "/ rival", "pass", *files], lines)]
    lines = [
        [row["name"], *(_memory(content, row["name"]) for content in files.values())]
        for row in rows_of(files["JAX"], "memory")
    ]
    parts.append(table(["peak of a training step, / the first", *files], lines))
    parts.append("".join(map(_conditions, files, files.values())))
    return "\n".join(parts)


def layers_on_gpu():
    """Milliseconds of layers, over those of a dense MLP, and of ways to experts."""
    wanted = [(name, "dense", "dense MLP") for name in LAYERS]
    wanted += [
        ("dropless", "capacity_1.25", "capacity 1.25"),
        ("token_choice_dispatch", "einsum", "einsum"),
        ("expert_choice_dispatch", "einsum", "einsum"),
    ]
    names = ("jax_bf16", "torch_bf16", "torch_f32")
    found = read("h200")
    files = [found[name] for name in names]
    lines = []
    for name, rival, other in wanted:
        for kind in PASSES:
            cells = []
            for content in files:
                (row,) = rows_of(content, "layers", name, kind)
                cells.append(f"{row['ms'][row['ours']]:.2f} ms, {_ratio(row, rival)}")
            lines.append([f"{TITLES[name]} / {other}", kind, *cells])
    return table(["ours / other", "pass", *(GPU[name] for name in names)], lines)


def others_on_gpu():
    """Ratios of times, ours over those of other code."""
    of_models = ("keras-hub", "transformers", "dense_twin")
    wanted = (
        ("jax_f32", "reference", ("vmoe", "vmoe, einsum", "vmoe, indices")),
        ("torch_bf16", "layers", ("soft-moe-pytorch", "soft-mixture-of-experts")),
        ("torch_bf16", "models", of_models),
        ("torch_f32", "models", of_models),
    )
    found = read("h200")
    lines = [
        [TITLES[row["name"]], row["pass"], GPU[file], rival, _ratio(row, rival)]
        for file, section, rivals in wanted
        for row in rows_of(found[file], section)
        for rival in rivals
        # The whole batch is that of all rows there.
        if rival in row["ratios"] and row["name"] != "soft_moe_whole_batch"
    ]
    return table(["ours", "pass", "on", "/ of", "ratio"], lines)


def steps_on_gpu():
    """Steps of a Soft MoE beside their bounds, and memory beside its plan."""
    lines = []
    for name in ("jax", "torch"):
        for row in read("h200")[f"{name}_steps"]["rows"]:
            bounds = row["bounds_ms"]
            bound = max(bounds["products"], bounds["weights"] + bounds["activations"])
            lines.append(
                [
                    f"{row['images']}",
                    BACKENDS[name],
                    f"{row['ms']:.1f} ms",
                    f"{bound:.1f} ms",
                    f"{row['peak_gb']:.1f} GB",
                    f"{row['planned_gb']:.1f} GB",
                ]
            )
    heads = ["images", "on", "a step", "bound", "peak of memory", "planned"]
    return table(heads, lines)


def _ratio(row, rival):
    if rival not in row["ratios"]:
        return ""
    return "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratios"][rival])


def _memory(content, name):
    """Weights and peak, and the peak as a multiple of the first row's."""
    first, *_ = rows_of(content, "memory")
    (row,) = rows_of(content, "memory", name)
    return (
        f"{row['peak_mb']:,.0f} MB, {row['peak_mb'] / first['peak_mb']:.2f} "
        f"(weights {row['weights_mb']:,.0f} MB)"
    )


def _conditions(title, content):
    """A line on what a file depends on."""
    machine = ", ".join(f"{k} {v}" for k, v in content["machine"].items() if v)
    rivals = ", ".join(f"{k} {v['version']}" for k, v in content["rivals"].items())
    return f"- {title}: {machine}; shapes {content['shapes']}; rivals {rivals}.\n"
