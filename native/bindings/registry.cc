// SPDX-License-Identifier: Apache-2.0
// Python's view of registered kernels: one function for all of them, see Note [registered kernel] in kernels/registry.h.
#include "kernels/registry.h"

#include "bindings/arrays.h"
#include "bindings/families.h"

namespace singa_lite {
namespace {

constexpr int kLastOfNumpy = 255;  // numbers of dtypes above are of other packages, which may use numpy's characters

View view_of(const py::handle& object) {
  View view;
  if (!py::isinstance<py::array>(object)) return view;
  const auto array = py::reinterpret_borrow<py::array>(object);
  const py::dtype dtype = array.dtype();
  const bool is_native = dtype.byteorder() == '=' || dtype.byteorder() == '|';
  if (!is_native || !(array.flags() & kAligned)) return view;
  view.data = const_cast<void*>(array.data());
  view.type = dtype.num() == bfloat16_number() ? 'E' : dtype.num() > kLastOfNumpy ? char(0) : dtype.char_();
  if (view.type == 'q') view.type = 'l';
  view.shape.assign(array.shape(), array.shape() + array.ndim());
  view.strides.assign(array.strides(), array.strides() + array.ndim());
  view.is_row_major = array.flags() & py::array::c_style;
  view.is_writeable = array.writeable();
  return view;
}

// A number, a flag, or a tuple of them; false for anything else.
bool read_numbers(const py::handle& value, std::vector<double>* numbers) {
  if (py::isinstance<py::float_>(value) || py::isinstance<py::int_>(value)) {
    numbers->push_back(value.cast<double>());
    return true;
  }
  if (!PyTuple_Check(value.ptr())) return false;
  for (const py::handle& entry : py::reinterpret_borrow<py::tuple>(value))
    if (PyTuple_Check(entry.ptr()) || !read_numbers(entry, numbers)) return false;
  return true;
}

bool call_kernel(const Prepare& prepare, const py::args& inputs, const py::kwargs& keywords) {
  Call call;
  for (const py::handle& input : inputs) call.inputs.push_back(view_of(input));
  for (const auto& [key, value] : keywords) {
    const std::string name = key.cast<std::string>();
    if (name == "where") continue;  // the operator in numpy's errors; a kernel leaves what is wrong to numpy
    if (value.is_none() || py::isinstance<py::str>(value)) {
      call.attributes[name];
      call.words[name] = value.is_none() ? "" : value.cast<std::string>();
    } else if (name != "out") {
      if (!read_numbers(value, &call.attributes[name])) return false;
    } else if (PyTuple_Check(value.ptr())) {
      for (const py::handle& output : py::reinterpret_borrow<py::tuple>(value)) call.outputs.push_back(view_of(output));
    } else {
      call.outputs.push_back(view_of(value));
    }
  }
  const Step step = prepare(call);
  return step && run(step);
}

}  // namespace

void bind_registered(py::module_& m) {
  for (const auto& entry : registered_kernels()) {
    const Prepare& prepare = entry.second;
    m.def(entry.first.c_str(), [&prepare](const py::args& inputs, const py::kwargs& keywords) {
      return call_kernel(prepare, inputs, keywords);
    });
  }
}

}  // namespace singa_lite
