// SPDX-License-Identifier: Apache-2.0
// Optimizer steps of many tensors in one launch, for update.py: each block takes a piece of one tensor. launch.py puts
// updates.h behind this.

const Int kPieceElements = 2048;

struct Item {
  T *grad, *param, *first, *second;  // first and second: states, or null
  Int size, first_block;
};
struct Items {
  Int count;
  Item items[80];  // arguments of a kernel end at 4 KB
};

// The numbers of an update: the members of its struct.
struct Numbers {
  Number<double> values[8];
};

// f(g, p, first, second) gives new values to p and as many states as there are.
template <int num_states, class F> __device__ void update(const Items& items, const Numbers& numbers) {
  const Item item = entry_of_block(items.items, items.count);
  const Int begin = (blockIdx.x - item.first_block) * kPieceElements, left = item.size - begin;
  const Int end = begin + (left < kPieceElements ? left : kPieceElements);
  F f = {};
  A* members = reinterpret_cast<A*>(&f);
  for (unsigned i = 0; i < sizeof(F) / sizeof(A); ++i) members[i] = A(numbers.values[i].get());
  for (Int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    A p = widen(item.param[i]);
    A first = num_states > 0 ? widen(item.first[i]) : A(0), second = num_states > 1 ? widen(item.second[i]) : A(0);
    f(widen(item.grad[i]) + (f.weight_decay != 0 ? f.weight_decay * p : A(0)), p, first, second);
    if (num_states > 0) item.first[i] = narrow<T>(first);
    if (num_states > 1) item.second[i] = narrow<T>(second);
    item.param[i] = narrow<T>(p);
  }
}

__device__ inline A rounded(A value) { return widen(narrow<T>(value)); }  // as a state is stored

#define UPDATE(name, num_states, first, second, assignments, ...)                                       \
  struct name##_rule {                                                                                  \
    A weight_decay, __VA_ARGS__;                                                                        \
    __device__ void operator()(A g, A& p, A& first, A& second) const { assignments }                    \
  };                                                                                                    \
  KERNEL name(Items items, Numbers numbers) { update<num_states, name##_rule>(items, numbers); }

#define UPDATE0(name, value, ...) UPDATE(name, 0, first_, second_, p = value;, __VA_ARGS__)
#define UPDATE1(name, s, s_value, value, ...) UPDATE(name, 1, s, second_, s = rounded(s_value); p = value;, __VA_ARGS__)
#define UPDATE2(name, s, s_value, t, t_value, value, ...) \
  UPDATE(name, 2, s, t, s = rounded(s_value); t = rounded(t_value); p = value;, __VA_ARGS__)
