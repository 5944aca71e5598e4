// SPDX-License-Identifier: Apache-2.0
// Every collective with every element type among 1, 2 and 3 processes, against sums over what each rank must have put in.
#include <deque>
#include <type_traits>

#include "common/half.h"
#include "world.h"

using namespace singa_lite;

namespace {

// Element i of a rank's input: different on every rank, and small enough that half precision adds exactly.
int value_of(int rank, std::size_t i) { return int((i * 7 + std::size_t(rank) * 31) % 61) - 20; }

template <class T>
T to_element(double value) {
  return T(value);
}
template <>
std::uint16_t to_element<std::uint16_t>(double value) {  // a half
  const float wide = float(value);
  std::uint16_t half;
  float_to_half(&wide, &half, 1);
  return half;
}

double fold(ReduceOp op, int size, std::size_t i) {
  double all = value_of(0, i);
  for (int rank = 1; rank < size; ++rank) {
    const double next = value_of(rank, i);
    all = op == ReduceOp::kMax ? std::max(all, next) : op == ReduceOp::kMin ? std::min(all, next) : all + next;
  }
  return op == ReduceOp::kMean ? all / size : all;
}

template <class T>
struct Case {
  Request request;
  Array<T> in, out;
  std::size_t size;

  // in place: the result goes where the input was, where both are of one size
  Case(Kind kind, ReduceOp op, DType dtype, std::size_t count, int rank, int ranks, int root, bool in_place)
      : in(count * (has_blocks(kind) ? std::size_t(ranks) : 1), 1),
        out(count * (kind == Kind::kAllGather || kind == Kind::kAllToAll ? std::size_t(ranks) : 1), 1),
        size(std::size_t(ranks)) {
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = to_element<T>(value_of(rank, i));
    const bool is_same = in_place && in.size() == out.size() && kind != Kind::kAllToAll;
    request = {kind, op, dtype, dtype, root, in.data(), is_same ? in.data() : out.data(), count, "case"};
  }

  double expected(std::size_t i, int rank) const {
    const std::size_t count = request.count;
    switch (request.kind) {
      case Kind::kAllReduce:
      case Kind::kReduce: return fold(request.op, int(size), i);
      case Kind::kBroadcast: return value_of(request.root, i);
      case Kind::kAllGather: return value_of(int(i / count), i % count);
      case Kind::kAllToAll: return value_of(int(i / count), std::size_t(rank) * count + i % count);
      default: return fold(request.op, int(size), std::size_t(rank) * count + i);
    }
  }

  void check(int rank) const {
    if ((request.kind == Kind::kReduce || request.kind == Kind::kBroadcast) && (request.kind == Kind::kReduce) != (rank == request.root))
      return;  // only the root of a reduce is written, all but the root of a broadcast
    const T* got = static_cast<const T*>(request.out);
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (got[i] == to_element<T>(expected(i, rank))) continue;
      if (std::is_floating_point_v<T> && is_near(double(got[i]), expected(i, rank), 1e-6)) continue;
      FAIL("%s %s of %zu %s, root %d, rank %d: element %zu is not %g", name_of(request.kind), name_of(request.op),
           request.count, name_of(request.dtype), request.root, rank, i, expected(i, rank));
    }
  }
};

template <class T>
void test_dtype(Engine& engine, DType dtype, int rank, int ranks, std::size_t count, int root) {
  std::deque<Case<T>> cases;  // all in flight together
  const auto add = [&](Kind kind, ReduceOp op) {
    cases.emplace_back(kind, op, dtype, count, rank, ranks, root, cases.size() % 2 == 0);
  };
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin})
    if (dtype != DType::kUInt8 && (op != ReduceOp::kMean || std::is_floating_point_v<T>))
      for (Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) add(kind, op);
  add(Kind::kBroadcast, ReduceOp::kNone);
  add(Kind::kAllGather, ReduceOp::kNone);
  add(Kind::kAllToAll, ReduceOp::kNone);
  std::vector<std::shared_ptr<Op>> ops;
  for (const auto& one : cases) ops.push_back(engine.start(one.request));
  for (std::size_t i = 0; i < ops.size(); ++i) {
    finish(engine, *ops[i]);
    CHECK(engine.is_done(*ops[i]));
    cases[i].check(rank);
  }
}

// float32 that travels in 16 bits; the sums here are exact in both forms
void test_narrow(Engine& engine, DType wire, int rank, int ranks, std::size_t count) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    Case<float> one(Kind::kAllReduce, op, DType::kFloat32, count, rank, ranks, 0, op == ReduceOp::kMax);
    one.request.wire = wire;
    finish(engine, *engine.start(one.request));
    one.check(rank);
  }
}

void test_all(Engine& engine, int rank, int ranks, std::size_t count) {
  const int root = ranks - 1;
  test_dtype<std::uint16_t>(engine, DType::kFloat16, rank, ranks, count, root);
  test_dtype<float>(engine, DType::kFloat32, rank, ranks, count, root);
  test_dtype<double>(engine, DType::kFloat64, rank, ranks, count, 0);
  test_dtype<std::int32_t>(engine, DType::kInt32, rank, ranks, count, root);
  test_dtype<std::int64_t>(engine, DType::kInt64, rank, ranks, count, 0);
  test_dtype<std::uint8_t>(engine, DType::kUInt8, rank, ranks, count, root);
  test_narrow(engine, DType::kFloat16, rank, ranks, count);
  test_narrow(engine, DType::kBFloat16, rank, ranks, count);
}

// The background thread moves what nobody awaits.
void test_unawaited_large(Engine& engine, int rank, int ranks) {
  Case<float> large(Kind::kAllReduce, ReduceOp::kSum, DType::kFloat32, 2 * kLargeSize, rank, ranks, 0, true);
  Case<float> small(Kind::kAllReduce, ReduceOp::kSum, DType::kFloat32, 33, rank, ranks, 0, false);
  const auto large_op = engine.start(large.request), small_op = engine.start(small.request);
  while (!engine.is_done(*large_op)) usleep(1000);
  finish(engine, *small_op);
  finish(engine, *large_op);
  large.check(rank);
  small.check(rank);
}

// Nothing to move: arrays without memory are good.
void test_nothing(Engine& engine) {
  for (Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter, Kind::kAllToAll}) {
    const bool reduces = kind != Kind::kBroadcast && kind != Kind::kAllGather && kind != Kind::kAllToAll;
    Request request{kind, reduces ? ReduceOp::kSum : ReduceOp::kNone, DType::kFloat32, DType::kFloat32, 0, nullptr, nullptr, 0, "nothing"};
    finish(engine, *engine.start(request));
  }
}

}  // namespace

int main() {
  for (int ranks : {1, 2, 3})
    run_world(ranks, [&](Engine& engine, int rank) {
      test_nothing(engine);
      // around vectors and lines; from 32 KB on in pieces; beyond a slot of 256 KB; the last beyond 4 MB: the thread
      for (std::size_t count : {1, 2, 7, 64, 1001, 8193, 16411, 70001}) test_all(engine, rank, ranks, count);
      test_dtype<float>(engine, DType::kFloat32, rank, ranks, 300007, 0);
      for (DType wire : {DType::kFloat16, DType::kBFloat16}) test_narrow(engine, wire, rank, ranks, 600011);
      test_unawaited_large(engine, rank, ranks);
    });
}
