"""Numbers recorded before a change of the structure, compared with those after it.

`python -m tests.guards.golden` records them again, on PyTorch. That is right only where
numbers are meant to change, and the commit says which.

- `predictions.npz`: outputs of the trained presets.
- `decisions.npz`: routings and losses of 22 routers, with and without padding, in
  training and out of it.
- `costs.json`: parameters and GFLOP of all presets.
- `plans.json`: placements of three presets.
- `configurations.json.gz`: the configuration of every preset, key by key.
- `saved_again.json`: the configurations that the trained presets are saved with again.
- `recipes.json`: optimizer, learning rate at 12 steps, loss and data of the recipes.
"""

import gzip
import json
import pathlib

import keras
import numpy as np

import keras_softmoe as ksm
from keras_softmoe import architecture, catalogue, ops, routers
from keras_softmoe.training.pipeline import named_augmentation
from tests.models.test_backends import TRAINED, outputs
from tests.support.references import to_numpy

DIRECTORY = pathlib.Path(__file__).with_name("golden")
WIDTH, TOKENS = 6, 12


# === Decisions ===


def _routers():
    """Dict from names to routers: every class, priority, loss, and way to combine."""
    losses = [
        routers.RoutingLoss(ops.importance_loss, weight=0.1),
        routers.RoutingLoss(ops.load_loss, weight=0.2),
        routers.RoutingLoss(ops.gshard_loss, weight=0.3),
        routers.RoutingLoss(ops.z_loss, weight=0.4),
    ]
    found = {
        f"softmax_token_choice_{number}": routers.SoftmaxTokenChoiceRouter(
            4,
            num_selected_experts=choices,
            capacity_factor=factor,
            priority=priority,
            normalize_gates=normalizes,
            keep_fraction=kept,
            losses=losses,
        )
        for number, (choices, factor, priority, normalizes, kept) in enumerate(
            [
                (1, 1.05, "position", False, 1.0),
                (2, 0.5, "max", True, 1.0),
                (2, 1.0, "sum", False, 0.5),
                (2, 0.7, "pair", False, 1.0),
                (2, None, "max", False, 1.0),
            ]
        )
    }
    for combine in ("softmax", "plan"):
        found[f"sinkhorn_token_choice_{combine}"] = routers.SinkhornTokenChoiceRouter(
            4,
            num_selected_experts=2,
            capacity_factor=1.0,
            priority="max",
            combine=combine,
        )
    return {
        **found,
        "softmax_expert_choice": routers.SoftmaxExpertChoiceRouter(
            4, 1.0, noise_std=1.0, losses=[routers.RoutingLoss(ops.z_loss)]
        ),
        "sinkhorn_expert_choice": routers.SinkhornExpertChoiceRouter(
            4, 2.0, combine="plan"
        ),
        "sparse_transport": routers.SparseTransportExpertChoiceRouter(4, 1.0),
        "rounded": routers.SoftmaxTokenChoiceRouter(
            4, rounding="ceil", multiple_of=4, eval_capacity_factor=0.5
        ),
        "permuted": routers.SoftmaxTokenChoiceRouter(4, random_logits="permuted"),
        "soft": routers.SoftRouter(3, slots_per_expert=2),
        "soft_uniform": routers.SoftRouter(3, dispatch="uniform", normalize=False),
        "identity": routers.IdentityRouter(4),
        "limoe": routers.LIMoERouter(8),
        "limoe_text_first": routers.LIMoERouter(
            8, num_selected_experts=2, priority="text_first"
        ),
        "limoe_per_modality": routers.LIMoERouter(
            8, per_modality=True, image_experts=5, text_experts=4
        ),
        "limoe_pruned": routers.LIMoERouter(
            3, kept_experts=(0, 2, 5), num_predicted_experts=8, losses=()
        ),
        "limoe_losses": routers.LIMoERouter(
            8,
            losses=[
                routers.RoutingLoss(ops.mutual_information_loss),
                routers.RoutingLoss(ops.target_entropy_loss, "image"),
                routers.RoutingLoss(ops.global_entropy_loss, "text", soft_minimum=4),
            ],
        ),
    }


def decisions():
    """Dict from what was asked to a routing's arrays and the losses.

    Names with "drawn" depend on random numbers, which are another backend's own.
    """
    found = {}
    for number, (name, router) in enumerate(_routers().items()):
        layouts = [()]
        if router.knows_modalities:
            layouts = [(("image", 8), ("text", 4)), (("text", 12),)]
        for modalities in layouts:
            for training in (False, True):
                for masked in (False, True):
                    key = "/".join(
                        [name, *(f"{n}_{m}" for m, n in modalities)]
                        + ["training"] * training
                        + ["masked"] * masked
                    )
                    noise = getattr(router, "noise_std", 0.0)
                    random = getattr(router, "random_logits", False)
                    if random or (training and noise):
                        key += "/drawn"
                    found |= _decision(
                        router, key, number, modalities, training, masked
                    )
    return found


def _decision(template, key, number, modalities, training, masked):
    keras.utils.set_random_seed(number)
    router = template.clone("router")
    router.build((None, TOKENS, WIDTH))
    for index, weight in enumerate(router.trainable_weights):
        rng = np.random.default_rng((number, index))
        weight.assign(rng.normal(size=weight.shape))
    tokens = np.random.default_rng(number).normal(size=(2, TOKENS, WIDTH))
    valid = np.arange(TOKENS) < np.array([[9], [12]])
    decision = router(
        keras.ops.convert_to_tensor(tokens, "float32"),
        valid=keras.ops.convert_to_tensor(valid) if masked else None,
        training=training,
        **({"modalities": modalities} if modalities else {}),
    )
    found = {
        f"{key}/{field}": to_numpy(value)
        for field, value in decision.routing._asdict().items()
        if value is not None
    }
    losses = [float(to_numpy(loss)) for loss in router.losses]
    return {**found, f"{key}/losses": np.array(losses)}


# === Presets ===


def predictions(names):
    """Dict from the names of trained presets to their outputs."""
    return {name: outputs(name) for name in names}


def costs(names):
    """Dict from names of presets to parameters and GFLOP."""
    found = {name: ksm.evaluation.cost(name) for name in names}
    return {
        name: [cost.parameters, cost.gflop_per_image] for name, cost in found.items()
    }


PLANNED = {
    "vmoe_base_patch16_every2_8e_224_imagenet21k": {"devices": 8},
    "soft_moe_small_patch16_128e_224": {"devices": 16, "shard_dense": True},
    "limoe_base_patch16_32e_224": {"devices": 32, "optimizer": "sgd"},
}


def plans():
    """Dict from three names of presets to the text of a plan."""
    return {
        name: str(ksm.distribution.plan(name, memory=8e10, **settings)).splitlines()
        for name, settings in PLANNED.items()
    }


def configurations():
    """Dict from all names of presets to their class and arguments, as in a file."""
    found = {}
    for name in ksm.presets.names():
        kind, config = catalogue.read_config(name)
        found[name] = [kind, as_now(config)]
    return found


def as_now(config):
    """A configuration with its router as it is serialized now, without modules."""
    if "router" in config:
        router = architecture.revive_router(config["router"])
        config = {**config, "router": keras.saving.serialize_keras_object(router)}
    return without_modules(json.loads(json.dumps(config)))


def saved_again():
    """Dict from the trained presets to the configuration that their backbone saves."""
    found = {}
    for name in TRAINED:
        kind, config = catalogue.read_config(name)
        cls = keras.saving.get_registered_object(kind)
        found[name] = cls.from_config(dict(config)).get_config()
    return without_modules(json.loads(json.dumps(found)))


def without_modules(config):
    """A configuration without modules: a class is found by its registered name."""
    if isinstance(config, list):
        return [without_modules(x) for x in config]
    if not isinstance(config, dict):
        return config
    found = {k: without_modules(v) for k, v in config.items() if k != "module"}
    return {k: v for k, v in found.items() if (k, v) not in WITHOUT_EFFECT}


# Settings of models younger than the recorded files, with values without effect
WITHOUT_EFFECT = [("shared_mlp_dim", None), ("expert_mlp_dim", None)]


# Settings of routers that are younger than the recorded files, with their defaults.
NEW_SETTINGS = {
    "keras_softmoe>SoftmaxTokenChoiceRouter": {
        "score": "softmax",
        "bias_update_rate": None,
        "bias_update_every": 1,
    },
}


def with_new_settings(config):
    """A recorded configuration with the defaults of settings that it cannot have."""
    if isinstance(config, list):
        return [with_new_settings(x) for x in config]
    if not isinstance(config, dict):
        return config
    config = {k: with_new_settings(v) for k, v in config.items()}
    new = NEW_SETTINGS.get(config.get("registered_name"), {})
    return {**config, "config": {**new, **config["config"]}} if new else config


# === Recipes ===

RECIPES = {
    "vmoe_pretraining": ("vmoe_pretraining", {"num_classes": 7, "steps": 521_000}),
    "vmoe_pretraining/changed": (
        "vmoe_pretraining",
        {
            "num_classes": 7,
            "steps": 1_000,
            "peak_learning_rate": 0.01,
            "end_learning_rate": 0.001,
            "warmup_steps": 100,
            "weight_decay": 0.3,
            "clip_norm": 10.0,
            "image_size": 32,
            "batch_size": 64,
            "augmentation": "strong1",
            "steps_per_epoch": 250,
        },
    ),
    "soft_moe_pretraining": ("soft_moe_pretraining", {"num_classes": 7}),
    "vmoe_15b_pretraining": (
        "vmoe_15b_pretraining",
        {"num_classes": 7, "steps": 2_900_000},
    ),
    "imagenet_from_scratch": ("imagenet_from_scratch", {}),
    "finetuning": ("finetuning", {"num_classes": 7}),
    "finetuning/changed": (
        "finetuning",
        {"num_classes": 7, "steps": 250, "average_momentum": 0.999999},
    ),
    "vtab": ("vtab", {"num_classes": 7}),
    "limoe_pretraining": ("limoe_pretraining", {}),
    "limoe_pretraining/largest": (
        "limoe_pretraining",
        {
            "steps": 825_000,
            "peak_learning_rate": 2e-3,
            "decay": "rsqrt",
            "cooldown_steps": 125_000,
            "batch_size": 21_502,
            "image_size": 288,
        },
    ),
    "soft_moe_contrastive": ("soft_moe_contrastive", {}),
}


def recipes():
    """Dict from recipes, with changes or without, to all that they decide."""
    found = {
        key: _decided(ksm.training.recipe(name, **changes))
        for key, (name, changes) in RECIPES.items()
    }
    return json.loads(json.dumps(found))


class _Model:
    """The arguments of a model's `compile`."""

    def __init__(self, num_classes):
        self.output_shape = (None, num_classes)

    def compile(self, **arguments):
        self.arguments = arguments


def _decided(recipe):
    # Names of the losses of pairs are those of `LIMoEContrastive.compile`.
    loss = {"contrastive": "auto", "contrastive_softmax": "softmax"}.get(recipe.loss)
    metrics = central_crop = None
    if loss is None:
        model = _Model(recipe.num_classes)
        recipe.compile(model)
        serialize = keras.saving.serialize_keras_object
        loss = without_modules(serialize(model.arguments["loss"]))
        metrics = [without_modules(serialize(m)) for m in model.arguments["metrics"]]
        central_crop = recipe.central_crop
    optimizer, schedule = recipe.make_optimizer(), recipe.schedule()
    config = optimizer.get_config()
    config.pop("learning_rate")
    config.pop("name")
    steps = [round(recipe.steps * i / 10) for i in range(12)]
    return {
        "optimizer": [type(optimizer).__name__, config],
        "learning_rates": [float(to_numpy(schedule(step))) for step in steps],
        "loss": loss,
        "metrics": metrics,
        "num_classes": recipe.num_classes,
        "image_size": recipe.image_size,
        "batch_size": recipe.batch_size,
        "augmentation": named_augmentation(recipe.augmentation)._asdict(),
        "central_crop": central_crop,
        "fit_arguments": recipe.fit_arguments,
    }


# === Files ===


def read(name):
    if name.endswith(".npz"):
        with np.load(DIRECTORY / name) as file:
            return {key: file[key] for key in file}
    text = (DIRECTORY / name).read_bytes()
    return json.loads(gzip.decompress(text) if name.endswith(".gz") else text)


def record():
    DIRECTORY.mkdir(exist_ok=True)
    np.savez_compressed(DIRECTORY / "predictions.npz", **predictions(TRAINED))
    np.savez_compressed(DIRECTORY / "decisions.npz", **decisions())
    for name, values in (
        ("costs", costs(ksm.presets.names())),
        ("plans", plans()),
        ("saved_again", saved_again()),
        ("recipes", recipes()),
    ):
        (DIRECTORY / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
    text = json.dumps(configurations(), sort_keys=True).encode()
    (DIRECTORY / "configurations.json.gz").write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    assert keras.backend.backend() == "torch"
    record()
