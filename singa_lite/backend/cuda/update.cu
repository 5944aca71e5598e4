// SPDX-License-Identifier: Apache-2.0
// Optimizer steps of many tensors in one launch, for update.py: each block takes a piece of one tensor.

const Int kPieceElements = 2048;

struct Item {
  T *grad, *param, *first, *second;  // first and second: states, or null
  Int size, first_block;
};
struct Items {
  Int count;
  Item items[80];  // arguments of a kernel end at 4 KB
};

__device__ inline Item find_item(const Items& items, Int* begin, Int* end) {
  int low = 0, high = static_cast<int>(items.count) - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (items.items[middle].first_block <= blockIdx.x) low = middle;
    else high = middle - 1;
  }
  const Item item = items.items[low];
  *begin = (blockIdx.x - item.first_block) * kPieceElements + threadIdx.x;
  *end = *begin - threadIdx.x + kPieceElements;
  if (*end > item.size) *end = item.size;
  return item;
}

KERNEL sgd_update(Items items, Number<double> lr_of, Number<double> momentum_of, Number<double> dampening_of,
                  Number<double> decay_of, Int nesterov) {
  Int begin, end;
  const Item item = find_item(items, &begin, &end);
  const A lr = A(lr_of.get()), momentum = A(momentum_of.get()), keep = A(1 - dampening_of.get()), decay = A(decay_of.get());
  for (Int i = begin; i < end; i += blockDim.x) {
    const A param = widen(item.param[i]);
    A slope = widen(item.grad[i]) + (decay != 0 ? decay * param : A(0));
    if (momentum != 0 && item.first) {
      const T stored = narrow<T>(A(momentum * widen(item.first[i]) + keep * slope));
      item.first[i] = stored;
      const A velocity = widen(stored);
      slope = nesterov ? slope + momentum * velocity : velocity;
    }
    item.param[i] = narrow<T>(A(param - lr * slope));
  }
}

// rate = lr / (1 - beta_1 ** step), correction = 1 / (1 - beta_2 ** step)
KERNEL adam_update(Items items, Number<double> rate_of, Number<double> correction_of, Number<double> decay_of, double beta_1,
                   double beta_2, double eps) {
  Int begin, end;
  const Item item = find_item(items, &begin, &end);
  const A rate = A(rate_of.get()), correction = A(correction_of.get()), decay = A(decay_of.get());
  const A keep_1 = A(beta_1), keep_2 = A(beta_2), new_1 = A(1 - beta_1), new_2 = A(1 - beta_2);
  for (Int i = begin; i < end; i += blockDim.x) {
    const A param = widen(item.param[i]), slope = widen(item.grad[i]) + (decay != 0 ? decay * param : A(0));
    item.first[i] = narrow<T>(A(keep_1 * widen(item.first[i]) + new_1 * slope));
    item.second[i] = narrow<T>(A(keep_2 * widen(item.second[i]) + new_2 * slope * slope));
    const A scale = sqrt(widen(item.second[i]) * correction) + A(eps);
    item.param[i] = narrow<T>(A(param - widen(item.first[i]) / scale * rate));
  }
}
