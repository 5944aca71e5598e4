# SPDX-License-Identifier: Apache-2.0
"""The public face of singa_lite; nothing inside the package imports it.

from singa_lite import autograd, data, device, layer, model, opt, tensor
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import (
    autograd,
    communicators,
    config,
    device,
    errors,
    initializer,
    layer,
    model,
    opt,
    singa_wrap,
    tensor,
)
from .singa_wrap import NcclIdHolder

if TYPE_CHECKING:
    from . import data

__version__ = "0.1.0"

# SINGA scripts find the layers in autograd too
for _name in vars(layer)["__all__"]:
    setattr(autograd, _name, getattr(layer, _name))


def __getattr__(name: str) -> ModuleType:
    """Import ``data`` at its first use: what it fetches data sets with takes longer to import than the rest."""
    if name == "data":
        return import_module(f"{__name__}.data")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "NcclIdHolder",
    "autograd",
    "communicators",
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
