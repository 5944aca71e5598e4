// SPDX-License-Identifier: Apache-2.0
// Python's view of native/comm: numpy arrays become pointers, the GIL is released, CommError is Python's own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "comm/combine.h"
#include "comm/engine.h"
#include "comm/p2p.h"
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

// A text whose last character may be cut.
py::str to_python(const std::string& text) {
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace"));
}

// While a rank waits for the others without the GIL: run Python's signal handlers, then the caller's function.
Segment::Check in_python(const py::object& check) {
  return [&check]() -> std::string {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return py::str(check());
  };
}

// A forked child has no background thread and half-held locks: there the engine or messenger is left as it is.
template <class T, class... Arguments>
std::shared_ptr<T> make(const std::string& rendezvous_id, int rank, Arguments... arguments, double timeout_s,
                        const py::object& check) {
  py::gil_scoped_release release;
  return std::shared_ptr<T>(new T(rendezvous_id, rank, arguments..., timeout_s, in_python(check)), [](T* made) {
    if (!made->is_forked()) delete made;
  });
}

template <class T>
void wait_for_all(T& made, const py::object& check) {
  py::gil_scoped_release release;
  made.wait_for_all(in_python(check));
}

std::shared_ptr<Op> start(Engine& engine, int kind, int op, int dtype, int wire, int root, const py::handle& in,
                          const py::handle& out, std::size_t count, std::string name, float scale,
                          bool asks_to_stop) {
  Request request{Kind(kind),
                  ReduceOp(op),
                  DType(dtype),
                  DType(wire),
                  root,
                  memory_of(in, false),
                  const_cast<void*>(memory_of(out, true)),
                  count,
                  std::move(name),
                  scale,
                  asks_to_stop};
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

constexpr double kSliceS = 0.1;  // of waiting, between which Python's signal handlers run

void wait(Engine& engine, Op& op, double limit_s) {
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

// Call wait(deadline_s) until it returns true; false if that takes longer than `limit_s` from moved_s() on.
template <class Wait, class MovedS>
bool wait_in_slices(double limit_s, const Wait& wait, const MovedS& moved_s) {
  const double since_s = monotonic_s();
  for (;;) {
    const double end_s = std::max(since_s, moved_s()) + limit_s;
    {
      py::gil_scoped_release release;
      if (wait(std::min(monotonic_s() + kSliceS, end_s))) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (monotonic_s() >= std::max(since_s, moved_s()) + limit_s) return false;
  }
}

std::vector<Memory> memories_of(const py::list& arrays, bool is_written) {
  std::vector<Memory> memories;
  for (const py::handle& array : arrays) {
    Py_buffer view;
    if (PyObject_GetBuffer(array.ptr(), &view, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw py::error_already_set();
    memories.push_back({static_cast<char*>(view.buf), std::size_t(view.len)});
    PyBuffer_Release(&view);
  }
  return memories;
}

std::shared_ptr<Outgoing> send_message(Messenger& messenger, int to, std::string head, const py::list& arrays) {
  const std::vector<Memory> memories = memories_of(arrays, false);
  py::gil_scoped_release release;
  return messenger.send(to, std::move(head), memories);
}

bool wait_sent(Messenger& messenger, Outgoing& message, double limit_s) {
  return wait_in_slices(
      limit_s, [&](double deadline_s) { return messenger.wait(message, deadline_s); },
      [&] { return message.moved_s; });
}

std::shared_ptr<Incoming> receive_message(Messenger& messenger, double limit_s) {
  std::shared_ptr<Incoming> message;
  wait_in_slices(
      limit_s,
      [&](double deadline_s) {
        message = messenger.receive(deadline_s);
        return message != nullptr;
      },
      [] { return 0.0; });
  return message;
}

bool read_message(Messenger& messenger, Incoming& message, const py::list& arrays, double limit_s) {
  const std::vector<Memory> memories = memories_of(arrays, true);
  messenger.begin_read(message, memories);
  bool is_read = false;
  try {
    is_read = wait_in_slices(
        limit_s, [&](double deadline_s) { return messenger.read(message, deadline_s); },
        [&] { return message.moved_s; });
  } catch (...) {
    messenger.abandon_read(message);
    throw;
  }
  if (!is_read) messenger.abandon_read(message);
  return is_read;
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
      PyErr_SetObject(comm_error, to_python(error.what()).ptr());
    }
  });

  py::class_<Op, std::shared_ptr<Op>>(m, "Op")
      .def_property_readonly("has_ended", [](const Op& op) { return op.state.load() != 0; })
      .def_property_readonly("has_succeeded", [](const Op& op) { return op.state.load() == 1; })
      .def_readonly("is_asked_to_stop", &Op::is_asked_to_stop)  // once it has succeeded
      .def_property_readonly("times", [](const Op& op) {
        return py::make_tuple(op.called_s, op.all_called_s, op.ended_s);  // once it has ended
      });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&make<Engine, int>), py::arg("rendezvous_id"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_s"), py::arg("check"))
      .def("name_ranks", &Engine::name_ranks, py::arg("names"))
      .def("wait_for_all", &wait_for_all<Engine>, py::arg("check"))
      .def("start", &start)
      .def("wait", &wait)
      .def("is_done", &Engine::is_done, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Engine::abort, py::call_guard<py::gil_scoped_release>())
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>());

  py::class_<Outgoing, std::shared_ptr<Outgoing>>(m, "Outgoing")
      .def_property_readonly("has_ended", [](const Outgoing& sent) { return sent.is_sent || sent.has_failed; })
      .def_property_readonly("failure", [](const Outgoing& sent) { return to_python(sent.failure); });

  py::class_<Incoming, std::shared_ptr<Incoming>>(m, "Incoming")
      .def_readonly("source", &Incoming::source)
      .def_property_readonly("reason", [](const Incoming& message) { return to_python(message.reason); })
      .def_property_readonly("head", [](const Incoming& message) { return py::bytes(message.head); })
      .def_property_readonly("failure", [](const Incoming& message) { return to_python(message.failure); });

  py::class_<Messenger, std::shared_ptr<Messenger>>(m, "Messenger")
      .def(py::init(&make<Messenger, int, int>), py::arg("rendezvous_id"), py::arg("rank"), py::arg("num_workers"),
           py::arg("num_servers"), py::arg("timeout_s"), py::arg("check"))
      .def("wait_for_all", &wait_for_all<Messenger>, py::arg("check"))
      .def("send", &send_message)
      .def("is_done", &Messenger::is_done, py::call_guard<py::gil_scoped_release>())
      .def("wait", &wait_sent)
      .def("receive", &receive_message)
      .def("read", &read_message)
      .def("leave", &Messenger::leave, py::call_guard<py::gil_scoped_release>());

  m.def("float_to_half", &narrow<DType::kFloat16>);
  m.def("half_to_float", &widen<DType::kFloat16>);
  m.def("float_to_bfloat16", &narrow<DType::kBFloat16>);
  m.def("bfloat16_to_float", &widen<DType::kBFloat16>);
}
