"""Files for other runtimes: SavedModel, ONNX, LiteRT, OpenVINO and PyTorch's `.pt2`."""

from keras_softmoe.exporting._export import FORMATS as FORMATS
from keras_softmoe.exporting._export import export_model as export_model
from keras_softmoe.exporting._export import exportable as exportable
