"""Where the processor's time of a training step goes, beside what bounds it.

Seconds are those of the processor, for this process alone, and steps take turns: what
else runs on the machine changes them little. What the system spends on handing out
memory is counted apart. Models have four blocks of S/16, the last two with experts, as
in `memory.py`, and 8 images.

- `first call`: `predict` and `fit` of the Soft MoE, beside KerasHub's dense ViT.
- `model`: a step of `fit` beside the dense twin; the same while the process keeps the
  memory that it frees; and the parts of the step: forward and backward, and the update
  for given gradients.
- `adam`: the update of one bank of experts by our Adam, and by Keras'.
- `dense`: our dense ViT beside those of others.
- `layer`: soft layers, forward and backward, beside their products alone (the second
  one also beside these and the activation, and other packages).

    export OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1
    KERAS_BACKEND=jax python benchmarks/where.py --shapes paper
    python benchmarks/where.py --page docs/results/where_time_goes.md
"""

import ctypes
import gc
import pathlib
import resource
import statistics
from types import SimpleNamespace

import keras
import layers
import models
import report
import rivals
import tables
from keras import ops
from keras.optimizers import AdamW
from timing import fit_step, step, wait

from keras_softmoe import training

KERAS_ADAM = "keras.optimizers.AdamW"

RESULTS = pathlib.Path(__file__).parent / "results" / "where"

BEGIN = "<!-- where: written by benchmarks/where.py -->"
END = "<!-- end of where -->"

# === What is counted ===


def spent(run):
    """Processor seconds of the program and of the system, and pages, of one call."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    run()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return tuple(
        getattr(after, key) - getattr(before, key)
        for key in ("ru_utime", "ru_stime", "ru_minflt")
    )


def row(name, kind, steps, rounds):
    """Let steps take turns, ours first, and say what each took (medians)."""
    first = {key: spent(run) for key, run in steps.items()}
    turns = {key: [] for key in steps}
    for number in range(rounds + 1):
        for key, run in steps.items():
            taken = spent(run)
            # Allocators and caches settle in the second call.
            if number:
                turns[key].append(taken)
    ours, *others = steps
    totals = {key: [user + system for user, system, _ in turns[key]] for key in steps}
    ratios = {}
    for rival in others:
        of_rounds = [a / b for a, b in zip(totals[ours], totals[rival], strict=True)]
        ratios[rival] = {
            "median": statistics.median(of_rounds),
            "min": min(of_rounds),
            "max": max(of_rounds),
        }
    medians = {
        key: [statistics.median(x) for x in zip(*turns[key], strict=True)]
        for key in steps
    }
    return {
        "name": name,
        "pass": kind,
        "ours": ours,
        "rounds": rounds,
        "first_s": {key: sum(first[key][:2]) for key in steps},
        "user_s": {key: medians[key][0] for key in steps},
        "system_s": {key: medians[key][1] for key in steps},
        "pages": {key: medians[key][2] for key in steps},
        "ratios": ratios,
    }


def keep_memory(keeps=True):
    """Let glibc keep freed memory for the next arrays, or give it back as by default.

    By default arrays of over 32 MB get new memory, page by page, each time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    most_maps, trim_threshold = -4, -1
    mallopt(most_maps, 0 if keeps else 65536)
    mallopt(trim_threshold, -1 if keeps else 128 * 1024)


# === What takes turns ===


def update_step(model):
    """The optimizer's update of all weights for given gradients."""
    optimizer, variables = model.optimizer, model.trainable_variables
    gradients = [ops.full(v.shape, 1e-6, v.dtype) for v in variables]
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        update = jax.jit(
            lambda weights, state, gradients: optimizer.stateless_apply(
                state, gradients, weights
            ),
            donate_argnums=(0, 1),
        )
        state = [[ops.copy(v) for v in vs] for vs in (variables, optimizer.variables)]

        def run():
            state[:] = update(*state, gradients)
            wait(state)

        return run
    if backend == "tensorflow":
        import tensorflow as tf

        # Arguments, because what a function captures may be folded into it.
        update = tf.function(lambda *given: optimizer.apply(list(given), variables))
        return lambda: wait(update(*gradients))
    import torch

    def run():
        with torch.no_grad():
            optimizer.apply(gradients, variables)

    return run


def measure_models(shapes, rounds):
    """The Soft MoE, its twin and KerasHub's ViT. Yields rows."""
    images, labels = models.data(shapes)
    vits = {
        "soft_moe": models.soft_moe(shapes).output["pooled_output"],
        "dense_twin": models.backbone(shapes).output["pooled_output"],
        rivals.KERAS_HUB: rivals.keras_hub_vit(**shapes.vit).output[:, 0],
    }
    trained = {key: models.classifier(features) for key, features in vits.items()}
    predicts = {
        key: lambda m=model: m.predict_on_batch(images)
        for key, model in trained.items()
    }
    yield row("model", "predict", predicts, rounds)
    steps = {key: fit_step(model, images, labels) for key, model in trained.items()}
    yield row("model", "fit", steps, rounds)
    del trained[rivals.KERAS_HUB], steps[rivals.KERAS_HUB]
    keep_memory()
    yield row("model", "fit, memory kept", steps, rounds)
    keep_memory(False)
    # `fit` takes over the weights that steps hold on JAX: it is not called again.
    steps = {key: step(model, images, True) for key, model in trained.items()}
    yield row("model", "forward+backward", steps, rounds)
    steps = {key: update_step(model) for key, model in trained.items()}
    yield row("model", "update", steps, rounds)


def measure_dense(shapes, rounds):
    """Our dense ViT and those of others. Yields rows."""
    images, _ = models.data(shapes)
    vits, inputs = models.dense_vits(shapes, images)
    for kind in ("forward", "forward+backward"):
        backward = kind != "forward"
        steps = {key: step(vit, inputs[key], backward) for key, vit in vits.items()}
        yield row("dense", kind, steps, rounds)


def measure_layer(name, shapes, rounds, jit_compile=False):
    """A soft layer beside its products, with and without its activation; one row."""
    competitors, inputs = layers.competitors(layers.ROUTERS[name](), shapes, "auto")
    del competitors["dense"]
    products = layers.product_shapes(competitors["layer"], *inputs.shape)
    # (E, G * C, H), the input of the experts' second product
    hidden = ops.convert_to_numpy(keras.random.normal(products[3][0], seed=0))
    gelu = keras.layers.Activation(lambda x: ops.gelu(x, approximate=True))
    steps = {
        key: step(layer, inputs, True, jit_compile)
        for key, layer in competitors.items()
    }
    activation, alone = step(gelu, hidden, True, jit_compile), steps["products"]
    steps["products and activation"] = lambda: (alone(), activation())
    return row(name, "forward+backward", steps, rounds)


def measure_adam(bank_shape, rounds):
    """The update of one bank of experts by our Adam and by Keras'; one row."""
    steps = {}
    for key, make in (("training.Adam", training.Adam), (KERAS_ADAM, AdamW)):
        optimizer, bank = make(1e-3), keras.Variable(ops.ones(bank_shape))
        optimizer.build([bank])
        steps[key] = update_step(
            SimpleNamespace(optimizer=optimizer, trainable_variables=[bank])
        )
    return row("adam", "update", steps, rounds)


def measure_all(options):
    """Rows of all contests, for `report.run_alone`."""
    shapes, rounds = models.SHAPES[options.shapes], options.rounds
    shapes = shapes._replace(num_layers=4, images=8)
    yield from measure_models(shapes, rounds)
    gc.collect()
    yield measure_adam((16, shapes.hidden_dim, shapes.mlp_dim), rounds)
    yield from measure_dense(shapes, rounds)
    gc.collect()
    of_layers = layers.SHAPES[options.shapes]
    few = of_layers._replace(images=8)
    yield measure_layer("soft_128x1", few, rounds, options.jit_compile)
    gc.collect()
    yield measure_layer("soft_32x6", of_layers, rounds, options.jit_compile)


# === The page ===


def ratio_cell(result, name, kind, rival):
    """The ratio of a row, empty if it was not measured."""
    found = result.row("where", name, kind)
    if found is None or rival not in found["ratios"]:
        return ""
    return tables.ratio_text(found["ratios"][rival])


def shares(result, kind, keys=("user_s", "system_s")):
    """A part of a step of `fit`, in percent: of the Soft MoE's, and of its twin's."""
    part, fit = (result.row("where", "model", k) for k in (kind, "fit"))

    def share(model):
        whole = fit["user_s"][model] + fit["system_s"][model]
        return f"{sum(part[key][model] for key in keys) / whole:.0%}"

    return f"{share('soft_moe')}, {share('dense_twin')}"


def first_calls(result, kind):
    """Seconds of first calls: of the Soft MoE, and of KerasHub's dense ViT."""
    seconds = result.row("where", "model", kind)["first_s"]
    return f"{seconds['soft_moe']:.1f} s, {seconds[rivals.KERAS_HUB]:.1f} s"


_SOFT_128 = "soft layer, 128 x 1, 8 images, training"
_SOFT_32 = "soft layer, 32 x 6, 32 images, training"
_OF_ROWS = (
    ("a step of `fit`", "its dense twin", "model", "fit", "dense_twin"),
    ("... with memory kept", "the same", "model", "fit, memory kept", "dense_twin"),
    ("... without the update", "the same", "model", "forward+backward", "dense_twin"),
    ("update by `training.Adam`", f"`{KERAS_ADAM}`", "adam", "update", KERAS_ADAM),
    ("`predict`", "its dense twin", "model", "predict", "dense_twin"),
    (_SOFT_128, "its products", "soft_128x1", "forward+backward", "products"),
    (_SOFT_32, "its products", "soft_32x6", "forward+backward", "products"),
    *(
        (_SOFT_32, text, "soft_32x6", "forward+backward", rival)
        for text, rival in (
            ("its products and GELU", "products and activation"),
            ("`soft-moe-pytorch`", rivals.SOFT_MOE_PYTORCH),
            ("`soft-mixture-of-experts`", rivals.SOFT_MIXTURE),
        )
    ),
    *(
        (f"dense S/16, {kind}", f"`{rival}`", "dense", kind, rival)
        for kind in ("forward", "forward+backward")
        for rival in (rivals.KERAS_HUB, rivals.TRANSFORMERS)
    ),
)


def table(results):
    """What was measured, in Markdown."""
    rows = [
        [ours, rival, *(ratio_cell(result, *of_row) for result in results)]
        for ours, rival, *of_row in _OF_ROWS
    ]
    of_step = "share of a step, the twin's share"
    rows += [
        ["the optimizer's update", of_step, *(shares(r, "update") for r in results)],
        [
            "memory handed out by the system",
            of_step,
            *(shares(r, "fit", ("system_s",)) for r in results),
        ],
    ]
    rows += [
        [
            f"first `{kind}`",
            "KerasHub's dense ViT",
            *(first_calls(r, kind) for r in results),
        ]
        for kind in ("predict", "fit")
    ]
    heads = ["ours", "beside", *(result.title for result in results)]
    conditions = "\n".join(
        f"- {r.title}: {report.describe(r.content['machine'])}." for r in results
    )
    return f"{tables.table(heads, rows)}\n\n{conditions}"


def page(text, results):
    """The text of the page with the table of now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}"


def main(arguments=None):
    """Command line: see `--help`."""
    parser = report.command_line(__doc__, models.SHAPES)
    parser.add_argument("--page", help="only write the table there, from the results")
    options = parser.parse_args(arguments)
    if options.page:
        file = pathlib.Path(options.page)
        results = tables.read(sorted(RESULTS.glob("*.json")))
        file.write_text(page(file.read_text("utf-8"), results), encoding="utf-8")
        return
    if options.json is None:
        RESULTS.mkdir(exist_ok=True)
        options.json = RESULTS / f"{keras.backend.backend()}.json"
    report.run_alone("where", options, measure_all)


if __name__ == "__main__":
    main()
