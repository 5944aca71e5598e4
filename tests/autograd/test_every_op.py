# SPDX-License-Identifier: Apache-2.0
"""Every operator of op_samples.py: value, gradient, dtypes, recording, and inputs left alone."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.autograd import ops
from singa_lite.errors import DTypeError
from singa_lite.tensor import Tensor, to_numpy
from tests.autograd.op_samples import SAMPLES, Sample

pytestmark = pytest.mark.usefixtures("device", "training")  # all of it on each kind of device

IDS = [f"{number}-{sample.op}" for number, sample in enumerate(SAMPLES)]
STEP = 1e-6


def tensors_of(
    sample: Sample, dtype: str = "float64", tracked: tuple[int, ...] | None = None
) -> list[Tensor]:
    """The inputs as Tensors; those with a number in ``tracked`` (None: all floats) store their gradient."""
    return [
        Tensor(
            data=array,
            dtype=sample.dtype_of(number, dtype) if array.dtype.kind == "f" else array.dtype,
            stores_grad=array.dtype.kind == "f" and (tracked is None or number in tracked),
        )
        for number, array in enumerate(sample.inputs)
    ]


def float_inputs(sample: Sample) -> list[int]:
    return [number for number, array in enumerate(sample.inputs) if array.dtype.kind == "f"]


WITH_GRADIENT = [pytest.param(s, id=i) for s, i in zip(SAMPLES, IDS, strict=True) if s.has_gradient]


def grads_of(sample: Sample, tensors: list[Tensor], direction: np.ndarray) -> dict[int, np.ndarray]:
    """index -> gradient of sum(direction * result)."""
    y = sample.call(*tensors)
    found = autograd.gradients(y, Tensor(data=direction.reshape(y.shape), dtype=y.dtype))
    return {index: to_numpy(found[tensor]) for index, tensor in enumerate(tensors) if tensor in found}


def test_every_public_operator_has_a_sample() -> None:
    assert {sample.op for sample in SAMPLES} == set(ops.__all__)
    assert set(ops.__all__) <= set(autograd.__all__)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_value_is_that_of_numpy(sample: Sample) -> None:
    y = sample.call(*tensors_of(sample))
    expected = np.asarray(sample.reference(*sample.inputs))
    assert y.dtype == np.float64
    assert y.shape == expected.shape
    np.testing.assert_allclose(to_numpy(y), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sample", WITH_GRADIENT)
def test_gradient_is_that_of_finite_differences(sample: Sample) -> None:
    direction = np.random.default_rng(1).standard_normal(np.asarray(sample.reference(*sample.inputs)).shape)
    grads = grads_of(sample, tensors_of(sample), direction)
    assert sorted(grads) == float_inputs(sample)
    for index, grad in grads.items():
        expected = np.zeros(grad.shape)
        for cell in np.ndindex(*grad.shape):
            values = []
            for step in (STEP, -STEP):
                moved = sample.inputs[index].copy()
                moved[cell] += step
                tensors = tensors_of(sample, tracked=())
                tensors[index] = Tensor(data=moved, dtype="float64")
                values.append((to_numpy(sample.call(*tensors)) * direction).sum())
            expected[cell] = (values[0] - values[1]) / (2 * STEP)
        np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sample", WITH_GRADIENT)
def test_gradient_of_one_input_does_not_depend_on_which_others_are_computed(sample: Sample) -> None:
    direction = np.random.default_rng(2).standard_normal(np.asarray(sample.reference(*sample.inputs)).shape)
    together = grads_of(sample, tensors_of(sample), direction)
    for index in float_inputs(sample):
        alone = grads_of(sample, tensors_of(sample, tracked=(index,)), direction)
        assert list(alone) == [index]
        np.testing.assert_array_equal(alone[index], together[index])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float16", 2e-2)])
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_narrow_dtypes_are_kept_and_near(sample: Sample, dtype: str, tolerance: float) -> None:
    y = sample.call(*tensors_of(sample, dtype))
    expected = np.asarray(sample.reference(*sample.inputs))
    assert y.dtype == dtype
    assert abs(to_numpy(y) - expected).max() <= tolerance * max(1.0, abs(expected).max())
    if not sample.has_gradient:
        return
    direction = np.ones(expected.shape)
    wide = grads_of(sample, tensors_of(sample), direction)
    for index, grad in grads_of(sample, tensors_of(sample, dtype), direction).items():
        assert grad.dtype == sample.dtype_of(index, dtype)
        assert abs(grad - wide[index]).max() <= 4 * tolerance * max(1.0, abs(wide[index]).max())


@pytest.mark.parametrize("sample", WITH_GRADIENT)
def test_forward_and_backward_leave_inputs_and_dy_alone(sample: Sample) -> None:
    tensors = tensors_of(sample)
    y = sample.call(*tensors)
    dy = Tensor(data=np.random.default_rng(3).standard_normal(y.shape), dtype="float64")
    kept = to_numpy(dy)
    for _ in autograd.backward(y, dy):
        pass
    np.testing.assert_array_equal(to_numpy(dy), kept)
    for tensor, array in zip(tensors, sample.inputs, strict=True):
        np.testing.assert_array_equal(to_numpy(tensor), array)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if not s.has_gradient], ids=lambda s: s.op)
def test_what_has_no_gradient_is_a_leaf(sample: Sample) -> None:
    assert sample.call(*tensors_of(sample)).creator is None


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_nothing_is_recorded_when_no_gradient_is_needed(sample: Sample) -> None:
    assert sample.call(*tensors_of(sample, tracked=())).creator is None
    with autograd.no_grad():
        assert sample.call(*tensors_of(sample)).creator is None


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_numpy_array_instead_of_a_tensor_is_a_dtype_error(sample: Sample) -> None:
    tensors: list = tensors_of(sample)
    index = 0 if sample.op == "where" else -1  # its condition may be an array
    tensors[index] = sample.inputs[index]
    function = getattr(autograd, sample.op)
    fixed = [Tensor(data=array, dtype="float64") for array in sample.fixed]
    with pytest.raises(DTypeError, match="Tensor"):
        function(tensors, **sample.attributes) if sample.takes_list else function(
            *tensors, *fixed, **sample.attributes
        )


@pytest.mark.parametrize(
    "sample", [s for s in SAMPLES if len(float_inputs(s)) > 1 and s.inputs[-1].dtype.kind == "f"]
)
def test_mixed_dtypes_are_a_dtype_error(sample: Sample) -> None:
    tensors = tensors_of(sample)
    tensors[-1] = tensors[-1].as_type("float32")
    with pytest.raises(DTypeError, match=r"one dtype|expected float64 \w+ beside float64 x, got float32"):
        sample.call(*tensors)
