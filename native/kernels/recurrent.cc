// SPDX-License-Identifier: Apache-2.0
// Stacks of recurrent layers in float32, of sequences of one length: the walk and the reserve are those of
// backend/cpu/recurrent.py, the formulas those of backend/cpu/cells.py, the weights those of Note [packed weights] in
// backend/recurrent.py.
#include <algorithm>
#include <memory>

#include "kernels/clones.h"
#include "kernels/matmul.h"
#include "kernels/memory.h"
#include "kernels/reduce.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/vector_math.h"

#ifdef SINGA_LITE_ONEDNN
namespace singa_lite {
namespace recurrent_loops {

using vector_math::logistic;
using vector_math::tanh;

// One row of a step, of `size` hidden features. What a gate gets is its input, gates + bias, and product, the state's share.
struct Forward {
  std::size_t size;
  float* gates;          // the products of the inputs; receives what the gates give
  const float *product, *bias, *state_bias, *h, *c;
  float *kept_c, *kept_tanh, *next_h, *next_c, *y;
};

CLONES void tanh_forward(const Forward& f) {
#pragma GCC ivdep
  for (std::size_t j = 0; j < f.size; ++j) f.y[j] = f.next_h[j] = f.gates[j] = tanh(f.gates[j] + f.bias[j] + f.product[j]);
}

CLONES void relu_forward(const Forward& f) {
#pragma GCC ivdep
  for (std::size_t j = 0; j < f.size; ++j) {
    const float sum = f.gates[j] + f.bias[j] + f.product[j];
    f.y[j] = f.next_h[j] = f.gates[j] = sum < 0 ? 0.0f : sum;  // NaN stays
  }
}

CLONES void lstm_forward(const Forward& f) {
  const std::size_t n = f.size;
#pragma GCC ivdep
  for (std::size_t j = 0; j < n; ++j) {
    const float in = logistic(f.gates[j] + f.bias[j] + f.product[j]);
    const float forget = logistic(f.gates[n + j] + f.bias[n + j] + f.product[n + j]);
    const float candidate = tanh(f.gates[2 * n + j] + f.bias[2 * n + j] + f.product[2 * n + j]);
    const float out = logistic(f.gates[3 * n + j] + f.bias[3 * n + j] + f.product[3 * n + j]);
    const float c = forget * f.c[j] + in * candidate, tanh_c = tanh(c);
    f.gates[j] = in, f.gates[n + j] = forget, f.gates[2 * n + j] = candidate, f.gates[3 * n + j] = out;
    f.kept_c[j] = f.next_c[j] = c;
    f.kept_tanh[j] = tanh_c;
    f.y[j] = f.next_h[j] = out * tanh_c;
  }
}

CLONES void gru_forward(const Forward& f) {
  const std::size_t n = f.size;
#pragma GCC ivdep
  for (std::size_t j = 0; j < n; ++j) {
    const float reset = logistic(f.gates[j] + f.bias[j] + f.product[j]);
    const float update = logistic(f.gates[n + j] + f.bias[n + j] + f.product[n + j]);
    const float of_state = f.product[2 * n + j] + f.state_bias[j];
    const float candidate = tanh(f.gates[2 * n + j] + f.bias[2 * n + j] + reset * of_state);
    const float h = candidate + update * (f.h[j] - candidate);
    f.gates[j] = reset, f.gates[n + j] = update, f.gates[2 * n + j] = candidate;
    f.kept_c[j] = of_state;
    f.y[j] = f.next_h[j] = h;
  }
}

// The same backward. The gradient of h after the step is the sum of dy, product and carry.
struct Backward {
  std::size_t size;
  const float *gates, *dy, *product, *before, *kept_c, *kept_tanh, *c_before;
  float *carry, *dc;     // replaced by those of the step before
  float *dgates, *dstate;  // dstate: of the state's share, dgates itself but for a GRU
};

CLONES void tanh_backward(const Backward& b) {
#pragma GCC ivdep
  for (std::size_t j = 0; j < b.size; ++j) {
    b.dgates[j] = (b.dy[j] + b.product[j] + b.carry[j]) * (1 - b.gates[j] * b.gates[j]);
    b.carry[j] = 0;
  }
}

CLONES void relu_backward(const Backward& b) {
#pragma GCC ivdep
  for (std::size_t j = 0; j < b.size; ++j) {
    const float dh = b.dy[j] + b.product[j] + b.carry[j];
    b.dgates[j] = b.gates[j] > 0 ? dh : 0.0f;
    b.carry[j] = 0;
  }
}

CLONES void lstm_backward(const Backward& b) {
  const std::size_t n = b.size;
#pragma GCC ivdep
  for (std::size_t j = 0; j < n; ++j) {
    const float in = b.gates[j], forget = b.gates[n + j], candidate = b.gates[2 * n + j], out = b.gates[3 * n + j];
    const float dh = b.dy[j] + b.product[j] + b.carry[j], tanh_c = b.kept_tanh[j];
    const float dc = b.dc[j] + dh * out * (1 - tanh_c * tanh_c);
    b.dgates[j] = dc * candidate * (in * (1 - in));
    b.dgates[n + j] = dc * b.c_before[j] * (forget * (1 - forget));
    b.dgates[2 * n + j] = dc * in * (1 - candidate * candidate);
    b.dgates[3 * n + j] = dh * tanh_c * (out * (1 - out));
    b.dc[j] = dc * forget;
    b.carry[j] = 0;
  }
}

CLONES void gru_backward(const Backward& b) {
  const std::size_t n = b.size;
#pragma GCC ivdep
  for (std::size_t j = 0; j < n; ++j) {
    const float reset = b.gates[j], update = b.gates[n + j], candidate = b.gates[2 * n + j];
    const float dh = b.dy[j] + b.product[j] + b.carry[j];
    const float dcandidate = dh * (1 - update) * (1 - candidate * candidate);
    const float dreset = dcandidate * b.kept_c[j] * (reset * (1 - reset));
    const float dupdate = dh * (b.before[j] - candidate) * (update * (1 - update));
    b.dgates[j] = b.dstate[j] = dreset;
    b.dgates[n + j] = b.dstate[n + j] = dupdate;
    b.dgates[2 * n + j] = dcandidate;
    b.dstate[2 * n + j] = dcandidate * reset;
    b.carry[j] = dh * update;
  }
}

CLONES void add(const float* x, float* y, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) y[i] += x[i];
}

}  // namespace recurrent_loops

namespace {

using namespace recurrent_loops;

struct Mode {
  const char* name;
  std::int64_t num_gates, num_kept;  // kept: arrays beside the gates
  void (*forward)(const Forward&);
  void (*backward)(const Backward&);
};
const Mode kModes[] = {
    {"tanh", 1, 0, [](const Forward& f) { tanh_forward(f); }, [](const Backward& b) { tanh_backward(b); }},
    {"relu", 1, 0, [](const Forward& f) { relu_forward(f); }, [](const Backward& b) { relu_backward(b); }},
    {"lstm", 4, 2, [](const Forward& f) { lstm_forward(f); }, [](const Backward& b) { lstm_backward(b); }},
    {"gru", 3, 1, [](const Forward& f) { gru_forward(f); }, [](const Backward& b) { gru_backward(b); }},
};

class Buffer {
 public:
  explicit Buffer(std::int64_t count) : block_(std::size_t(count) * sizeof(float)), count_(count) {}
  float* data() const { return static_cast<float*>(block_.data()); }
  void zero() const { std::fill_n(data(), count_, 0.0f); }

 private:
  PoolBlock block_;
  std::int64_t count_;
};

// The sizes of a call, and where each cell has its weights and what it keeps.
struct Stack {
  const Mode* mode;
  std::int64_t steps, batch, input, hidden, layers, directions;
  bool has_bias;

  std::int64_t rows() const { return mode->num_gates * hidden; }
  std::int64_t width() const { return directions * hidden; }
  std::int64_t cells() const { return layers * directions; }
  std::int64_t states() const { return batch * hidden; }  // elements of one cell's
  bool is_lstm() const { return mode->num_gates == 4; }
  std::int64_t input_of(std::int64_t layer) const { return layer == 0 ? input : width(); }
  std::int64_t num_matrices(std::int64_t layers) const {  // elements, of the first layers
    const std::int64_t first = layers == 0 ? 0 : rows() * (input + hidden);
    return directions * (first + std::max<std::int64_t>(layers - 1, 0) * rows() * (width() + hidden));
  }
  std::int64_t num_weights() const { return num_matrices(layers) + (has_bias ? 2 * cells() * rows() : 0); }
  std::int64_t num_kept(std::int64_t cells) const {
    return cells * steps * batch * (rows() + mode->num_kept * hidden);
  }
  std::int64_t num_reserved() const { return num_kept(cells()) + (layers - 1) * steps * batch * width(); }
};

template <class T>
struct Cell {
  T *w_x, *w_h, *b_x, *b_h;  // no biases: null
};

template <class T>
Cell<T> cell_of(const Stack& s, T* weights, std::int64_t layer, std::int64_t direction) {
  const std::int64_t number = layer * s.directions + direction, columns = s.input_of(layer);
  T* const w_x = weights + s.num_matrices(layer) + direction * s.rows() * (columns + s.hidden);
  T* const biases = s.has_bias ? weights + s.num_matrices(s.layers) + 2 * number * s.rows() : nullptr;
  return {w_x, w_x + s.rows() * columns, biases, biases ? biases + s.rows() : nullptr};
}

// What a cell keeps, each (steps, batch, ...); null where its mode has none.
struct Kept {
  float *gates, *c, *tanh_c;
};

Kept kept_of(const Stack& s, float* reserve, std::int64_t number) {
  float* const gates = reserve + s.num_kept(number);
  float* const c = gates + s.steps * s.batch * s.rows();
  return {gates, s.mode->num_kept > 0 ? c : nullptr,
          s.mode->num_kept > 1 ? c + s.steps * s.states() : nullptr};
}

// The output of a layer, which is the input of the next: the last one's is y.
template <class T>
T* output_of(const Stack& s, float* reserve, T* y, std::int64_t layer) {
  return layer == s.layers - 1 ? y : reserve + s.num_kept(s.cells()) + layer * s.steps * s.batch * s.width();
}

// The part of an array that a mode may not have.
float* part_of(float* array, std::int64_t offset) { return array ? array + offset : nullptr; }

template <class Body>
void for_sequences(const Stack& s, const Body& body) {
  parallel_for(std::size_t(s.batch), std::size_t(8 * s.rows()), [&](std::size_t begin, std::size_t end) {
    for (auto row = std::int64_t(begin); row < std::int64_t(end); ++row) body(row);
  });
}

bool run_cell(const Stack& s, const Cell<const float>& cell, const float* x, std::int64_t columns, const float* h0,
              const float* c0, const Kept& kept, float* y, std::int64_t direction, float* h, float* c) {
  const std::int64_t rows = s.rows(), hidden = s.hidden, count = s.states();
  const bool is_gru = s.mode->num_gates == 3;
  const Buffer product(s.batch * rows), bias(rows), state_bias(hidden);
  bias.zero();
  state_bias.zero();
  if (s.has_bias) {
    add(cell.b_x, bias.data(), std::size_t(rows));
    add(cell.b_h, bias.data(), std::size_t(is_gru ? 2 * hidden : rows));  // a GRU's last is multiplied by r first
    if (is_gru) add(cell.b_h + 2 * hidden, state_bias.data(), std::size_t(hidden));
  }
  std::copy_n(h0, count, h);
  if (c0) std::copy_n(c0, count, c);
  if (!matmul({1, s.steps * s.batch, rows, columns, false, true}, x, cell.w_x, kept.gates)) return false;
  for (std::int64_t i = 0; i < s.steps; ++i) {
    const std::int64_t t = direction ? s.steps - 1 - i : i;
    if (!matmul({1, s.batch, rows, hidden, false, true}, h, cell.w_h, product.data())) return false;
    for_sequences(s, [&](std::int64_t row) {
      const std::int64_t at = t * s.batch + row, state = row * hidden;
      s.mode->forward({std::size_t(hidden), kept.gates + at * rows, product.data() + row * rows, bias.data(),
                       state_bias.data(), h + state, c + state, part_of(kept.c, at * hidden), part_of(kept.tanh_c, at * hidden),
                       h + state, c + state, y + at * s.width()});
    });
  }
  return true;
}

struct ForwardArrays {
  const float *x, *w, *h0, *c0;
  float *y, *h, *c, *reserve;  // reserve may be null
};

bool forward(const Stack& s, const ForwardArrays& a) {
  const Buffer scratch(a.reserve ? 0 : s.num_reserved()), cell_state(a.c ? 0 : s.states());  // the latter for an LSTM alone
  float* const reserve = a.reserve ? a.reserve : scratch.data();
  for (std::int64_t layer = 0; layer < s.layers; ++layer) {
    const float* const x = layer == 0 ? a.x : output_of(s, reserve, a.y, layer - 1);
    for (std::int64_t direction = 0; direction < s.directions; ++direction) {
      const std::int64_t number = layer * s.directions + direction, state = number * s.states();
      float* const y = output_of(s, reserve, a.y, layer) + direction * s.hidden;
      float* const c = a.c ? a.c + state : cell_state.data();
      if (!run_cell(s, cell_of(s, a.w, layer, direction), x, s.input_of(layer), a.h0 + state,
                    a.c0 ? a.c0 + state : nullptr, kept_of(s, reserve, number), y, direction, a.h + state, c))
        return false;
    }
  }
  return true;
}

struct BackwardArrays {
  const float *dy, *dh, *dc, *x, *w, *h0, *c0, *y;
  float *dw, *dh0, *dc0, *reserve, *dx;  // dx may be null
};

// One cell: the gradients of its weights and first state, and that of its input, which replaces dx or is added to it.
bool run_cell_back(const Stack& s, const BackwardArrays& a, std::int64_t layer, std::int64_t direction, const float* x,
                   const float* y, const float* dy, float* dx) {
  const std::int64_t number = layer * s.directions + direction, state = number * s.states(), hidden = s.hidden;
  const std::int64_t rows = s.rows(), length = s.steps * s.batch, columns = s.input_of(layer);
  const Kept kept = kept_of(s, a.reserve, number);
  const Cell<const float> cell = cell_of(s, a.w, layer, direction);
  const Cell<float> grads = cell_of(s, a.dw, layer, direction);
  const bool is_gru = s.mode->num_gates == 3;
  const Buffer dgates(length * rows), of_state(is_gru ? length * rows : 0), before(length * hidden);
  const Buffer product(s.states()), carry(s.states()), no_cell_state(s.is_lstm() ? 0 : s.states());
  float* const dstate = is_gru ? of_state.data() : dgates.data();
  float* const dc = s.is_lstm() ? a.dc0 + state : no_cell_state.data();
  std::copy_n(a.dh + state, s.states(), carry.data());
  product.zero();
  if (s.is_lstm()) std::copy_n(a.dc + state, s.states(), dc);
  for (std::int64_t i = s.steps; i-- > 0;) {
    const std::int64_t t = direction ? s.steps - 1 - i : i, earlier = direction ? t + 1 : t - 1;
    for_sequences(s, [&](std::int64_t row) {
      const std::int64_t at = t * s.batch + row, at_state = row * hidden;
      const float* const h = i == 0 ? a.h0 + state + at_state : y + (earlier * s.batch + row) * s.width();
      std::copy_n(h, hidden, before.data() + at * hidden);
      const float* c_before = nullptr;
      if (s.is_lstm()) c_before = i == 0 ? a.c0 + state + at_state : kept.c + (earlier * s.batch + row) * hidden;
      s.mode->backward({std::size_t(hidden), kept.gates + at * rows, dy + at * s.width(), product.data() + at_state, h,
                        part_of(kept.c, at * hidden), part_of(kept.tanh_c, at * hidden), c_before, carry.data() + at_state, dc + at_state,
                        dgates.data() + at * rows, dstate + at * rows});
    });
    if (!matmul({1, s.batch, hidden, rows, false, false}, dstate + t * s.batch * rows, cell.w_h, product.data()))
      return false;
  }
  std::copy_n(product.data(), s.states(), a.dh0 + state);
  add(carry.data(), a.dh0 + state, std::size_t(s.states()));
  if (!matmul({1, rows, columns, length, true, false}, dgates.data(), x, grads.w_x)) return false;
  if (!matmul({1, rows, hidden, length, true, false}, dstate, before.data(), grads.w_h)) return false;
  if (s.has_bias) {
    const SummedAxes axes{{std::size_t(length), std::size_t(rows)}, 0};
    sum(dgates.data(), grads.b_x, axes, 1);
    sum(dstate, grads.b_h, axes, 1);
  }
  if (!dx) return true;
  const Buffer second(direction ? length * columns : 0);
  float* const to = direction ? second.data() : dx;
  if (!matmul({1, length, columns, rows, false, false}, dgates.data(), cell.w_x, to)) return false;
  if (direction) add(to, dx, std::size_t(length * columns));
  return true;
}

bool backward(const Stack& s, const BackwardArrays& a) {
  const std::int64_t length = s.steps * s.batch;
  std::unique_ptr<Buffer> above;  // the gradient of the output of the layer that is next
  for (std::int64_t layer = s.layers; layer-- > 0;) {
    const float* const x = layer == 0 ? a.x : output_of(s, a.reserve, a.y, layer - 1);
    const float* const y = output_of(s, a.reserve, a.y, layer);
    const float* const dy = above ? above->data() : a.dy;
    auto below = layer > 0 ? std::make_unique<Buffer>(length * s.width()) : nullptr;
    for (std::int64_t direction = 0; direction < s.directions; ++direction) {
      const std::int64_t part = direction * s.hidden;
      if (!run_cell_back(s, a, layer, direction, x, y + part, dy + part, below ? below->data() : a.dx)) return false;
    }
    above = std::move(below);
  }
  return true;
}

// ---- calls -----------------------------------------------------------------------------------------------------------

// The stack of a call whose input is `x` and whose weights have so many elements, or nothing.
std::optional<Stack> stack_of(const Call& call, const View& x, const View& w) {
  const auto mode = call.words.find("mode");
  if (mode == call.words.end() || !call.words.count("lengths")) return {};  // lengths that are not None are numbers
  const char* const numbers[] = {"hidden_size", "num_layers", "bidirectional", "bias"};
  std::int64_t values[4];
  if (call.attributes.size() != 6 || x.ndim() != 3 || x.size() == 0) return {};
  for (int i = 0; i < 4; ++i) {
    const auto found = call.attributes.find(numbers[i]);
    if (found == call.attributes.end() || found->second.size() != 1) return {};
    values[i] = std::int64_t(found->second[0]);
  }
  const auto found = std::find_if(std::begin(kModes), std::end(kModes), [&](const Mode& m) { return mode->second == m.name; });
  if (found == std::end(kModes) || values[0] < 1 || values[1] < 1) return {};
  const Stack s{found, x.shape[0], x.shape[1], x.shape[2], values[0], values[1], values[2] ? 2 : 1, values[3] != 0};
  return w.size() == std::size_t(s.num_weights()) ? std::optional(s) : std::nullopt;
}

// Whether these arrays, each float32 and row-major, have so many elements.
bool have_sizes(const std::vector<View>& arrays, std::size_t first, std::initializer_list<std::int64_t> sizes) {
  for (const std::int64_t size : sizes) {
    if (first >= arrays.size() || !arrays[first].is_floats() || arrays[first].size() != std::size_t(size)) return false;
    ++first;
  }
  return true;
}

bool is_reserve(const Stack& s, const View& reserve) {
  return reserve.is_row_major && reserve.size() == std::size_t(s.num_reserved()) * sizeof(float) &&
         reinterpret_cast<std::uintptr_t>(reserve.data) % alignof(float) == 0;
}

bool are_writeable(const std::vector<View>& outputs) {
  return std::all_of(outputs.begin(), outputs.end(), [](const View& view) { return view.is_writeable; });
}

const Registration register_forward("recurrent", [](const Call& call) -> Step {
  const auto &in = call.inputs, &out = call.outputs;
  if (in.size() < 3 || !in[0].is_floats() || !in[1].is_floats() || !are_writeable(out)) return {};
  const auto stack = stack_of(call, in[0], in[1]);
  if (!stack) return {};
  const Stack& s = *stack;
  const std::size_t states = s.is_lstm() ? 2 : 1;
  const std::int64_t each = s.cells() * s.states();
  if (in.size() != 2 + states || !have_sizes(in, 2, {each}) || (states == 2 && !have_sizes(in, 3, {each}))) return {};
  if (out.size() < 1 + states || out.size() > 2 + states || !have_sizes(out, 0, {s.steps * s.batch * s.width(), each})) return {};
  if (states == 2 && !have_sizes(out, 2, {each})) return {};
  const bool keeps = out.size() == 2 + states;
  if (keeps && !is_reserve(s, out.back())) return {};
  const ForwardArrays arrays{in[0].floats(), in[1].floats(), in[2].floats(), states == 2 ? in[3].floats() : nullptr,
                  out[0].floats(), out[1].floats(), states == 2 ? out[2].floats() : nullptr,
                  keeps ? out.back().floats() : nullptr};
  return [s, arrays] { return forward(s, arrays); };
});

const Registration register_backward("recurrent_backward", [](const Call& call) -> Step {
  const auto &in = call.inputs, &out = call.outputs;
  const std::size_t states = call.words.count("mode") && call.words.at("mode") == "lstm" ? 2 : 1;
  if (in.size() != 4 + 2 * states || !are_writeable(out)) return {};
  const View &x = in[1 + states], &w = in[2 + states];
  const auto stack = x.is_floats() && w.is_floats() ? stack_of(call, x, w) : std::nullopt;
  if (!stack) return {};
  const Stack& s = *stack;
  const std::int64_t each = s.cells() * s.states(), of_y = s.steps * s.batch * s.width();
  if (!have_sizes(in, 0, {of_y, each}) || !have_sizes(in, 3 + states, {each}) || !have_sizes(in, 3 + 2 * states, {of_y})) return {};
  if (states == 2 && (!have_sizes(in, 2, {each}) || !have_sizes(in, 6, {each}) || !have_sizes(out, 2, {each}))) return {};
  const bool has_dx = out.size() == 3 + states;
  if (out.size() < 2 + states || out.size() > 3 + states || !have_sizes(out, 0, {s.num_weights(), each})) return {};
  if (!is_reserve(s, out[1 + states]) || (has_dx && !have_sizes(out, 2 + states, {std::int64_t(x.size())}))) return {};
  const bool is_lstm = states == 2;
  const BackwardArrays arrays{in[0].floats(), in[1].floats(), is_lstm ? in[2].floats() : nullptr, x.floats(), w.floats(),
                      in[3 + states].floats(), is_lstm ? in[6].floats() : nullptr, in[3 + 2 * states].floats(),
                      out[0].floats(), out[1].floats(), is_lstm ? out[2].floats() : nullptr, out[1 + states].floats(),
                      has_dx ? out[2 + states].floats() : nullptr};
  return [s, arrays] { return backward(s, arrays); };
});

}  // namespace
}  // namespace singa_lite
#endif
