"""Pages of the API reference: one for each module, with every public name."""

import importlib
import inspect

import keras_softmoe
from keras_softmoe.analysis.figures import FIGURES

# What a page opens with: what the module is for, and where to read on.
MODULES = {
    "layers": "Mixtures of experts as layers, and the parts of a Vision Transformer.",
    "routers": "Which tokens go to which slots. Losses that balance experts, and "
    "`record`, which shows decisions.",
    "models": "Backbones, tasks and their preprocessing, on KerasHub's classes. All "
    "have `from_preset(preset, load_weights=True, **kwargs)` and "
    "`save_to_preset(preset_dir)`. Models have `export`, see "
    "[`ksm.exporting`](exporting.md).",
    "presets": "What there is to load by name.",
    "converters": "Parameters from and to other libraries, and upcycling.",
    "evaluation": "How good a model is, how good its features are, what it costs.",
    "analysis": "Routing decisions: statistics, maps, figures, a report.",
    "training": "The papers' recipes, and the schedules and optimizers they need.",
    "datasets": "Images that need no network, TensorFlow Datasets, vocabularies.",
    "distribution": "Experts and batches on many devices.",
    "exporting": "Files for other runtimes.",
    "ops": "Pure functions on tensors, from which routers are made.",
}
# What most readers look for, before the others
FIRST = ("SoftMoE",)


def public_names(module):
    """Names in a module that are neither private nor modules, sorted after `FIRST`."""
    content = importlib.import_module(f"keras_softmoe.{module}")
    return [
        name
        for name in sorted(dir(content), key=lambda n: (n not in FIRST, n.lower()))
        if not name.startswith("_") and _is_ours(getattr(content, name))
    ]


def _is_ours(value):
    # `TYPE_CHECKING` is a bool that says nothing to a reader.
    if inspect.ismodule(value) or isinstance(value, bool):
        return False
    return getattr(value, "__module__", "keras_softmoe").startswith("keras_softmoe")


def page(module):
    """The page of a module, Markdown that mkdocstrings fills in."""
    parts = [f"# ksm.{module}", MODULES[module]]
    constants = []
    for name in public_names(module):
        value = getattr(importlib.import_module(f"keras_softmoe.{module}"), name)
        if hasattr(value, "__module__"):
            # Where it is defined: a name that is imported when it is first used can be
            # found nowhere else without running the code.
            parts.append(
                f"::: {value.__module__}.{value.__name__}\n"
                f"    options:\n      heading: ksm.{module}.{name}\n"
                f"      toc_label: {name}"
            )
        else:
            constants.append(f"- `ksm.{module}.{name}`: {_described(value)}")
    if constants:
        parts += ["## Constants", "\n".join(constants)]
    if module == "analysis":
        parts += ["## Figures", *_figures()]
    return "\n\n".join(parts) + "\n"


def _figures():
    """The table of figures, Markdown."""
    rows = [
        f"| `{name}` | `{row.part}` | {row.caption} | "
        f"{', '.join(f'`{option}`' for option in row.options)} | {row.source} |"
        for name, row in FIGURES.items()
    ]
    return [
        "`routing.plot(figure)` draws one of these, and `routing.figures` names those "
        "that apply. Scores of several models or settings are drawn by "
        "[`evaluation.Sweep.plot`](evaluation.md).",
        "\n".join(
            [
                "| figure | of | shows | options | in |",
                "|---|---|---|---|---|",
                *rows,
            ]
        ),
    ]


def _described(value):
    if isinstance(value, str):
        return f"`{value!r}`"
    values = list(value)
    shown = ", ".join(f"`{v!r}`" for v in values[:6])
    return f"{len(values)} values, {shown}{', ...' if len(values) > 6 else ''}"


def pages():
    """Dict from paths below `docs` to texts."""
    missing = set(dir(keras_softmoe)) - set(MODULES) - {"__version__"}
    if missing:
        raise ValueError(f"`MODULES` in {__file__} lacks modules. Received: {missing}")
    rows = [
        f"| [`ksm.{module}`]({module}.md) | {text} | {len(public_names(module))} |"
        for module, text in MODULES.items()
    ]
    index = "\n".join(
        [
            "# API reference\n",
            "`import keras_softmoe as ksm`. `layers`, `routers` and `ops` "
            "need Keras and one backend; the others are imported when first used.\n",
            "| module | what for | names |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )
    return {"api/index.md": index} | {
        f"api/{module}.md": page(module) for module in MODULES
    }
