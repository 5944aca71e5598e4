# SPDX-License-Identifier: Apache-2.0
"""Batch and layer normalisation."""

from __future__ import annotations

from collections.abc import Callable

from ...config import this_thread
from ...dtypes import accumulation_dtype
from ...errors import DeviceError, DTypeError, OptionError, ShapeError, check_number
from ...tensor import Tensor
from ..engine import Array, Context, Operator, Recomputed
from ._common import check_floats, check_floats_beside, check_some, like

__all__ = ["batchnorm_2d", "layer_norm"]


def check_rates(where: str, momentum: object, eps: object) -> tuple[float, float]:
    """Both as floats; OptionError unless 0 <= momentum <= 1 and eps > 0."""
    if check_number(where, "eps", eps, 0) == 0:
        raise OptionError(f"{where}: eps = {eps} must be > 0")
    return check_number(where, "momentum", momentum, 0, 1), check_number(where, "eps", eps)


class BatchNorm2d(Operator):
    """Holds the running statistics: they are state of the layer, not inputs with a gradient."""

    autocast = "keep"

    def __init__(
        self, running_mean: Tensor, running_var: Tensor, *, momentum: float = 0.9, eps: float = 1e-5
    ) -> None:
        self.running = (running_mean, running_var)
        self.momentum, self.eps = check_rates("batchnorm_2d", momentum, eps)

    def check(self, *inputs: Tensor) -> None:
        x = inputs[0]
        check_floats("batchnorm_2d", x)
        if x.ndim() not in (2, 4):
            raise ShapeError(f"batchnorm_2d: x must be (N, C, H, W) or (N, C), but its shape is {x.shape}")
        if this_thread.training:
            check_some("batchnorm_2d", "mean of a batch", x)
            if x.size() == x.shape[1]:
                raise ShapeError(
                    f"batchnorm_2d: x has shape {x.shape}: one value of a channel has no variance to train with; leave "
                    "out batches of one sample, or choose another batch size"
                )
        named = zip(
            ("scale", "bias", "running_mean", "running_var"), (*inputs[1:], *self.running), strict=True
        )
        for name, tensor in named:
            if not isinstance(tensor, Tensor):
                raise DTypeError(f"batchnorm_2d: {name} must be a Tensor, not {type(tensor).__name__}")
            if tensor.shape != (x.shape[1],):
                raise ShapeError(
                    f"batchnorm_2d: {name} must have shape ({x.shape[1]},) for x {x.shape}, not {tensor.shape}"
                )
            if tensor.dtype != accumulation_dtype(x.dtype):
                raise DTypeError(
                    f"batchnorm_2d: expected {accumulation_dtype(x.dtype)} {name} beside {x.dtype} x, got "
                    f"{tensor.dtype}; use as_type()"
                )
            if tensor.device is not x.device:
                raise DeviceError(
                    f"batchnorm_2d: {name} is on {tensor.device}, x on {x.device}; use to_device()"
                )

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, scale, _ = inputs
        y = context.empty(x.shape, x.dtype)
        running = tuple(tensor.array for tensor in self.running)
        if not context.training:
            context.run("batchnorm_2d_infer", *inputs, *running, out=y, eps=self.eps)
            return y
        mean, inverse_std = (context.empty(scale.shape, scale.dtype) for _ in range(2))
        out = (y, mean, inverse_std, *running)
        context.run("batchnorm_2d_train", *inputs, out=out, momentum=self.momentum, eps=self.eps)
        context.save(x, scale, mean, inverse_std)
        return y

    def _recomputation(
        self, context: Context, inputs: list[Array | Recomputed]
    ) -> Callable[[], Array] | None:
        x, backend, attributes = inputs[0], context.backend, {"momentum": self.momentum, "eps": self.eps}
        # where there are no images it takes longer than it saves
        if isinstance(x, Recomputed) or x.ndim != 4:
            return None
        scale, bias = (like(context, "copy", array) for array in inputs[1:])  # they may change meanwhile

        def compute() -> Array:
            y = backend.empty(x.shape, x.dtype)
            out = (y, *(backend.empty(scale.shape, scale.dtype) for _ in range(4)))
            backend.run("batchnorm_2d_train", x, scale, bias, out=out, **attributes)
            return y

        return compute

    def backward(self, context: Context, *dys: Array) -> tuple[Array, ...]:
        x, scale = context.saved[:2]
        out = (context.empty(x.shape, x.dtype), *(context.empty(scale.shape, scale.dtype) for _ in range(2)))
        context.run("batchnorm_2d_backward", dys[0], *context.saved, out=out)
        return out


def batchnorm_2d(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    momentum: float = 0.9,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel to zero mean and unit variance, then scale and shift it.

    y = (x - mean) / sqrt(var + eps) * scale + bias. While training, mean and (biased) var are those of the
    batch over all axes but 1, and the running statistics move in place: r = (1 - momentum) r + momentum batch
    with the unbiased variance, SINGA's rule. Otherwise mean and var are the running statistics.

    Args:
        x: float tensor (N, C, H, W) or (N, C).
        scale: shape (C,), as are the following; all of x's dtype, but float32 where x has 16 bits.
        bias: shape (C,).
        running_mean: changed in place while ``autograd.training``.
        running_var: likewise.
        momentum: share of the batch in the running statistics, 0 .. 1.
        eps: added to the variance, > 0; the default suits float32, use 1e-3 for float16.

    Returns:
        Same shape and dtype as ``x``. Statistics are computed in float32 or wider.

    Raises:
        ShapeError, DTypeError, DeviceError: one of the per-channel tensors does not fit ``x``.
        ShapeError: while training, x is empty or has one value of each channel. Otherwise an empty x gives an empty y.
        OptionError: momentum or eps out of range.

    Source: Ioffe, Szegedy, "Batch Normalization", 2015.
    """
    op = BatchNorm2d(running_mean, running_var, momentum=momentum, eps=eps)
    return op(x, scale, bias)  # type: ignore[no-any-return]


class LayerNorm(Operator):
    """Args: ``eps``."""

    autocast = "keep"

    def __init__(self, eps: float = 1e-5) -> None:
        self.eps = check_rates("layer_norm", 0, eps)[1]

    def check(self, *inputs: Tensor) -> None:
        x, *channels = inputs
        check_floats_beside("layer_norm", 1, *inputs)
        for name, tensor in zip(("scale", "bias"), channels, strict=True):
            count = tensor.ndim()
            if count == 0 or tensor.shape != x.shape[-count:] or tensor.size() == 0:
                raise ShapeError(
                    f"layer_norm: {name} must have the last axes of x {x.shape}, with elements, not {tensor.shape}"
                )
        if channels[0].shape != channels[1].shape:
            raise ShapeError(
                f"layer_norm: scale {channels[0].shape} and bias {channels[1].shape} differ in shape"
            )

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, scale, _ = inputs
        wide = accumulation_dtype(x.dtype)
        rows = x.shape[: x.ndim - scale.ndim]
        y, mean, inverse_std = (
            context.empty(x.shape, x.dtype),
            context.empty(rows, wide),
            context.empty(rows, wide),
        )
        context.run("layer_norm", *inputs, out=(y, mean, inverse_std), eps=self.eps)
        context.save(x, scale, mean, inverse_std)
        return y

    def backward(self, context: Context, *dys: Array) -> tuple[Array, ...]:
        x, scale, _, _ = context.saved
        out = (context.empty(x.shape, x.dtype), *(context.empty(scale.shape, scale.dtype) for _ in range(2)))
        context.run("layer_norm_backward", dys[0], *context.saved, out=out)
        return out


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalise the last axes to zero mean and unit variance, then scale and shift them.

    y = (x - mean) / sqrt(var + eps) * scale + bias, with mean and (biased) var over the axes of ``scale``.

    Args:
        x: float tensor (..., features), or with several axes of features.
        scale: (features,), or all last axes that are normalised; dtype of ``x``, or float32 where that has 16 bits.
        bias: the same.
        eps: added to the variance, > 0; the default suits float32, use 1e-3 for float16.

    Returns:
        Same shape and dtype as ``x``. Statistics are computed in float32 or wider.

    Raises:
        ShapeError: ``scale`` or ``bias`` does not have the last axes of ``x``, or these hold no element.
        OptionError: eps is not > 0.

    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016.
    """
    return LayerNorm(eps)(x, scale, bias)  # type: ignore[no-any-return]
