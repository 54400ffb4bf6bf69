"""Layers: experts, mixtures of experts, and the parts of a Vision Transformer."""

from keras_softmoe import moved
from keras_softmoe.layers.embedding import (
    ClassToken as ClassToken,
    PatchEmbedding as PatchEmbedding,
    PositionEmbedding as PositionEmbedding,
)
from keras_softmoe.layers.encoder_block import EncoderBlock as EncoderBlock
from keras_softmoe.layers.experts import Experts as Experts
from keras_softmoe.layers.image_moe import ImageMoE as ImageMoE
from keras_softmoe.layers.mlp import MLP as MLP
from keras_softmoe.layers.moe import MoE as MoE
from keras_softmoe.layers.pooling import AttentionPooling as AttentionPooling
from keras_softmoe.layers.soft_moe import SoftMoE as SoftMoE

__getattr__ = moved.attribute(__name__)
