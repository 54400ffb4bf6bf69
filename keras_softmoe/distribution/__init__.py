"""Sharding experts and batches over many devices, through `keras.distribution`."""

from keras_softmoe.distribution.audit import audit as audit
from keras_softmoe.distribution.backup import Backup as Backup
from keras_softmoe.distribution.layouts import layout_map as layout_map
from keras_softmoe.distribution.parallel import data_parallel as data_parallel
from keras_softmoe.distribution.parallel import expert_parallel as expert_parallel
from keras_softmoe.distribution.plan import plan as plan
from keras_softmoe.distribution.rules import PlacementError as PlacementError
