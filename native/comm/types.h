// SPDX-License-Identifier: Apache-2.0
// The words of a collective: what is asked, of which elements, combined how.
#pragma once

#include <cstddef>
#include <cstdint>

namespace singa_lite {

enum class Kind : std::uint8_t { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kAllToAll };
enum class ReduceOp : std::uint8_t { kSum, kMean, kMax, kMin, kNone };
// No array has kBFloat16, float32 values travel as it; kUInt8 is moved, never combined.
enum class DType : std::uint8_t { kFloat16, kFloat32, kFloat64, kInt32, kInt64, kBFloat16, kUInt8 };

constexpr const char* kKindNames[] = {"all_reduce", "reduce",         "broadcast",
                                      "all_gather", "reduce_scatter", "all_to_all"};
constexpr const char* kOpNames[] = {"sum", "mean", "max", "min", ""};
constexpr const char* kDTypeNames[] = {"float16", "float32", "float64", "int32", "int64", "bfloat16", "uint8"};
constexpr std::size_t kDTypeBytes[] = {2, 4, 8, 4, 8, 2, 1};

// Whether a rank puts in a block for each rank; a Request's count is then that of one block.
constexpr bool has_blocks(Kind kind) { return kind == Kind::kReduceScatter || kind == Kind::kAllToAll; }

constexpr const char* name_of(Kind kind) { return kKindNames[std::size_t(kind)]; }
constexpr const char* name_of(ReduceOp op) { return kOpNames[std::size_t(op)]; }
constexpr const char* name_of(DType dtype) { return kDTypeNames[std::size_t(dtype)]; }
constexpr std::size_t bytes_of(DType dtype) { return kDTypeBytes[std::size_t(dtype)]; }

}  // namespace singa_lite
