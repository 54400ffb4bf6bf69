"""Tensors and variables that are sharded over devices and processes."""

from keras_softmoe.sharding.constraints import check_layer as check_layer
from keras_softmoe.sharding.constraints import check_model as check_model
from keras_softmoe.sharding.constraints import check_num_experts as check_num_experts
from keras_softmoe.sharding.constraints import constrain as constrain
from keras_softmoe.sharding.constraints import is_distributed as is_distributed
from keras_softmoe.sharding.constraints import layout_of as layout_of
from keras_softmoe.sharding.constraints import num_shards as num_shards
from keras_softmoe.sharding.constraints import replicate as replicate
from keras_softmoe.sharding.variables import assign_shards as assign_shards
from keras_softmoe.sharding.variables import failed_processes as failed_processes
from keras_softmoe.sharding.variables import gather as gather
from keras_softmoe.sharding.variables import is_sharded as is_sharded
from keras_softmoe.sharding.variables import load_shards as load_shards
from keras_softmoe.sharding.variables import num_processes as num_processes
from keras_softmoe.sharding.variables import process_index as process_index
from keras_softmoe.sharding.variables import save_in_one_process as save_in_one_process
