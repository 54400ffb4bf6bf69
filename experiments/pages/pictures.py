"""Pictures of the concept pages and of the gallery, drawn from real routings.

One small group of tokens goes through every router, untrained but for logits that are
set: twelve tokens, of which half prefer the first of four experts and none the last. So
the pictures show the same situation, and what differs is the router.
"""

import io
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import keras_softmoe as ksm
from experiments.icons import answers as icons, study
from experiments.letters import answers
from experiments.lib.runs import read_json
from experiments.pages import letters
from experiments.pages.guides import small_figure
from experiments.pages.presets import drawn

TOKENS, WIDTH, EXPERTS = 12, 8, 4
COLORS = ["#1f77b4", "#d98200", "#2a9d55", "#b03a8c"]
DROPPED = "#999999"
# How many tokens prefer each expert, before there is noise.
PREFERENCES = (7, 2, 2, 1)
# Of the tokens of LIMoE's router.
SPLIT = (("image", 8), ("text", 4))
NUM_IMAGES = 64


def draw(docs):
    """Write all pictures into the directory of the pages."""
    concepts, gallery = docs / "concepts" / "images", docs / "images"
    for name, (title, router) in routers().items():
        _save(_routing(title, router), concepts / f"{name}.png")
    _save(_weights(), concepts / "soft_against_sparse.png")
    _save(_dropped(), concepts / "dropped.png")
    _save(_schedules(), concepts / "schedules.png")
    _save(answers.plot_answers(read_json(letters.RESULTS)), gallery / "letters.png")
    of_icons = study.read_results("small")
    _save(icons.curves(of_icons), gallery / "icons.png")
    for name in ksm.presets.names():
        if ksm.presets.describe(name).kind == "trained" and drawn(name):
            _save(_preset(name), gallery / f"routing_{name}.png")


def routers():
    """Dict from names of pictures to pairs of a title and a router."""
    of = ksm.routers
    same = {"num_experts": EXPERTS, "capacity_factor": 1.0}
    found = {
        "soft": (
            "every slot is a mean of all tokens, with its own weights",
            of.SoftRouter(EXPERTS, 3, initial_scale=4.0),
        ),
        "identity": ("tokens in turn, whatever they are", of.IdentityRouter(EXPERTS)),
        "softmax_token_choice": (
            "tokens choose, first come first served",
            of.SoftmaxTokenChoiceRouter(**same),
        ),
        "batch_priority": (
            "tokens choose, the most certain first",
            of.SoftmaxTokenChoiceRouter(priority="max", **same),
        ),
        "sinkhorn_token_choice": (
            "tokens choose by a balanced plan",
            of.SinkhornTokenChoiceRouter(**same),
        ),
        "softmax_expert_choice": (
            "experts choose their most probable tokens",
            of.SoftmaxExpertChoiceRouter(**same),
        ),
        "sinkhorn_expert_choice": (
            "experts choose by a balanced plan",
            of.SinkhornExpertChoiceRouter(**same),
        ),
        "sparse_transport_expert_choice": (
            "a plan within the capacity",
            of.SparseTransportExpertChoiceRouter(**same),
        ),
        "limoe": (
            "tokens of an image and of a caption choose together",
            of.LIMoERouter(**same),
        ),
    }
    names = {"batch_priority": 'priority="max"'}
    return {
        name: (f"{names.get(name, type(router).__name__)}: {text}", router)
        for name, (text, router) in found.items()
    }


def _tokens():
    """The tokens, `(1, S, D)`, and which expert each prefers."""
    rng = np.random.default_rng(3)
    preferred = rng.permutation(np.repeat(np.arange(EXPERTS), PREFERENCES))
    tokens = rng.normal(size=(1, TOKENS, WIDTH)) / 2
    tokens[0, np.arange(TOKENS), preferred] += rng.uniform(0.8, 2.2, TOKENS)
    # Noise may have changed a token's mind.
    return tokens.astype("float32"), tokens[0, :, :EXPERTS].argmax(-1)


def _decide(router):
    tokens, preferred = _tokens()
    keras.utils.set_random_seed(1)
    router.build(tokens.shape)
    for weight in router.weights:
        # The logit of an expert is one of the token's numbers.
        if weight.shape == (WIDTH, EXPERTS):
            weight.assign(np.eye(WIDTH, EXPERTS))
    if isinstance(router, ksm.routers.SoftRouter):
        slots = np.random.default_rng(0).normal(size=router.mu.shape) / 4
        slots[np.arange(EXPERTS), np.arange(EXPERTS)] += 1
        router.mu.assign(slots)
    split = {"modalities": SPLIT} if isinstance(router, ksm.routers.LIMoERouter) else {}
    return router(tokens, **split), preferred


def _routing(title, router):
    """Tokens on the left, the slots of experts on the right, and who goes where."""
    decision, preferred = _decide(router)
    dense = ksm.ops.to_dense(decision.routing, TOKENS)
    # (S, E, C)
    dispatch = keras.ops.convert_to_numpy(dense.dispatch)[0]
    _, num_experts, capacity = dispatch.shape
    is_limoe = isinstance(router, ksm.routers.LIMoERouter)
    modalities = SPLIT if is_limoe else (("token", TOKENS),)
    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    tops = np.arange(TOKENS)[::-1] * 1.0
    gap = (TOKENS - 1) / (num_experts * capacity + num_experts - 1 - 1)
    heights = np.empty((num_experts, capacity))
    for e in range(num_experts):
        for c in range(capacity):
            heights[e, c] = TOKENS - 1 - gap * (e * (capacity + 1) + c)
            empty = not dispatch[:, e, c].any()
            ax.add_patch(
                Rectangle(
                    (5, heights[e, c] - 0.36 * gap), 0.9, 0.72 * gap,
                    facecolor="white" if empty else COLORS[e], alpha=0.8,
                    edgecolor=COLORS[e], hatch="///" if empty else None,
                )
            )  # fmt: skip
        ax.text(6.1, heights[e].mean(), f"expert {e}", va="center", color=COLORS[e])
    for s in range(TOKENS):
        for e, c in zip(*np.nonzero(dispatch[s]), strict=True):
            weight = dispatch[s, e, c]
            if router.mixes_tokens:
                style = {"alpha": min(1.0, 1.6 * weight), "linewidth": 4 * weight}
            else:
                style = {"alpha": 0.8, "linewidth": 1.4}
            ax.plot([0.25, 5], [tops[s], heights[e, c]], color=COLORS[e], **style)
    taken = dispatch.sum(axis=(1, 2)) > 0
    labels = [name for name, count in modalities for _ in range(count)]
    for s in range(TOKENS):
        color = COLORS[preferred[s]]
        ax.plot(
            0, tops[s], marker="s" if labels[s] == "text" else "o", markersize=11,
            color=color if taken[s] else "white", markeredgecolor=color, alpha=0.9,
        )  # fmt: skip
        text = labels[s] if len(modalities) > 1 else f"token {s}"
        ax.text(-0.35, tops[s], text if taken[s] else f"{text}, dropped", ha="right",
                va="center", color="black" if taken[s] else DROPPED)  # fmt: skip
    ax.set(xlim=(-2.4, 7.4), ylim=(-0.8, TOKENS - 0.2))
    ax.set_title(title, fontsize=10)
    ax.axis("off")
    empty = int((~dispatch.any(axis=0)).sum())
    figure.supxlabel(
        f"{int((~taken).sum())} of {TOKENS} tokens dropped, {empty} of "
        f"{num_experts * capacity} slots empty. A token has the colour of the expert "
        "that it prefers.",
        fontsize=8,
    )
    return figure


def _weights():
    """Dispatch and combine weights of a soft and of a sparse router."""
    figure, axes = plt.subplots(2, 2, figsize=(7, 5.6), layout="constrained")
    chosen = {"soft": "SoftRouter", "batch_priority": "SoftmaxTokenChoiceRouter"}
    for row, (name, title) in zip(axes, chosen.items(), strict=True):
        _, router = routers()[name]
        decision, _ = _decide(router)
        dense = ksm.ops.to_dense(decision.routing, TOKENS)
        for ax, part in zip(row, ("dispatch", "combine"), strict=True):
            weights = keras.ops.convert_to_numpy(getattr(dense, part))[0]
            shown = ax.imshow(weights.reshape(TOKENS, -1), cmap="Blues", vmin=0)
            ax.set(
                title=f"{title}: {part}",
                xlabel="slots, expert by expert",
                ylabel="tokens",
            )
            ax.set_xticks(np.arange(EXPERTS) * weights.shape[-1] + 1, range(EXPERTS))
            ax.set_yticks([])
            figure.colorbar(shown, ax=ax, shrink=0.8)
    return figure


def _dropped():
    """Dropped tokens of a trained V-MoE against capacity, for groups of some sizes."""
    model = ksm.models.ViTMoEBackbone.from_preset("vmoe_tiny_patch8_8e_32_icons")
    images, *_ = ksm.datasets.sample("icons", NUM_IMAGES)
    pixels = images / 127.5 - 1.0
    # Below a half, experts have less than one slot in groups of one image.
    factors = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
    figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for group, color in zip((1, 8, NUM_IMAGES), COLORS, strict=False):
        model.set_routing(group_images=group)
        shares = []
        for factor in factors:
            model.set_routing(capacity_factor=factor)
            with ksm.routers.record() as decisions:
                model(pixels)
            found = [
                keras.ops.convert_to_numpy(decision.summary["dropped"]).mean()
                for decision in decisions.values()
            ]
            shares.append(100 * np.mean(found))
        label = f"{group} image{'s' if group > 1 else ''} in a group"
        ax.plot(factors, shares, marker="o", color=color, label=label)
    ax.set(
        xlabel="capacity factor C",
        ylabel="dropped tokens, %",
        ylim=(0, None),
        title="V-MoE of 8 experts on 64 icons, mean over its blocks",
    )
    ax.title.set_fontsize(10)
    ax.legend(frameon=False)
    return figure


def _schedules():
    """The learning rates of all recipes, from the first step to the last."""
    figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    lines = {"linear": "-", "cosine": "--", "rsqrt": ":"}
    for number, name in enumerate(ksm.training.recipes()):
        recipe = ksm.training.recipe(name)
        steps = np.linspace(0, recipe.steps, 400)
        rates = keras.ops.convert_to_numpy(recipe.schedule()(steps))
        share = rates / recipe.peak_learning_rate
        line = lines[recipe.decay]
        ax.plot(steps / recipe.steps, share, line, color=f"C{number}", label=name)
    ax.set(
        xlabel="share of the steps",
        ylabel="learning rate, share of the peak",
        ylim=(0, None),
    )
    ax.legend(frameon=False, fontsize=8)
    return figure


def _preset(name):
    """How a preset routes."""
    sample = ksm.datasets.sample("letters" if name.endswith("letters") else "icons")
    if name.startswith("limoe"):
        model = ksm.models.LIMoEContrastive.from_preset(name)
        routing = ksm.analysis.analyze(
            model, sample.images, captions=sample.captions, verbose=0
        )
        return routing.plot("modality_load")
    model = ksm.models.ViTMoEImageClassifier.from_preset(name)
    routing = ksm.analysis.analyze(model, sample.images, num_pictures=5, verbose=0)
    return routing.plot("slots" if name.startswith("soft") else "patches")


def _save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    figure.savefig(file, dpi=130)
    plt.close(figure)
    file.seek(0)
    small_figure(file, Path(path))
