// SPDX-License-Identifier: Apache-2.0
// The parts of the module _kernels, one a file.
#pragma once

#include <pybind11/pybind11.h>

namespace singa_lite {

void bind_registered(pybind11::module_& m);  // those of kernels/registry.h
void bind_windows(pybind11::module_& m);   // matrix products, convolution, pooling
void bind_norms(pybind11::module_& m);     // batch norm, softmax and its loss
void bind_plan(pybind11::module_& m);      // recorded steps
void bind_quantize(pybind11::module_& m);  // gradients in 1 or 2 bits

}  // namespace singa_lite
