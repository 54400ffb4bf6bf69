"""Public names of earlier releases, and what replaces each of them.

A room with an entry ends in `__getattr__ = moved.attribute(__name__)`. The entries are
removed with release 1.0.
"""

# Room -> removed name -> replacement, as it follows "Use ".
REPLACEMENTS: dict[str, dict[str, str]] = {}

REPLACEMENTS["evaluation"] = {"PrecisionAt1": "`ksm.training.PrecisionAt1`"}

_RECIPE = "`ksm.training.recipe({!r}, ...)`"
REPLACEMENTS["training"] = {
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
