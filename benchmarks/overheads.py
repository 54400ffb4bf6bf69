"""What balancing losses and routers in float32 cost a full training step.

A model of two blocks, the second with experts (as in V-MoE "every 2"), is trained with
and without: the step is that of `fit`, optimizer and all.

- `auxiliary_losses`: importance and load losses at their weights of the paper, against
  weights of zero. The noise in the router, which the load loss is about, is there in
  both.
- `float32_router`, `float32_soft_router`: under `mixed_bfloat16`, a router as it is, in
  float32, against one that computes in bfloat16. (Token choice has neither losses nor
  noise here, so that nothing else differs.)

Without an accelerator the batch is a quarter.

    KERAS_BACKEND=jax python benchmarks/overheads.py --shapes paper
"""

import keras
import models
import report
from timing import compare, fit_step

import keras_softmoe as ksm

# The shapes of `models.py`, but for the number of blocks and of experts.
NUM_EXPERTS = 32


def token_choice(loss_weight, noise_std=1.0):
    """V-MoE's router, with one weight for both losses."""
    losses = ()
    if loss_weight:
        losses = [
            ksm.routers.RoutingLoss(function, weight=loss_weight)
            for function in (ksm.ops.importance_loss, ksm.ops.load_loss)
        ]
    return ksm.routers.SoftmaxTokenChoiceRouter(
        NUM_EXPERTS,
        priority="max",
        noise_std=noise_std,
        losses=losses,
        # As many slots as in all results so far
        rounding="ceil",
        multiple_of=4,
    )


def two_blocks(shapes, router, dtype=None, router_dtype=None):
    """A backbone of two blocks of which the second has experts."""
    backbone = models.backbone(
        shapes,
        num_layers=2,
        moe_layers=(1,),
        router=router,
        group_images=1 if isinstance(router, ksm.routers.SoftRouter) else 8,
        equal_experts=True,
        dtype=dtype,
    )
    if router_dtype is not None:
        # No argument says so: that routers compute in float32 is part of the library.
        (of_block,) = backbone.routers.values()
        of_block.dtype_policy = keras.DTypePolicy(router_dtype)
    return backbone


def training(shapes, *arguments):
    """A training step of `two_blocks`."""
    features = two_blocks(shapes, *arguments).output["pooled_output"]
    return fit_step(models.classifier(features), *models.data(shapes))


def measure(shapes, patience):
    """Time steps with and without. Yields one row per overhead."""
    shapes = models.quick(shapes)
    losses = {
        "with": training(shapes, token_choice(0.005)),
        "without": training(shapes, token_choice(0.0)),
    }
    yield {"name": "auxiliary_losses", "pass": "fit", **compare(losses, patience)}
    for name, router in (
        ("float32_router", token_choice(0.0, noise_std=0.0)),
        ("float32_soft_router", ksm.routers.SoftRouter(shapes.num_experts)),
    ):
        mixed = "mixed_bfloat16"
        routers = {
            "with": training(shapes, router, mixed),
            "without": training(shapes, router, mixed, mixed),
        }
        yield {"name": name, "pass": "fit", **compare(routers, patience)}


def measure_all(options):
    """Rows of all overheads, for `report.run_alone`."""
    return measure(models.SHAPES[options.shapes], report.patience(options))


def main(arguments=None):
    """Command line: see `--help`."""
    options = report.command_line(__doc__, models.SHAPES).parse_args(arguments)
    report.run_alone("overheads", options, measure_all)


if __name__ == "__main__":
    main()
