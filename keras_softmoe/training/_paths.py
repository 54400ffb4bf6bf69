"""Paths of our models' variables, for the rules of optimizers."""

# Those of attention, MLPs, experts, sparse routers, patches, projections and head.
KERNELS = "kernel$"
HEAD_KERNEL = "predictions/kernel$"
SOFT_ROUTER_SCALE = "router/scale$"
