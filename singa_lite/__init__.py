# SPDX-License-Identifier: Apache-2.0
"""The public face of singa_lite; nothing inside the package imports it.

from singa_lite import autograd, data, device, layer, model, opt, tensor

Note [imports]: what takes a millisecond or more to import and is used by few programs, or only at certain moments
(hashlib and its OpenSSL, multiprocessing, zipfile), is imported in the function that uses it.
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
    from . import checkpoint, data, gluon, kvstore

__version__ = "0.1.0"

# SINGA scripts find the layers in autograd too
for _name in vars(layer)["__all__"]:
    setattr(autograd, _name, getattr(layer, _name))


def __getattr__(name: str) -> ModuleType:
    """Import modules that few scripts need at first use: those that fetch data sets take longer than all the rest."""
    if name in ("checkpoint", "data", "gluon", "kvstore"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "NcclIdHolder",
    "autograd",
    "checkpoint",
    "communicators",
    "config",
    "data",
    "device",
    "errors",
    "gluon",
    "initializer",
    "kvstore",
    "layer",
    "model",
    "opt",
    "singa_wrap",
    "tensor",
]
