"""Readers and writers of other libraries' parameters."""

from keras_softmoe.converters.vmoe import load_vmoe_params as load_vmoe_params
from keras_softmoe.converters.vmoe import to_vmoe_params as to_vmoe_params
