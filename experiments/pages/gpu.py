"""Tables of what was timed on a GPU, from JSON."""

from experiments.lib.runs import read_json
from experiments.pages.results import BENCHMARKS, TIMED

GPU = BENCHMARKS / "h200"
# Files of `benchmarks/run.py`, and of `benchmarks/bounds.py`.
COLUMNS = {
    "jax_bf16": "JAX, bfloat16",
    "torch_bf16": "PyTorch, bfloat16",
    "torch_f32": "PyTorch, float32",
}
STEPS = {"jax_steps": "JAX", "torch_steps": "PyTorch"}
# Pairs of ways to the same numbers: the section's row, its rival, and how it is called.
WAYS = (
    ("dropless", "capacity_1.25", "token choice that drops nothing / capacity 1.25"),
    ("token_choice_dispatch", "einsum", "token choice, 4,616 tokens: gather / einsum"),
    (
        "expert_choice_dispatch",
        "einsum",
        "expert choice, 4,616 tokens: gather / einsum",
    ),
)
MODELS = {
    "soft_moe": "Soft MoE S/16 of 128 experts",
    "dense_vit": "dense ViT S/16",
}
# Files with rivals, their section, and the rivals.
OTHERS = (
    ("jax_f32", "reference", ("vmoe", "vmoe, einsum", "vmoe, indices")),
    ("torch_bf16", "layers", ("soft-moe-pytorch", "soft-mixture-of-experts")),
    ("torch_bf16", "models", ("keras-hub", "transformers", "dense_twin")),
    ("torch_f32", "models", ("keras-hub", "transformers", "dense_twin")),
)


def tables():
    """Dict from the titles of tables to their text."""
    return {
        "layers on a GPU": layers_table(),
        "others on a GPU": others_table(),
        "steps on a GPU": steps_table(),
    }


def layers_table():
    """Milliseconds of layers, over those of a dense MLP, and of ways to experts."""
    titles, files = COLUMNS.values(), [_read(name) for name in COLUMNS]
    rows = [(name, "dense", f"{title} / dense MLP") for name, title in TIMED.items()]
    lines = [
        _line(["ours / other", "pass", *titles]),
        _line(["---"] * (2 + len(files))),
    ]
    for name, rival, title in (*rows, *WAYS):
        for kind in ("forward", "forward+backward"):
            cells = [_cell(content, "layers", name, kind, rival) for content in files]
            lines.append(_line([title, kind, *cells]))
    return "\n".join(lines) + "\n"


def others_table():
    """Ratios of times, ours over those of other code."""
    lines = [_line(["ours", "pass", "on", "/ of", "ratio"]), _line(["---"] * 5)]
    titles = {**COLUMNS, "jax_f32": "JAX, float32"}
    names = {**TIMED, **MODELS}
    for file, section, rivals in OTHERS:
        for row in _read(file)["sections"][section]:
            for rival in rivals:
                # The whole batch is that of all rows there.
                if rival in row["ratios"] and row["name"] != "soft_moe_whole_batch":
                    cells = [names[row["name"]], row["pass"], titles[file], rival]
                    lines.append(_line([*cells, _ratio(row, rival)]))
    return "\n".join(lines) + "\n"


def steps_table():
    """Steps of a Soft MoE beside their bounds, and memory beside its plan."""
    heads = ["images", "on", "a step", "bound", "peak of memory", "planned"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name, backend in STEPS.items():
        for row in _read(name)["rows"]:
            bounds = row["bounds_ms"]
            memory = bounds["weights"] + bounds["activations"]
            least = max(bounds["products"], memory)
            cells = [
                f"{row['images']}",
                backend,
                f"{row['ms']:.1f} ms",
                f"{least:.1f} ms",
                f"{row['peak_gb']:.1f} GB",
                f"{row['planned_gb']:.1f} GB",
            ]
            lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def _cell(content, section, name, kind, rival):
    for row in content["sections"][section]:
        if (row["name"], row["pass"]) == (name, kind):
            return f"{row['ms'][row['ours']]:.2f} ms, {_ratio(row, rival)}"
    return "–"


def _ratio(row, rival):
    return "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratios"][rival])


def _line(cells):
    return f"| {' | '.join(cells)} |"


def _read(name):
    return read_json(GPU / f"{name}.json")
