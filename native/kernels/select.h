// SPDX-License-Identifier: Apache-2.0
// Selection by magnitude: the k largest, or all from a threshold up. NaN counts as larger than infinity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace singa_lite {

// Positions, ascending, of the k largest |values|; among equals the lowest positions. count < 2^32, k <= count.
// Exact for every input; fast where a sample of the values resembles the rest.
std::vector<std::uint32_t> top_k(const float* values, std::size_t count, std::size_t k);

// How many |values| are >= threshold or NaN.
std::size_t threshold_count(const float* values, std::size_t count, float threshold);

// Their positions, ascending. count < 2^32.
std::vector<std::uint32_t> threshold_select(const float* values, std::size_t count, float threshold);

// indices[i] = positions[i] and selected[i] = values[positions[i]].
template <class Index>
void gather(const std::vector<std::uint32_t>& positions, const float* values, Index* indices, float* selected);

// False, and nothing done, if an index is not in 0 .. count - 1.
template <class Index>
bool scatter_add(const Index* indices, const float* values, std::size_t num_indices, float* flat, std::size_t count);
template <class Index>
bool scatter_fill(const Index* indices, float value, std::size_t num_indices, float* flat, std::size_t count);

}  // namespace singa_lite
