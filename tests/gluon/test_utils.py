# SPDX-License-Identifier: Apache-2.0
"""Slices of batches and their gradients; the norm of all gradients, bounded."""

import math

import numpy as np
import pytest

from singa_lite import autograd, layer
from singa_lite.backend.cpu import CpuBackend
from singa_lite.device import Device, get_default_device
from singa_lite.errors import DeviceError, DTypeError, GraphError, OptionError, ShapeError
from singa_lite.gluon.utils import clip_global_norm, split_and_load, split_data
from singa_lite.tensor import Tensor, to_numpy
from tests.devices import cuda_device

F32 = np.float32


def values(arrays):
    return [to_numpy(array).tolist() for array in arrays]


@pytest.fixture(params=[np.asarray, lambda data: Tensor(data=data)], ids=["numpy", "Tensor"])
def make(request):
    return request.param


# ---- split_data ------------------------------------------------------------------------------------------


def test_slices_are_equal_and_in_order(make):
    data = make(np.arange(24, dtype=F32).reshape(6, 4))
    parts = split_data(data, 3)
    assert [type(part) for part in parts] == [type(data)] * 3
    np.testing.assert_array_equal(np.concatenate(values(parts)), to_numpy(data))
    assert {part.shape for part in parts} == {(2, 4)}


@pytest.mark.parametrize("axis", [1, -2])
def test_another_axis_is_cut(make, axis):
    data = np.arange(24, dtype=F32).reshape(2, 4, 3)
    parts = split_data(make(data), 2, axis)
    assert values(parts) == [data[:, :2].tolist(), data[:, 2:].tolist()]


def test_10_in_3_slices_are_4_3_3(make):
    data = make(np.arange(10, dtype=np.int32))
    assert values(split_data(data, 3, even_split=False)) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with pytest.raises(ShapeError, match=r"axis 0 of shape \(10,\) cannot be cut into 3 equal slices"):
        split_data(data, 3)


def test_what_cannot_be_split_is_refused(make):
    data = make(np.ones((2, 3), F32))
    for even_split in (True, False):
        with pytest.raises(ShapeError, match="use fewer slices"):
            split_data(data, 3, even_split=even_split)
    with pytest.raises(ShapeError, match="split_data"):
        split_data(data, 2, batch_axis=2)
    with pytest.raises(ShapeError, match="split_data"):
        split_data(make(F32(1)), 1)
    for num_slice in (0, -1, 1.0, True, None):
        with pytest.raises(OptionError, match="num_slice"):
            split_data(data, num_slice)
    with pytest.raises(DTypeError, match="got list"):
        split_data([1, 2], 2)
    with pytest.raises(ValueError, match="equal slices"):  # as MXNet's
        split_data(data, 2, batch_axis=1)


def test_slices_of_a_tensor_keep_its_gradient():
    w = Tensor(data=F32([1, 2, 3, 4, 5]), stores_grad=True)
    with autograd.record():
        first, second = split_data(w, 2, even_split=False)
        y = autograd.reduce_sum(first * first, keepdims=0) + autograd.reduce_sum(second, keepdims=0) * 10.0
    y.backward()
    assert to_numpy(w.grad).tolist() == [2, 4, 6, 10, 10]


# ---- split_and_load --------------------------------------------------------------------------------------


def test_every_slice_is_a_leaf_of_its_own_on_the_device(make):
    data = make(np.arange(6, dtype=F32))
    parts = split_and_load(data, [get_default_device(), None, get_default_device()])
    assert values(parts) == [[0, 1], [2, 3], [4, 5]]
    assert all(part.device is get_default_device() and part.creator is None for part in parts)
    parts[0].set_value(9)
    assert to_numpy(data).tolist() == list(range(6))


def test_a_recorded_tensor_becomes_leaves_without_a_gradient():
    w = Tensor(data=F32([1, 2]), stores_grad=True)
    with autograd.record():
        parts = split_and_load(w * w, [None, None])
    assert [part.creator for part in parts] == [None, None] and values(parts) == [[1], [4]]


def test_values_become_tensors_as_from_numpy_makes_them():
    assert [part.dtype for part in split_and_load([1.5, 2.5], [None, None])] == [F32, F32]
    (labels,) = split_and_load(np.array([3, 4, 5]), [None])
    assert labels.dtype == np.int32 and to_numpy(labels).tolist() == [3, 4, 5]


def test_gradients_of_four_slices_add_up_to_that_of_the_batch():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 5)), rng.standard_normal((8, 3))
    net = layer.Linear(3)
    net(Tensor(data=x))
    gradients = []
    for num_slice in (1, 4):
        devices = [get_default_device()] * num_slice
        parts = list(zip(split_and_load(x, devices), split_and_load(y, devices), strict=True))
        with autograd.record():
            losses = [autograd.mse_loss(net(part), target) for part, target in parts]
        for loss, (part, _) in zip(losses, parts, strict=True):
            loss.backward(len(part))
        gradients.append([to_numpy(p.grad) for p in net.get_params().values()])
        for p in net.get_params().values():
            p.mark_grad_stale()
    for whole, slices in zip(*gradients, strict=True):
        assert np.abs(whole).max() > 0.1
        np.testing.assert_allclose(slices, whole, rtol=1e-5, atol=1e-6)


def test_two_devices_are_one_rank_each():
    with pytest.raises(DeviceError, match="one rank per GPU"):
        split_and_load(np.ones(4), [get_default_device(), Device("cuda", 0, CpuBackend())])


@pytest.mark.parametrize(
    ("devices", "error"),
    [
        ([], OptionError),
        (None, OptionError),
        ("cpu", OptionError),
        (["cpu"], DeviceError),
        ([0, 1], DeviceError),
    ],
)
def test_other_devices_are_refused(devices, error):
    with pytest.raises(error, match="split_and_load"):
        split_and_load(np.ones(4), devices)


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(ShapeError, match="cannot be cut into 2 equal slices"):
        split_and_load(np.ones(5), [None, None])
    assert [len(part) for part in split_and_load(np.ones(5), [None, None], even_split=False)] == [3, 2]


# ---- clip_global_norm ------------------------------------------------------------------------------------


def test_3_and_4_within_1_are_six_and_eight_tenths(make):
    arrays = [make(F32([3])), make(F32([4]))]
    norm = clip_global_norm(arrays, 1)
    assert type(norm) is float and norm == 5.0
    np.testing.assert_allclose(values(arrays), [[0.6], [0.8]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_norm_is_that_of_all_elements(make, dtype):
    rng = np.random.default_rng(1)
    data = [rng.standard_normal(shape).astype(dtype) for shape in ((3, 4), (), (0, 2), (50,))]
    expected = math.sqrt(sum((part.astype(float) ** 2).sum() for part in data))
    arrays = [Tensor(data=part, dtype=dtype) if make is not np.asarray else part.copy() for part in data]
    assert clip_global_norm(arrays, 2) == pytest.approx(expected, rel=1e-12)
    for array, before in zip(arrays, data, strict=True):
        assert array.dtype == dtype
        np.testing.assert_allclose(
            to_numpy(array), before.astype(float) * 2 / expected, rtol=2e-3 if dtype == "float16" else 1e-6
        )


@pytest.mark.parametrize("max_norm", [5.0, 7, np.float32(100), math.inf])
def test_what_is_within_the_norm_keeps_its_bits(make, max_norm):
    arrays = [make(F32([3, 0.1])), make(F32([3.9]))]
    before = values(arrays)
    assert 4.9 < clip_global_norm(arrays, max_norm) < 5
    assert values(arrays) == before


def test_zeros_stay_and_no_norm_is_left_at_all(make):
    arrays = [make(F32([0, 0])), make(F32([4]))]
    assert clip_global_norm(arrays, 0) == 4
    assert values(arrays) == [[0, 0], [0]]
    assert clip_global_norm(arrays, 1) == 0 and clip_global_norm([], 1) == 0


def test_gradients_are_changed_where_they_are():
    w = Tensor(data=F32([3, 4]), stores_grad=True)
    with autograd.record():
        loss = autograd.reduce_sum(w * w, keepdims=0)
    loss.backward()
    grad, memory = w.grad, w.grad.array
    assert clip_global_norm((p.grad for p in [w]), 1) == 10.0
    assert w.grad is grad and grad.array is memory and w.has_fresh_grad
    np.testing.assert_allclose(to_numpy(w.grad), [0.6, 0.8], rtol=1e-6)


def test_an_array_given_twice_counts_and_shrinks_once(make):
    array = make(F32([3, 4]))
    assert clip_global_norm([array, array], 1) == 5
    np.testing.assert_allclose(to_numpy(array), [0.6, 0.8], rtol=1e-6)


def test_squares_that_float32_cannot_hold_are_no_matter(make):
    arrays = [make(F32([3e30])), make(F32([4e30, 1e-30]))]
    assert clip_global_norm(arrays, 1) == pytest.approx(5e30)
    np.testing.assert_allclose(values(arrays)[0], [0.6], rtol=1e-6)


def test_a_factor_that_float16_cannot_hold_does_not_make_zeros():
    """Norm 60000, factor 1.7e-8: 5e-4 each is left, in an array as in a Tensor."""
    data = np.full(4, 30000, np.float16)
    arrays = [data.copy(), Tensor(data=data, dtype=np.float16)]
    assert [clip_global_norm([array], 1e-3) for array in arrays] == [60000, 60000]
    assert values(arrays) == [[float(np.float16(5e-4))] * 4] * 2
    assert arrays[0].dtype == np.float16
    assert np.linalg.norm(arrays[0].astype(float)) == pytest.approx(1e-3, rel=2**-11)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_warns_and_changes_nothing(make, bad):
    arrays = [make(F32([3, 4])), make(F32([bad, 1]))]
    before = values(arrays)
    with pytest.warns(UserWarning, match="clip_global_norm: the norm is (nan|inf)"):
        norm = clip_global_norm(arrays, 1)
    assert not math.isfinite(norm)
    np.testing.assert_array_equal(values(arrays), before)
    assert not math.isfinite(clip_global_norm(arrays, 1, check_isfinite=False))  # a warning would be an error
    np.testing.assert_array_equal(values(arrays), before)


def read_only():
    array = np.ones(3, F32)
    array.flags.writeable = False
    return array


def recorded():
    w = Tensor(data=F32([3]), stores_grad=True)
    with autograd.record():
        return w * w


@pytest.mark.parametrize(
    ("make_bad", "error"),
    [
        (lambda: None, DTypeError),
        (lambda: 3.0, DTypeError),
        (lambda: "w", DTypeError),
        (lambda: np.array([3, 4]), DTypeError),
        (lambda: Tensor(data=np.array([3, 4])), DTypeError),
        (read_only, OptionError),
        (recorded, GraphError),
    ],
)
def test_bad_arrays_are_refused_before_anything_changes(make_bad, error):
    good = F32([30, 40])
    with pytest.raises(error, match="clip_global_norm"):
        clip_global_norm([good, make_bad()], 1)
    assert good.tolist() == [30, 40]


def test_other_arguments_are_refused(make):
    array = make(F32([30, 40]))
    for arrays in (array, None, 3):  # a Tensor's parts would be copies
        with pytest.raises(DTypeError, match="expected a list of arrays"):
            clip_global_norm(arrays, 1)
    for max_norm in (-1, math.nan, "1", None, True):
        with pytest.raises(OptionError, match="max_norm"):
            clip_global_norm([array], max_norm)
    assert to_numpy(array).tolist() == [30, 40]


def test_tensors_of_a_gpu_are_sliced_and_clipped_there(monkeypatch):
    gpu = cuda_device(monkeypatch)
    parts = split_and_load(F32([3, 4]), [gpu, gpu])
    assert [part.device for part in parts] == [gpu, gpu]
    assert clip_global_norm(parts, 1) == 5
    np.testing.assert_allclose(values(parts), [[0.6], [0.8]], rtol=1e-6)
    host = split_and_load(parts[0], [None])[0]
    assert host.device is get_default_device() and parts[0].device is gpu
    assert split_data(parts[1], 1)[0].device is gpu
