"""Public names of earlier releases, and what replaces each of them.

A room with an entry ends in `__getattr__ = moved.attribute(__name__)`. The entries are
removed with release 1.0.
"""

# Room -> removed name -> replacement, as it follows "Use ".
REPLACEMENTS: dict[str, dict[str, str]] = {
    "ops": {
        "RESAMPLINGS": "one of 'bilinear', 'bicubic', 'bicubic_antialias'",
        "identity": "`routers.IdentityRouter`",
        "resample_position_grid": "`layers.PositionEmbedding.resample`",
        "sigmoid_contrastive_loss": "`compile(loss='sigmoid')` of a contrastive model",
        "sincos_2d_table": "`layers.PositionEmbedding(grid, kind='sincos2d')`",
        "softmax_contrastive_loss": "`compile(loss='softmax')` of a contrastive model",
    },
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
        "TargetEntropyLoss": "`RoutingLoss(ops.target_entropy_loss)`",
        "ZLoss": "`RoutingLoss(ops.z_loss)`",
    },
}


def attribute(room):
    """Return the `__getattr__` of a room: removed names say what replaces them.

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
