# SPDX-License-Identifier: Apache-2.0
"""SINGA's names for a call of DistOpt, one for each ``dist_option`` that SINGA has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..errors import check_bool
from ..tensor import Tensor
from .schedule import DecayScheduler


class SingaCalls(ABC):
    """The calls; ``threshold`` and ``spars`` are those of ``DistOpt.__call__``."""

    @abstractmethod
    def __call__(
        self, loss: Tensor, dist_option: str | None = None, *arguments: Any, **options: Any
    ) -> None: ...

    def backward_and_update(self, loss: Tensor, threshold: int | None = None) -> None:
        """dist_option "fp32"."""
        self(loss, "fp32", threshold=threshold)

    def backward_and_update_half(
        self, loss: Tensor, threshold: int | None = None, clipping: bool = False, clip_Value: float = 100
    ) -> None:
        """dist_option "fp16"; ``clipping`` limits local gradients to +-clip_Value first."""
        clips = check_bool("backward_and_update_half", "clipping", clipping)
        self(loss, "fp16", threshold=threshold, clip_value=clip_Value if clips else None)

    def backward_and_partial_update(self, loss: Tensor, threshold: int | None = None) -> None:
        """dist_option "partialUpdate"."""
        self(loss, "partialUpdate", threshold=threshold)

    def backward_and_sparse_update(
        self,
        loss: Tensor,
        threshold: int | None = None,
        spars: float | DecayScheduler | None = None,
        topK: bool = False,
        corr: bool = True,
    ) -> None:
        """dist_option "sparseTopK" or, without ``topK``, "sparseThreshold"."""
        by_share = check_bool("backward_and_sparse_update", "topK", topK)
        self(loss, "sparseTopK" if by_share else "sparseThreshold", spars, threshold=threshold, corr=corr)
