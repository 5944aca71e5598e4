// SPDX-License-Identifier: Apache-2.0
// IEEE 754 half precision: conversion of arrays to and from float, rounding to nearest, ties to even.
// Uses F16C where the processor has it; every path gives the same bits, NaN payloads included.
#pragma once

#include <cstddef>
#include <cstdint>

namespace singa_lite {

void half_to_float(const std::uint16_t* from, float* to, std::size_t count);
void float_to_half(const float* from, std::uint16_t* to, std::size_t count);

// The portable paths, for the test that compares them with the fast ones.
void half_to_float_portable(const std::uint16_t* from, float* to, std::size_t count);
void float_to_half_portable(const float* from, std::uint16_t* to, std::size_t count);

}  // namespace singa_lite
