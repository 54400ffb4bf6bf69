"""Sharding of tensors and variables over devices and processes.

Reading and writing variables is in `sharding.variables`: the layers do not need it.
"""

from keras_softmoe.sharding._constraints import (
    check_divides_experts as check_divides_experts,
)
from keras_softmoe.sharding._constraints import check_layer as check_layer
from keras_softmoe.sharding._constraints import check_model as check_model
from keras_softmoe.sharding._constraints import constrain as constrain
from keras_softmoe.sharding._constraints import is_distributed as is_distributed
from keras_softmoe.sharding._constraints import layout_of as layout_of
from keras_softmoe.sharding._constraints import num_shards as num_shards
from keras_softmoe.sharding._constraints import replicate as replicate
