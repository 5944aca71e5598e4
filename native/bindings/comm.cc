// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_comm, m) { m.doc() = "shared-memory collectives"; }
