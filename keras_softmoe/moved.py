"""Public names of earlier releases, and their replacements.

A room with an entry ends in `__getattr__ = moved.attribute(__name__)`. The entries are
removed with release 1.0.
"""


def _figure(name, arguments="data"):
    return f'`analyze(model, {arguments}).plot("{name}")`'


_SWEEP = "`Sweep.plot`, as of `evaluation.routing_sweep(...)`"
_OWN_SWEEP = "`evaluation.Sweep(rows).plot(x, y, by)` with rows from your own loop"
_PICTURES = "data, num_pictures=4"
_PAIRS = "images, captions=captions"
_PICTURED_PAIRS = "images, captions=captions, num_pictures=4"

_RECIPE = "`ksm.training.recipe({!r}, ...)`"
_SYNTHETIC = "`experiments.synthetic` of the repository"

# Room (or "" for the package) -> removed name -> replacement, as it follows "Use ".
REPLACEMENTS: dict[str, dict[str, str]] = {
    "": {"costs": "`evaluation.cost`"},
    "analysis": {
        "InformationReducer": "`analyze(model, data, labels).blocks[3].information`",
        "LoadReducer": "`analyze(model, data).blocks`",
        "RoutingReducer": "`analyze(model, data, labels).blocks`",
        "SoftReducer": "`analyze(model, data).soft`",
        "UsageMonitor": "`RoutingMonitor(images, captions, every=50)`",
        "expert_examples": f"`analyze(model, {_PICTURED_PAIRS}).maps[3].examples`",
        "expert_information": "`analyze(model, data, labels).blocks[3].information`",
        "expert_load": "`analyze(model, data).blocks`",
        "main_experts": f"`analyze(model, {_PICTURES}).maps[3].main_experts`",
        "modality_statistics": f"`analyze(model, {_PAIRS}).modalities`",
        "pair_routing": f"`analyze(model, {_PICTURED_PAIRS}).maps`",
        "peak_sweep": _OWN_SWEEP,
        "plot_choice_weights": _figure("choice_weights"),
        "plot_concentration": _figure("concentration"),
        "plot_coverage": _figure("coverage", _PAIRS),
        "plot_discarded_patches": _figure(
            "discarded", f"{_PICTURES}, capacity_factors=(1.0, 0.5)"
        ),
        "plot_dropped_tokens": _OWN_SWEEP,
        "plot_expert_contributions": _figure("contributions"),
        "plot_expert_examples": _figure("examples", _PICTURED_PAIRS),
        "plot_expert_load": _figure("load"),
        "plot_expert_patches": _figure("patches", _PICTURES),
        "plot_experts": _figure("experts", _PICTURES),
        "plot_experts_by_class": _figure("by_class", "data, labels"),
        "plot_experts_by_position": _figure("by_position"),
        "plot_experts_in_use": _OWN_SWEEP,
        "plot_experts_per_image": _figure("experts_per_image"),
        "plot_modality_load": _figure("modality_load", _PAIRS),
        "plot_pair": _figure("pair", _PICTURED_PAIRS),
        "plot_pareto": _SWEEP,
        "plot_peaks": _OWN_SWEEP,
        "plot_priorities": _figure("priorities", _PAIRS),
        "plot_pruning": "`Sweep.plot`, of `evaluation.pruning_curve(...)`",
        "plot_random_routers": _SWEEP,
        "plot_routing_confidence": _figure("confidence", _PAIRS),
        "plot_routing_entropy": _OWN_SWEEP,
        "plot_slot_correlation": _figure("slot_correlation"),
        "plot_slots": _figure("slots", _PICTURES),
        "plot_sweep": _SWEEP,
        "plot_tags": _figure("words", f"{_PAIRS}, tagger=tagger"),
        "plot_token_weights": _figure("token_weights"),
        "plot_tokens_per_slot": _figure("tokens_per_slot"),
        "plot_trajectories": _figure("trajectories", _PAIRS),
        "routing_maps": f"`analyze(model, {_PICTURES}).maps`",
        "routing_report": '`analyze(model, data).save("report.html")`',
        "routing_statistics": "`analyze(model, data, labels).blocks`",
        "slot_correlation": "`analyze(model, data).soft[3].slot_cosines`",
        "soft_statistics": "`analyze(model, data).soft`",
        "tag_statistics": f"`analyze(model, {_PAIRS}, tagger=tagger)`",
    },
    "converters": {
        "Checkpoint": "the mapping that `read_checkpoint` returns",
        "download_checkpoint": "`read_checkpoint(url)`, which reads `gs://...` as well",
        "read_safetensors": "`read_checkpoint(path)`",
        "read_vit_checkpoint": "`read_checkpoint(path)`",
    },
    "evaluation": {
        "PrecisionAt1": "`training.PrecisionAt1`",
        "class_embeddings": "`model.class_embeddings(class_names, templates)`",
        "classify": "`zero_shot`, or `images @ classes.T` of embeddings",
        "pareto_front": "`sweep.pareto()` of the `Sweep` from `routing_sweep`",
        "random_routers": "`routing_sweep(model, test, layers=[3], "
        'random_logits=(False, True, "permuted"))`',
    },
    "datasets": {
        "COLOR_NAMES": "`class_names` of `ksm.datasets.sample('shapes')`",
        "GLYPH_CLASSES": "`class_names` of `ksm.datasets.sample('glyphs')`",
        "HELD_OUT_COMBINATIONS": "the labels of `ksm.datasets.sample('new_shapes')`",
        "SHAPE_COLOR_CLASSES": "`class_names` of `ksm.datasets.sample('shapes')`",
        "captioned_digits": "`digits` with captions of your own",
        "glyphs": f"`ksm.datasets.sample('glyphs')`, or {_SYNTHETIC}",
    },
    "exporting": {
        "FORMATS": "a name from the error of `export_model(model, path, format='')`",
        "exportable": "`cls.export = export_model`",
    },
    "layers": {
        "Attention": "`layers.EncoderBlock`, or `keras.layers.MultiHeadAttention`",
        "ContrastiveScale": "`models.TwoTowerBackbone` or `models.LIMoEBackbone`, "
        "which have its two weights",
        "ExpertBank": "`layers.Experts`; its two banks are `intermediate_dense` and "
        "`output_dense`",
        "LayerScale": "`layers.EncoderBlock(..., layer_scale=1e-5)`",
        "Registers": "`models.ViTMoEBackbone(..., num_registers=4)`",
        "TokenEmbedding": "`keras_hub.layers.TokenAndPositionEmbedding`, or a backbone "
        "of `models`",
        "Encoder": "a loop over layers `layers.EncoderBlock`, or a backbone of "
        "`models`",
    },
    "models": {
        "LIMoEImageConverter": "`ViTMoEImageConverter`",
        "every_n": "`moe_blocks(num_layers, every=n)`",
        "last_n": "`moe_blocks(num_layers, every=2, last=n)`",
        "second_half": "`moe_blocks(num_layers, last=(num_layers + 1) // 2)`",
    },
    "ops": {
        "RESAMPLINGS": "one of 'bilinear', 'bicubic', 'bicubic_antialias'",
        "identity": "`routers.IdentityRouter`",
        "resample_position_grid": "`layers.PositionEmbedding.resample`",
        "sigmoid_contrastive_loss": "`compile(loss='sigmoid')` of a contrastive model",
        "sincos_2d_table": "`layers.PositionEmbedding(grid, kind='sincos2d')`",
        "softmax_contrastive_loss": "`compile(loss='softmax')` of a contrastive model",
    },
    "presets": {"METADATA_FILE": '`"metadata.json"`'},
    "routers": {
        "GlobalEntropyLoss": "`RoutingLoss(ops.global_entropy_loss, soft_minimum=9)`",
        "GShardLoss": "`RoutingLoss(ops.gshard_loss)`",
        "ImportanceLoss": "`RoutingLoss(ops.importance_loss)`",
        "LoadLoss": "`RoutingLoss(ops.load_loss)`",
        "LocalEntropyLoss": "`RoutingLoss(ops.local_entropy_loss)`",
        "MergedEntropyLoss": "`RoutingLoss(ops.merged_entropy_loss)`",
        "MUTABLE_SETTINGS": "the `mutable_settings` of a router",
        "MutualInformationLoss": "`RoutingLoss(ops.mutual_information_loss)`",
        "PrunedLIMoERouter": "`LIMoERouter` with `kept_experts`",
        "SparseSettings": "the `**settings` of `SoftmaxTokenChoiceRouter`",
        "TargetEntropyLoss": "`RoutingLoss(ops.target_entropy_loss)`",
        "ZLoss": "`RoutingLoss(ops.z_loss)`",
    },
    "training": {
        **{
            name: _RECIPE.format(name)
            for name in (
                "finetuning",
                "imagenet_from_scratch",
                "limoe_pretraining",
                "soft_moe_contrastive",
                "soft_moe_pretraining",
                "vmoe_15b_pretraining",
                "vmoe_pretraining",
                "vtab",
            )
        },
        "ContrastiveRecipe": "`ksm.training.Recipe`",
        "WarmupPolynomialDecay": "`ksm.training.WarmupSchedule(...)`",
        "WarmupRsqrtDecay": '`ksm.training.WarmupSchedule(..., decay="rsqrt")`',
    },
}


def attribute(room):
    """Return the `__getattr__` of a room, with errors for removed names.

    Args:
        room: str, the full name of the module, as in its `__name__`.

    Returns:
        A function of a name. It raises an `AttributeError` for every name.
    """

    def __getattr__(name):
        replacement = REPLACEMENTS.get(room.partition(".")[2], {}).get(name)
        if replacement is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        raise AttributeError(f"`{room}.{name}` was removed. Use {replacement}.")

    return __getattr__
