// SPDX-License-Identifier: Apache-2.0
// What the bindings of all kernels share: arrays as they arrive from Python, and running a kernel now or at every replay.
//
// A binding has the name and the form of a kernel of singa_lite/backend/base.py and returns False, having done nothing,
// when the call is not one for it (another dtype, a strided array, odd shapes): the caller then uses the numpy kernel.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "common/bfloat16.h"

namespace singa_lite {

namespace py = pybind11;

inline constexpr int kAligned = 0x0100;  // NPY_ARRAY_ALIGNED

// numpy's number of the dtype ml_dtypes.bfloat16, given out when that package is imported: by the module _kernels, which
// asks for it first, before any array comes.
inline int bfloat16_number() {
  static const int number = py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16")).num();
  return number;
}

// A row-major, aligned numpy array of one dtype; false if the object is anything else.
template <class T>
class Array {
 public:
  explicit Array(const py::handle& object) {
    if (!object || !py::isinstance<py::array>(object)) return;
    const auto array = py::reinterpret_borrow<py::array>(object);
    constexpr int kWanted = py::array::c_style | kAligned;
    if ((array.flags() & kWanted) != kWanted || !is_native(array)) return;
    data_ = static_cast<T*>(const_cast<void*>(array.data()));
    shape_ = array.shape();
    ndim = int(array.ndim());
    size = std::size_t(array.size());
    is_valid_ = std::is_const_v<T> || array.writeable();
  }

  explicit operator bool() const { return is_valid_; }
  T* data() const { return data_; }
  std::int64_t shape(int axis) const { return shape_[axis]; }
  const py::ssize_t& shape_ref() const { return *shape_; }

  int ndim = 0;
  std::size_t size = 0;

 private:
  static bool is_native(const py::array& array) {
    const py::dtype dtype = array.dtype();
    return dtype.num() == number() && (dtype.byteorder() == '=' || dtype.byteorder() == '|');
  }
  static int number() {
    using Plain = std::remove_const_t<T>;
    if constexpr (std::is_same_v<Plain, std::uint16_t>) return 23;  // NPY_HALF
    else if constexpr (std::is_same_v<Plain, Bfloat16>) return bfloat16_number();
    else return py::dtype::num_of<Plain>();
  }
  T* data_ = nullptr;
  const py::ssize_t* shape_ = nullptr;
  bool is_valid_ = false;
};

using In = Array<const float>;
using Out = Array<float>;

// Whether all are arrays of their dtype.
template <class... Arrays>
bool all(const Arrays&... arrays) {
  return (bool(arrays) && ...);
}

// Entry of a tuple, or nothing.
inline py::handle at(const py::handle& tuple, std::size_t index) {
  if (!PyTuple_Check(tuple.ptr()) || std::size_t(PyTuple_GET_SIZE(tuple.ptr())) <= index) return {};
  return PyTuple_GET_ITEM(tuple.ptr(), Py_ssize_t(index));
}

inline std::size_t length(const py::handle& tuple) {
  return PyTuple_Check(tuple.ptr()) ? std::size_t(PyTuple_GET_SIZE(tuple.ptr())) : 0;
}

inline void read_pair(const py::handle& pair, std::int64_t to[2]) {
  const auto two = pair.cast<std::pair<std::int64_t, std::int64_t>>();
  to[0] = two.first;
  to[1] = two.second;
}

// The kernels of a recorded step between two points where Python must run. A step returns false if the values it gets are
// not for it (a label out of range): its caller then computes that kernel in numpy.
class Plan {
 public:
  using Step = std::function<bool()>;

  // The plan that collects the kernels run by this thread instead of running them, or null.
  static Plan*& recording() {
    thread_local Plan* plan = nullptr;
    return plan;
  }
  void add(Step step) { steps_.push_back(std::move(step)); }
  const std::vector<Step>& steps() const { return steps_; }

 private:
  std::vector<Step> steps_;
};

// The kernel's code, without the GIL; at once, or at every replay of the plan that listens. It keeps no more than pointers.
template <class Body>
bool run(const Body& body) {
  const auto step = [body]() -> bool {
    if constexpr (std::is_same_v<decltype(body()), bool>) return body();
    else body();
    return true;
  };
  if (Plan::recording()) {
    Plan::recording()->add(step);
    return true;
  }
  GilRelease release;
  return step();
}

}  // namespace singa_lite
