"""Any Keras model with experts: its class, its sites, its layers in files.

`mlp_sites` finds the MLPs of a model, `experts_from_mlps` copies one into experts,
`model` is the class of the result, and `copies` describes models in files.
"""

from keras_softmoe.models.with_experts.model import ModelWithExperts as ModelWithExperts
