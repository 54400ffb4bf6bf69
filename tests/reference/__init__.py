"""The library against the numbers of the released V-MoE and Soft MoE code.

Every array of every file is computed with, compared, or listed here with the reason
why the public API cannot express it; `Reference.finish` fails on the rest.
"""

# (pattern of the file name, pattern of the array name) -> reason
INEXPRESSIBLE = {
    (r"[ae]_soft_.*", r"metrics/.*_similarity_(min|max|mean)"): (
        "cosine similarities of routing weights: no such statistic is offered"
    ),
    (r"a_soft_.*", r"mu_unit"): "an intermediate result that the router keeps",
    (r"d_kl_.*", r".*plan_combine_unrolled/grad_(kernel|inputs)"): (
        "unrolled gradient, a few percent from the implicit one that is compared"
    ),
    (r"e_.*", r"noisy/metrics/.*/(?!auxiliary_loss).*"): (
        "statistics of a noisy pass: `route` decides without noise"
    ),
    (r"j_posembed_resize", r"expand_tile_.*"): (
        "repeating a dense MLP for every expert is upcycling, not resampling"
    ),
}
