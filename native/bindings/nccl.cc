// SPDX-License-Identifier: Apache-2.0
// Python's view of native/comm/nccl.h: addresses and stream handles are integers, the GIL is released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bindings/gil.h"
#include "comm/nccl.h"

namespace py = pybind11;
using namespace singa_lite;

namespace {

using Names = std::vector<std::string>;

CudaStream stream_of(std::uintptr_t handle) { return reinterpret_cast<CudaStream>(handle); }

NcclId id_of(const std::string& bytes) {
  NcclId id;
  if (bytes.size() != sizeof(id.bytes)) throw std::invalid_argument("an NCCL id has 128 bytes");
  std::memcpy(id.bytes, bytes.data(), sizeof(id.bytes));
  return id;
}

py::bytes unique_id(const NcclLibrary& library) {
  NcclId id;
  {
    GilRelease release;
    library.check(library.get_unique_id(&id), "ncclGetUniqueId");
  }
  return py::bytes(id.bytes, sizeof(id.bytes));
}

void check_signals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A forked child has no watching thread, and NCCL's state is the parent's: there it is left as it is.
std::shared_ptr<NcclCommunicator> make(std::shared_ptr<NcclLibrary> library, std::shared_ptr<Driver> driver,
                                       const std::string& id, int rank, int shown_rank, int size, int device, double timeout_s,
                                       const std::vector<std::pair<int, int>>& peers,
                                       const NcclCommunicator* parent, bool is_blocking) {
  GilRelease release;
  auto* made = new NcclCommunicator(std::move(library), std::move(driver), id_of(id), rank, shown_rank, size, device,
                                    timeout_s, peers, parent, is_blocking, check_signals);
  return std::shared_ptr<NcclCommunicator>(made, [](NcclCommunicator* communicator) {
    if (!communicator->is_forked()) delete communicator;
  });
}

std::shared_ptr<NcclOp> start(NcclCommunicator& communicator, int kind, int op, int dtype, int root, std::uintptr_t in,
                              std::uintptr_t out, std::size_t count, std::string_view name, std::uintptr_t stream,
                              int device) {
  return communicator.start({Kind(kind), ReduceOp(op), DType(dtype), root, reinterpret_cast<const void*>(in),
                             reinterpret_cast<void*>(out), count, name, device},
                            stream_of(stream));
}

}  // namespace

PYBIND11_MODULE(_nccl, m) {
  m.doc() = "Collectives on GPU memory over NCCL; singa_lite/comm/nccl.py calls them. Opens nothing on import.";
  // Kept for the life of the process: exceptions may be translated while the interpreter shuts down.
  static PyObject* comm_error = py::object(py::module_::import("singa_lite.errors").attr("CommError")).release().ptr();
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CommError& error) {
      PyErr_SetString(comm_error, error.what());
    } catch (const CudaError& error) {
      PyErr_SetString(comm_error, error.what());
    }
  });
  const auto release = py::call_guard<GilRelease>();

  py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver", py::module_local())
      .def(py::init<const Names&>(), py::arg("names"), release)
      .def("uuid", &Driver::uuid)
      .def("device_of", [](const Driver& d, std::uintptr_t memory) { return d.device_of(reinterpret_cast<void*>(memory)); });
  py::class_<NcclLibrary, std::shared_ptr<NcclLibrary>>(m, "Library")
      .def(py::init<const Names&>(), py::arg("names"), release)
      .def_readonly("version", &NcclLibrary::version)
      .def("unique_id", &unique_id);

  py::class_<NcclOp, std::shared_ptr<NcclOp>>(m, "Op")
      .def_property_readonly("label", &NcclOp::label)
      .def_readonly("is_captured", &NcclOp::is_captured)
      .def_property_readonly("has_ended", [](const NcclOp& op) { return op.has_ended.load(); })
      .def_property_readonly("was_aborted", [](const NcclOp& op) { return op.was_aborted.load(); });
  py::class_<NcclCommunicator, std::shared_ptr<NcclCommunicator>>(m, "Communicator")
      .def(py::init(&make), py::arg("library"), py::arg("driver"), py::arg("id"), py::arg("rank"), py::arg("shown_rank"), py::arg("size"),
           py::arg("device"), py::arg("timeout_s"), py::arg("peers"), py::arg("parent").none(true), py::arg("is_blocking"))
      .def("start", &start, release)
      .def("wait", [](NcclCommunicator& c, const NcclOp& op, std::uintptr_t stream) { c.wait(op, stream_of(stream)); },
           release)
      .def("begin_graph", [](NcclCommunicator& c, std::uintptr_t stream, const std::string& name) {
            c.begin_graph(stream_of(stream), name); }, release)
      .def("end_graph", [](NcclCommunicator& c, std::uintptr_t stream) { c.end_graph(stream_of(stream)); }, release)
      .def_property_readonly("is_usable", &NcclCommunicator::is_usable)
      .def("is_done", &NcclCommunicator::is_done, release)
      .def("check", &NcclCommunicator::check, release)
      .def("check_failure", &NcclCommunicator::check_failure, release)
      .def("abort", &NcclCommunicator::abort, release)
      .def("close", &NcclCommunicator::close, py::arg("limit_s") = kLeaveS, release);
}
