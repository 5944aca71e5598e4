// SPDX-License-Identifier: Apache-2.0
// Python's view of native/cuda: addresses of device memory and streams are integers, the GIL is released, and
// CudnnError is Python's DeviceError. singa_lite/backend/cuda/cudnn.py calls it.
#include "cuda/cudnn.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "bindings/gil.h"
#include "cuda/convolution.h"
#include "cuda/norm.h"
#include "cuda/rnn.h"

namespace py = pybind11;
using namespace singa_lite::cudnn;

namespace {

using Address = std::uintptr_t;
using Unlocked = py::call_guard<singa_lite::GilRelease>;

void* at(Address address) { return reinterpret_cast<void*>(address); }

Layout layout_of(bool is_channels_last) { return is_channels_last ? Layout::kChannelsLast : Layout::kRowMajor; }

DType dtype_of(int number) {
  if ((number < 0 || number > 2) && number != int(DType::kBFloat16)) throw py::value_error("dtype is 0, 1, 2 or 9");
  return DType(number);
}

std::unique_ptr<Convolution> make_convolution(std::shared_ptr<Handle> handle, int direction, int dtype,
                                              bool is_channels_last, Shape x, Shape w, Shape y, Pair stride,
                                              Pair padding, Pair dilation, int groups, bool allow_tf32) {
  if (direction < 0 || direction > 2) throw py::value_error("direction is 0, 1 or 2");
  const Geometry geometry{dtype_of(dtype), layout_of(is_channels_last), x, w, y, stride, padding, dilation, groups};
  return std::make_unique<Convolution>(std::move(handle), Direction(direction), geometry, allow_tf32);
}

void bind_convolution(py::module_& m) {
  py::class_<Convolution>(m, "Convolution")
      .def(py::init(&make_convolution), py::arg("handle"), py::arg("direction"), py::arg("dtype"),
           py::arg("is_channels_last"), py::arg("x"), py::arg("w"), py::arg("y"), py::arg("stride"), py::arg("padding"),
           py::arg("dilation"), py::arg("groups"), py::arg("allow_tf32"))
      .def("measure",
           [](Convolution& self, Address stream, Address a, Address b, Address out, Address workspace,
              std::size_t bytes) { self.measure(at(stream), at(a), at(b), at(out), at(workspace), bytes); },
           Unlocked())
      .def("estimate", &Convolution::estimate, py::arg("limit_bytes"), Unlocked())
      .def("run",
           [](Convolution& self, Address stream, Address a, Address b, Address out, Address bias, Address workspace,
              std::size_t bytes) { self.run(at(stream), at(a), at(b), at(out), at(bias), at(workspace), bytes); },
           Unlocked())
      .def_property_readonly("algorithm", &Convolution::algorithm)
      .def_property_readonly("math", [](const Convolution& self) { return int(self.math()); })
      .def_property_readonly("workspace_bytes", &Convolution::workspace_bytes);
}

void bind_norm(py::module_& m) {
  py::class_<BatchNorm>(m, "BatchNorm")
      .def(py::init([](std::shared_ptr<Handle> handle, int dtype, bool is_channels_last, Shape x) {
             return std::make_unique<BatchNorm>(std::move(handle), dtype_of(dtype), x, layout_of(is_channels_last));
           }),
           py::arg("handle"), py::arg("dtype"), py::arg("is_channels_last"), py::arg("x"))
      .def("train",
           [](BatchNorm& self, Address stream, Address x, Address scale, Address bias, Address y, Address mean,
              Address inverse_std, Address running_mean, Address running_var, double momentum, double eps) {
             self.train(at(stream), at(x), at(scale), at(bias), at(y), at(mean), at(inverse_std), at(running_mean),
                        at(running_var), momentum, eps);
           },
           Unlocked())
      .def("infer",
           [](BatchNorm& self, Address stream, Address x, Address scale, Address bias, Address mean, Address var,
              Address y, double eps) {
             self.infer(at(stream), at(x), at(scale), at(bias), at(mean), at(var), at(y), eps);
           },
           Unlocked())
      .def("backward",
           [](BatchNorm& self, Address stream, Address dy, Address x, Address scale, Address mean, Address inverse_std,
              Address dx, Address dscale, Address dbias) {
             self.backward(at(stream), at(dy), at(x), at(scale), at(mean), at(inverse_std), at(dx), at(dscale),
                           at(dbias));
           },
           Unlocked());
}

std::unique_ptr<Recurrent> make_recurrent(std::shared_ptr<Handle> handle, int dtype, int mode, int input_size,
                                          int hidden_size, int num_layers, bool bidirectional, bool bias, int steps,
                                          int batch, std::vector<int> lengths, bool allow_tf32) {
  if (mode < 0 || mode > 3) throw py::value_error("mode is 0, 1, 2 or 3");
  if (!lengths.empty() && int(lengths.size()) != batch) throw py::value_error("one length for each sequence");
  const RnnConfig config{dtype_of(dtype), RnnMode(mode), input_size, hidden_size, num_layers, bidirectional, bias, steps,
                    batch, std::move(lengths)};
  return std::make_unique<Recurrent>(std::move(handle), config, allow_tf32);
}

void bind_recurrent(py::module_& m) {
  py::class_<Recurrent>(m, "Recurrent")
      .def(py::init(&make_recurrent), py::arg("handle"), py::arg("dtype"), py::arg("mode"), py::arg("input_size"),
           py::arg("hidden_size"), py::arg("num_layers"), py::arg("bidirectional"), py::arg("bias"), py::arg("steps"),
           py::arg("batch"), py::arg("lengths"), py::arg("allow_tf32"))
      .def("forward",
           [](Recurrent& self, Address stream, Address x, Address weights, Address h0, Address c0, Address y,
              Address hy, Address cy, Address workspace, Address reserve) {
             self.forward(at(stream), at(x), at(weights), at(h0), at(c0), at(y), at(hy), at(cy), at(workspace),
                          at(reserve));
           },
           Unlocked())
      .def("backward",
           [](Recurrent& self, Address stream, Address dy, Address dhy, Address dcy, Address x, Address weights,
              Address h0, Address c0, Address y, Address dx, Address dweights, Address dh0, Address dc0,
              Address workspace, Address reserve) {
             self.backward(at(stream), at(dy), at(dhy), at(dcy), at(x), at(weights), at(h0), at(c0), at(y), at(dx),
                           at(dweights), at(dh0), at(dc0), at(workspace), at(reserve));
           },
           Unlocked())
      .def_property_readonly("pieces",
                             [](const Recurrent& self) {
                               std::vector<std::array<std::size_t, 3>> pieces;
                               for (const auto& [ours, theirs, count] : self.pieces())
                                 pieces.push_back({ours, theirs, count});
                               return pieces;
                             })
      .def_property_readonly("weight_bytes", &Recurrent::weight_bytes)
      .def_property_readonly("reserve_bytes", &Recurrent::reserve_bytes)
      .def_property_readonly("workspace_bytes", &Recurrent::workspace_bytes);
}

}  // namespace

PYBIND11_MODULE(_cudnn, m) {
  m.doc() = "libcudnn.so.9, opened at run time; singa_lite/backend/cuda/cudnn.py calls it.";
  // Kept for the life of the process: exceptions may be translated while the interpreter shuts down.
  static PyObject* device_error =
      py::object(py::module_::import("singa_lite.errors").attr("DeviceError")).release().ptr();
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CudnnError& error) {
      PyErr_SetString(device_error, error.what());
    }
  });

  py::class_<Cudnn, std::shared_ptr<Cudnn>>(m, "Cudnn")
      .def(py::init<std::vector<std::string>>(), py::arg("names"), Unlocked());

  py::class_<Handle, std::shared_ptr<Handle>>(m, "Handle")
      .def(py::init([](std::shared_ptr<Cudnn> cudnn) { return std::make_shared<Handle>(std::move(cudnn)); }),
           py::arg("cudnn"), Unlocked());

  bind_convolution(m);
  bind_norm(m);
  bind_recurrent(m);
}
