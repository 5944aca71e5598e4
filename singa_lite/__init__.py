# SPDX-License-Identifier: Apache-2.0
"""The public face of singa_lite; nothing inside the package imports it.

from singa_lite import autograd, data, device, layer, model, opt, tensor

Note [imports]: what takes a millisecond or more to import and is used by few programs, or only at certain moments
(hashlib and its OpenSSL, multiprocessing, urllib, zipfile), is imported in the function that uses it. So are the
modules of this package, at the first use of their names: `singa-lite run` needs none of them, nor numpy, and starts in
a third of the time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import config, errors
from .comm.failed_threads import note_failed_threads
from .comm.job import AT_START

if TYPE_CHECKING:
    from . import (
        autograd,
        checkpoint,
        communicators,
        data,
        device,
        gluon,
        initializer,
        kvstore,
        layer,
        model,
        opt,
        singa_wrap,
        tensor,
    )
    from .singa_wrap import NcclIdHolder

__version__ = "0.1.0"

if AT_START:  # this is a rank of several
    note_failed_threads()


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


if not TYPE_CHECKING:  # which would take every name for one of this package

    def __getattr__(name: str) -> Any:
        """Import a module at the first use of its name."""
        if name == "NcclIdHolder":
            return import_module(f"{__name__}.singa_wrap").NcclIdHolder
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
