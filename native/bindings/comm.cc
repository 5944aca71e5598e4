// SPDX-License-Identifier: Apache-2.0
// Python's view of native/comm: numpy arrays become pointers, the GIL is released, CommError is Python's own.
#include <pybind11/pybind11.h>

#include "comm/combine.h"
#include "comm/engine.h"
#include "common/error.h"
#include "common/half.h"

namespace py = pybind11;
using namespace singa_lite;

namespace {

// The memory of a C-contiguous array; the caller of this module keeps the array alive.
const void* memory_of(const py::handle& array, bool is_written) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
    throw py::error_already_set();
  const void* memory = view.buf;
  PyBuffer_Release(&view);
  return memory;
}

// A forked child has no background thread and half-held locks: there the engine is left as it is.
std::shared_ptr<Engine> make_engine(const std::string& ticket, int rank, int size, double timeout_s) {
  py::gil_scoped_release release;
  return std::shared_ptr<Engine>(new Engine(ticket, rank, size, timeout_s), [](Engine* engine) {
    if (!engine->is_forked()) delete engine;
  });
}

std::shared_ptr<Op> start(Engine& engine, int kind, int op, int dtype, int wire, int root, const py::handle& in,
                          const py::handle& out, std::size_t count, std::string name) {
  Request request{Kind(kind), ReduceOp(op), DType(dtype), DType(wire), root, memory_of(in, false),
                  nullptr,    count,        std::move(name)};
  if (!out.is_none()) request.out = const_cast<void*>(memory_of(out, true));
  py::gil_scoped_release release;
  return engine.start(std::move(request));
}

// The loop Convert on arrays; Python sees the bits of a half or a bfloat16 as those of any 16-bit dtype.
template <auto Convert, typename From, typename To>
void convert(const py::handle& in, const py::handle& out, std::size_t count) {
  const auto* from = static_cast<const From*>(memory_of(in, false));
  auto* to = static_cast<To*>(const_cast<void*>(memory_of(out, true)));
  py::gil_scoped_release release;
  Convert(from, to, count);
}

// In slices, so that Ctrl-C is heard.
void wait(Engine& engine, Op& op, double limit_s) {
  constexpr double kSliceS = 0.1;
  bool has_ended;
  const double since_s = monotonic_s();
  do {
    {
      py::gil_scoped_release release;
      has_ended = engine.wait(op, kSliceS, limit_s, since_s);
    }
    if (!has_ended && PyErr_CheckSignals() != 0) throw py::error_already_set();
  } while (!has_ended);
}

}  // namespace

PYBIND11_MODULE(_comm, m) {
  m.doc() = "Shared-memory collectives; singa_lite/comm/shm.py is their door.";
  // Kept for the life of the process: exceptions may be translated while the interpreter shuts down.
  static PyObject* comm_error = py::object(py::module_::import("singa_lite.errors").attr("CommError")).release().ptr();
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CommError& error) {
      PyErr_SetString(comm_error, error.what());
    }
  });

  py::class_<Op, std::shared_ptr<Op>>(m, "Op").def_property_readonly(
      "has_ended", [](const Op& op) { return op.state.load() != 0; });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&make_engine), py::arg("ticket"), py::arg("rank"), py::arg("size"), py::arg("timeout_s"))
      .def("wait_for_all", &Engine::wait_for_all, py::call_guard<py::gil_scoped_release>())
      .def("start", &start)
      .def("wait", &wait)
      .def("is_done", &Engine::is_done, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Engine::abort, py::call_guard<py::gil_scoped_release>())
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>());

  m.def("float_to_half", &convert<float_to_half, float, std::uint16_t>);
  m.def("half_to_float", &convert<half_to_float, std::uint16_t, float>);
  m.def("float_to_bfloat16", &convert<float_to_bfloat16, float, std::uint16_t>);
  m.def("bfloat16_to_float", &convert<bfloat16_to_float, std::uint16_t, float>);
}
