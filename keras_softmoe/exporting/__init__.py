"""Files for other runtimes: SavedModel, ONNX, LiteRT, OpenVINO and PyTorch's `.pt2`."""

from keras_softmoe.exporting.export import export_model as export_model
