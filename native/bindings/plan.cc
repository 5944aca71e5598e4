// SPDX-License-Identifier: Apache-2.0
// Recorded kernels in Python: a plan is filled once and run at every replay without Python between its steps.
#include "bindings/arrays.h"
#include "bindings/families.h"
#include "common/signals.h"

namespace singa_lite {
namespace {

using namespace pybind11::literals;

// Calls kernel(*inputs, out=out, **attributes) with the plan recording: returns whether it was added.
bool record(Plan& plan, const py::function& kernel, const py::tuple& inputs, const py::dict& keywords) {
  struct Recording {
    explicit Recording(Plan* plan) { Plan::recording() = plan; }
    ~Recording() { Plan::recording() = nullptr; }
  } recording(&plan);
  return kernel(*inputs, **keywords).cast<bool>();
}

// Runs the steps from `first` on: the number of the first that did not, or how many there are.
std::size_t run_steps(const Plan& plan, std::size_t first) {
  GilRelease release;
  const SignalsBlocked blocked;  // once, not in each product
  const auto& steps = plan.steps();
  while (first < steps.size() && steps[first]()) ++first;
  return first;
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan", "Kernels on arrays that must outlive it, run one after the other without the GIL.")
      .def(py::init<>())
      .def("record", &record, "kernel"_a, "inputs"_a, "keywords"_a, "Add a kernel call; False if it cannot.")
      .def("run", &run_steps, "first"_a = 0,
           "Run the steps from `first` on; the number of the one not run, or len(plan).")
      .def("__len__", [](const Plan& plan) { return plan.steps().size(); });
}

}  // namespace singa_lite
