// SPDX-License-Identifier: Apache-2.0
// Python's view of native/comm: numpy arrays become pointers, the GIL is released, CommError is Python's own.
#include <pybind11/pybind11.h>

#include <cstring>

#include "comm/combine.h"
#include "comm/engine.h"
#include "common/error.h"

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

// While a rank waits for the others without the GIL: run Python's signal handlers, then the caller's function.
Segment::Check in_python(const py::object& check) {
  return [&check]() -> std::string {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return py::str(check());
  };
}

// A forked child has no background thread and half-held locks: there the engine is left as it is.
std::shared_ptr<Engine> make_engine(const std::string& rendezvous_id, int rank, int size, double timeout_s,
                                    const py::object& check) {
  py::gil_scoped_release release;
  return std::shared_ptr<Engine>(new Engine(rendezvous_id, rank, size, timeout_s, in_python(check)), [](Engine* engine) {
    if (!engine->is_forked()) delete engine;
  });
}

void wait_for_all(Engine& engine, const py::object& check) {
  py::gil_scoped_release release;
  engine.wait_for_all(in_python(check));
}

std::shared_ptr<Op> start(Engine& engine, int kind, int op, int dtype, int wire, int root, const py::handle& in,
                          const py::handle& out, std::size_t count, std::string name, float scale) {
  Request request{Kind(kind),
                  ReduceOp(op),
                  DType(dtype),
                  DType(wire),
                  root,
                  memory_of(in, false),
                  const_cast<void*>(memory_of(out, true)),
                  count,
                  std::move(name),
                  scale};
  py::gil_scoped_release release;
  return engine.start(std::move(request));
}

// float32 values as float16 or bfloat16, times `scale`; Python sees the bits of these as those of any 16-bit dtype.
template <DType Wire>
void narrow(const py::handle& in, const py::handle& out, std::size_t count, float scale) {
  const auto* from = static_cast<const float*>(memory_of(in, false));
  void* to = const_cast<void*>(memory_of(out, true));
  py::gil_scoped_release release;
  to_wire(Wire, from, to, count, scale);
}

// And back, divided by `scale`.
template <DType Wire>
void widen(const py::handle& in, const py::handle& out, std::size_t count, float scale) {
  const void* from = memory_of(in, false);
  auto* to = static_cast<float*>(const_cast<void*>(memory_of(out, true)));
  py::gil_scoped_release release;
  from_wire(Wire, from, to, count, scale);
}

// In slices, to run Python's signal handlers between them.
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
  m.doc() = "Shared-memory collectives; singa_lite/comm/shm.py calls them.";
  // Kept for the life of the process: exceptions may be translated while the interpreter shuts down.
  static PyObject* comm_error = py::object(py::module_::import("singa_lite.errors").attr("CommError")).release().ptr();
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CommError& error) {
      const char* text = error.what();  // its last character may be cut
      PyObject* decoded = PyUnicode_DecodeUTF8(text, Py_ssize_t(std::strlen(text)), "replace");
      PyErr_SetObject(comm_error, decoded);
      Py_XDECREF(decoded);
    }
  });

  py::class_<Op, std::shared_ptr<Op>>(m, "Op").def_property_readonly(
      "has_ended", [](const Op& op) { return op.state.load() != 0; });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&make_engine), py::arg("rendezvous_id"), py::arg("rank"), py::arg("size"), py::arg("timeout_s"),
           py::arg("check"))
      .def("wait_for_all", &wait_for_all, py::arg("check"))
      .def("start", &start)
      .def("wait", &wait)
      .def("is_done", &Engine::is_done, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Engine::abort, py::call_guard<py::gil_scoped_release>())
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>());

  m.def("float_to_half", &narrow<DType::kFloat16>);
  m.def("half_to_float", &widen<DType::kFloat16>);
  m.def("float_to_bfloat16", &narrow<DType::kBFloat16>);
  m.def("bfloat16_to_float", &widen<DType::kBFloat16>);
}
