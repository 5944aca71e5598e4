# SPDX-License-Identifier: Apache-2.0
"""The public face of singa_lite; nothing inside the package imports it.

from singa_lite import autograd, data, device, layer, model, opt, tensor
"""

from . import autograd, config, data, device, errors, initializer, layer, model, opt, singa_wrap, tensor
from .singa_wrap import NcclIdHolder

__version__ = "0.1.0"

# SINGA scripts find the layers in autograd too
for _name in layer.__all__:
    setattr(autograd, _name, getattr(layer, _name))

__all__ = [
    "NcclIdHolder",
    "autograd",
    "config",
    "data",
    "device",
    "errors",
    "initializer",
    "layer",
    "model",
    "opt",
    "singa_wrap",
    "tensor",
]
