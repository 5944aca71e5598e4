# SPDX-License-Identifier: Apache-2.0
"""Layers: one family a file, all named here."""

from .activation import ReLU, Sigmoid, SoftMax, Tanh
from .base import Layer
from .conv import Conv2d
from .dropout import Dropout
from .linear import Linear
from .loss import CrossEntropy, MeanSquareError, SoftMaxCrossEntropy
from .norm import BatchNorm2d
from .pool import AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d, Pooling2d
from .recurrent import LSTM, RNN, CudnnRNN, RNN_Base
from .shape import Add, Cat, Flatten, Reshape

__all__ = [
    "LSTM",
    "RNN",
    "Add",
    "AvgPool1d",
    "AvgPool2d",
    "BatchNorm2d",
    "Cat",
    "Conv2d",
    "CrossEntropy",
    "CudnnRNN",
    "Dropout",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MeanSquareError",
    "Pooling2d",
    "RNN_Base",
    "ReLU",
    "Reshape",
    "Sigmoid",
    "SoftMax",
    "SoftMaxCrossEntropy",
    "Tanh",
]
