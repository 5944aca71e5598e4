// SPDX-License-Identifier: Apache-2.0
// Python's view of native/comm: numpy arrays become pointers, the GIL is released, CommError is Python's own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "bindings/gil.h"
#include "comm/combine.h"
#include "comm/engine.h"
#include "comm/flight_recorder.h"
#include "comm/p2p.h"
#include "comm/stack_marks.h"
#include "common/error.h"

namespace py = pybind11;
using namespace singa_lite;

namespace {

// The memory of a C-contiguous array, and its shape; the caller of this module keeps the array alive.
const void* memory_of(const py::handle& array, bool is_written, CallSite* site = nullptr) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_ND | (is_written ? PyBUF_WRITABLE : 0)) != 0)
    throw py::error_already_set();
  const void* memory = view.buf;
  if (site != nullptr) {
    site->num_dims = std::size_t(view.ndim);
    std::copy_n(view.shape, std::min(site->num_dims, kFlightDims), site->dims);
  }
  PyBuffer_Release(&view);
  return memory;
}

// A text whose last character may be cut.
py::str to_python(const std::string& text) {
  return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace"));
}

// For the end of a process in which something has failed of which Python takes no notice.
void end_with_1() {
  static pid_t failed = 0;
  if (failed == 0 && Py_AtExit([] {
        if (failed == getpid()) std::exit(1);  // not in a forked child
      }) != 0)
    throw std::runtime_error("end_with_1: Python has no room for another function at its end");
  failed = getpid();
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
  GilRelease release;
  return std::shared_ptr<T>(new T(rendezvous_id, rank, arguments..., timeout_s, in_python(check)), [](T* made) {
    if (!made->is_forked()) delete made;
  });
}

template <class T>
void wait_for_all(T& made, const py::object& check) {
  GilRelease release;
  made.wait_for_all(in_python(check));
}

std::shared_ptr<Op> start(Engine& engine, int kind, int op, int dtype, int wire, int root, const py::handle& in,
                          const py::handle& out, std::size_t count, std::string name, float scale,
                          bool asks_to_stop, std::string_view file, int line) {
  CallSite site{file, line};
  Request request{Kind(kind),
                  ReduceOp(op),
                  DType(dtype),
                  DType(wire),
                  root,
                  memory_of(in, false, &site),
                  const_cast<void*>(memory_of(out, true)),
                  count,
                  std::move(name),
                  scale,
                  asks_to_stop};
  GilRelease release;  // the caller holds `file`
  return engine.start(std::move(request), site);
}

// A call of a transport that moves its data elsewhere.
void start_in_file(FlightFile& file, int rank, int kind, int op, int dtype, int wire, int root, const py::tuple& shape,
                   std::uint64_t count, std::uint64_t number, const std::string& name, std::string_view site_file,
                   int line) {
  const Fingerprint call{number,
                         count,
                         std::hash<std::string>()(name),
                         std::uint8_t(kind),
                         std::uint8_t(op),
                         std::uint8_t(dtype),
                         std::uint8_t(wire),
                         root,
                         std::uint32_t(name.size()),
                         bits_of(1)};
  CallSite site{site_file, line};
  site.num_dims = shape.size();
  for (std::size_t axis = 0; axis < std::min(site.num_dims, kFlightDims); ++axis)
    site.dims[axis] = shape[axis].cast<Py_ssize_t>();
  file.record().start(rank, call, name, site, monotonic_s());
}

py::dict to_python(const CallReading& call) {
  py::dict made;
  made["number"] = call.number;
  made["kind"] = to_python(call.kind);
  made["op"] = to_python(call.op);
  made["dtype"] = to_python(call.dtype);
  made["wire"] = to_python(call.wire);
  made["root"] = call.root;
  made["count"] = call.count;
  made["name"] = to_python(call.name);
  made["name_hash"] = call.name_hash;
  made["shape"] = py::cast(call.dims);
  made["has_more_axes"] = call.has_more_dims;
  made["file"] = to_python(call.file);
  made["line"] = call.line;
  made["state"] = std::uint32_t(call.state);
  made["called"] = call.called_s;
  made["all_there"] = call.all_called_s;
  made["ended"] = call.ended_s;
  return made;
}

// (id, title, [(process, rank in the world, when it joined, number of calls, [call, ...]), ...], whether it is reported)
py::tuple to_python(const FlightReading& reading) {
  py::list ranks;
  for (const RankReading& rank : reading.ranks) {
    py::list calls;
    for (const CallReading& call : rank.calls) calls.append(to_python(call));
    ranks.append(py::make_tuple(rank.pid, rank.world_rank, rank.joined_s, rank.num_calls, calls));
  }
  return py::make_tuple(to_python(reading.id), to_python(reading.title), ranks, reading.is_reported);
}

py::tuple read_flight_of(const py::buffer& memory) {
  const py::buffer_info view = memory.request();
  return to_python(read_flight(static_cast<const char*>(view.ptr), std::size_t(view.size * view.itemsize)));
}

// float32 values as float16 or bfloat16, times `scale`; Python sees the bits of these as those of any 16-bit dtype.
template <DType Wire>
void narrow(const py::handle& in, const py::handle& out, std::size_t count, float scale) {
  const auto* from = static_cast<const float*>(memory_of(in, false));
  void* to = const_cast<void*>(memory_of(out, true));
  GilRelease release;
  to_wire(Wire, from, to, count, scale);
}

// And back, divided by `scale`.
template <DType Wire>
void widen(const py::handle& in, const py::handle& out, std::size_t count, float scale) {
  const void* from = memory_of(in, false);
  auto* to = static_cast<float*>(const_cast<void*>(memory_of(out, true)));
  GilRelease release;
  from_wire(Wire, from, to, count, scale);
}

constexpr double kSliceS = 0.1;  // of waiting, between which Python's signal handlers run

// Returns 0 once `op` has ended; or since when this waits, as soon as the caller should warn of late ranks and then call
// it again with that number, which is 0 at first.
double wait(Engine& engine, Op& op, double limit_s, double waits_since_s) {
  const double since_s = waits_since_s > 0 ? waits_since_s : monotonic_s();
  for (;;) {
    {
      GilRelease release;
      if (engine.wait(op, kSliceS, limit_s, since_s)) return 0;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (waits_since_s <= 0 && engine.is_warning_due(op, limit_s, since_s)) return since_s;
  }
}

// Call wait(deadline_s) until it returns true; false if that takes longer than `limit_s` from moved_s() on.
template <class Wait, class MovedS>
bool wait_in_slices(double limit_s, const Wait& wait, const MovedS& moved_s) {
  const double since_s = monotonic_s();
  for (;;) {
    const double end_s = std::max(since_s, moved_s()) + limit_s;
    {
      GilRelease release;
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
  GilRelease release;
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
  m.doc() = "What singa_lite/comm needs of native code: collectives and messages in shared memory, flight records, 16 bits.";
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
      .def_property_readonly("has_succeeded", [](const Op& op) { return op.state.load() == 1; })
      .def_property_readonly("number", [](const Op& op) { return op.fingerprint.sequence; })
      .def_readonly("is_asked_to_stop", &Op::is_asked_to_stop)  // once it has succeeded
      .def_property_readonly("times", [](const Op& op) {
        return py::make_tuple(op.called_s, op.all_called_s, op.ended_s);  // once it has ended
      });

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init(&make<Engine, int>), py::arg("rendezvous_id"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_s"), py::arg("check"))
      .def("name_ranks", &Engine::name_ranks, py::arg("names"))
      .def("wait_for_all", &wait_for_all<Engine>, py::arg("check"))
      .def("record", &Engine::record, py::arg("title"))
      .def("read_record", [](const Engine& engine) { return to_python(engine.read_record()); })
      .def("claim_report", &Engine::claim_report)
      .def("late_ranks", &Engine::late_ranks)
      .def("take_first_failure", &Engine::take_first_failure)
      .def("start", &start)
      .def("wait", &wait)
      .def("is_done", &Engine::is_done, py::call_guard<GilRelease>())
      .def("abort", &Engine::abort, py::call_guard<GilRelease>())
      .def("close", &Engine::close, py::call_guard<GilRelease>());

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
      .def("is_done", &Messenger::is_done, py::call_guard<GilRelease>())
      .def("wait", &wait_sent)
      .def("receive", &receive_message)
      .def("read", &read_message)
      .def("leave", &Messenger::leave, py::call_guard<GilRelease>());

  py::class_<FlightFile>(m, "FlightFile")
      .def(py::init<int>(), py::arg("size"))
      .def("describe", [](FlightFile& file, const std::string& id, const std::string& title) {
        file.record().describe(id, title);
      })
      .def("join", [](FlightFile& file, int rank, int pid, int world_rank) { file.record().join(rank, pid, world_rank); })
      .def("name_rank",
           [](FlightFile& file, int rank, int pid, int world_rank) { file.record().name_rank(rank, pid, world_rank); })
      .def("start", &start_in_file)
      .def("all_there", [](FlightFile& file, int rank, std::uint64_t number) {
        file.record().all_there(rank, number, monotonic_s());
      })
      .def("end", [](FlightFile& file, int rank, std::uint64_t number, bool is_good) {
        file.record().end(rank, number, is_good ? FlightState::kEnded : FlightState::kFailed, monotonic_s());
      })
      .def("claim_report", [](FlightFile& file) { return file.record().claim_report(); })
      .def("read_record", [](const FlightFile& file) { return to_python(read_flight(file.memory(), file.bytes())); });
  m.def("claim_report", &claim_report, py::arg("path"), py::arg("id"));
  m.def("read_flight", &read_flight_of, py::arg("memory"));

  m.def("end_with_1", &end_with_1, "Let this process end with exit code 1, once Python has done all that it does at exit.");

  m.attr("STACKS_BEGIN") = py::bytes(&kStacksBegin, 1);
  m.attr("STACKS_END") = py::bytes(&kStacksEnd, 1);
  m.def("mark_stacks", &mark_stacks, py::arg("signal"), py::arg("descriptor"));

  m.def("float_to_half", &narrow<DType::kFloat16>);
  m.def("half_to_float", &widen<DType::kFloat16>);
  m.def("float_to_bfloat16", &narrow<DType::kBFloat16>);
  m.def("bfloat16_to_float", &widen<DType::kBFloat16>);
}
