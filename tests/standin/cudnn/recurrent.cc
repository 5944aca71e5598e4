// SPDX-License-Identifier: Apache-2.0
// Recurrent layers, one sequence, one step, one gate at a time. -DSTANDIN_RNN_GAP=n leaves n elements between weights
// and puts the biases first, as another cuDNN might.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "standin.h"

#ifndef STANDIN_RNN_GAP
#define STANDIN_RNN_GAP 0
#endif

using namespace standin;

namespace {

using Values = std::vector<double>;
enum { kRelu, kTanh, kLstm, kGru };

int last_math = -1;

template <int number>
struct Descriptor {
  static constexpr int kKind = 100 + number;
  int kind = kKind;
};

struct Dropout : Descriptor<0> {
  float ratio = -1;
};

struct Data : Descriptor<1> {
  int dtype = -1, layout = -1, steps = 0, batch = 0, features = 0;
  std::vector<int> lengths;
  bool has_padding = false;
  double padding = 0;

  bool varies() const { return std::any_of(lengths.begin(), lengths.end(), [&](int n) { return n != steps; }); }
  // Where step t of sequence n lies, in vectors.
  std::size_t row(int t, int n) const {
    if (layout == 0) return std::size_t(t) * batch + n;
    std::size_t before = 0;
    for (int length : lengths) before += std::min(length, t);
    return before + n;
  }
  std::size_t count() const {
    std::size_t rows = 0;
    for (int length : lengths) rows += layout == 0 ? steps : length;
    return rows * features;
  }
};

struct Rnn : Descriptor<2> {
  int mode = -1, bias = 0, directions = 1, dtype = -1, math = 0, input = 0, hidden = 0, layers = 0;
  unsigned padded = 0;

  int gates() const { return mode == kLstm ? 4 : mode == kGru ? 3 : 1; }
  int cells() const { return layers * directions; }
  int columns(int cell, int number) const {
    return number >= gates() ? hidden : cell / directions == 0 ? input : directions * hidden;
  }
  // First element of a matrix or bias; of what comes after the last one for cell = cells().
  std::size_t place(bool is_bias, int cell, int number) const {
    std::size_t at = 0;
    const bool biases_first = STANDIN_RNN_GAP > 0;
    for (bool kind : {biases_first, !biases_first})
      for (int c = 0; c < cells(); ++c)
        for (int i = 0; i < 2 * gates(); ++i) {
          if (kind && bias == 0) continue;
          if (kind == is_bias && c == cell && i == number) return at;
          at += (kind ? 1 : columns(c, i)) * std::size_t(hidden) + STANDIN_RNN_GAP;
        }
    return at;
  }
  std::size_t weights() const { return place(false, cells(), 0); }
};

template <class T>
int make(T** object, const char* name) {
  if (const int status = counted(name)) return status;
  ++live;
  *object = new T;
  return kSuccess;
}

template <class T>
int drop(T* object) {
  --live;
  delete object;
  return kSuccess;
}

Object array_of(int dtype, std::size_t count) {
  Object o{kTensor, dtype};
  o.shape[0] = int(count);
  o.shape[1] = o.shape[2] = o.shape[3] = 1;
  return o;
}
Values load(int dtype, std::size_t count, const void* data) {
  return data == nullptr ? Values(count) : read(array_of(dtype, count), data);
}
void store(int dtype, const Values& values, void* data) {
  if (data != nullptr) write(array_of(dtype, values.size()), values, data);
}

double sigmoid(double a) { return 1 / (1 + std::exp(-a)); }

// What one step of one cell leaves for the way back, in the reserve.
struct Step {
  double *gates, *state_part, *h, *c, *h_before, *c_before, *grads, *state_grads;
};
// Vectors of `hidden` doubles in a Step.
int step_size(const Rnn& rnn) { return 4 * rnn.gates() + 4; }

struct Reserve {
  double* memory;
  const Rnn& rnn;
  const Data& x;
  Step step(int cell, int t, int n) const {
    const std::size_t hidden = rnn.hidden, wide = rnn.gates() * hidden;
    double* at = memory + 1 + ((std::size_t(cell) * x.steps + t) * x.batch + n) * step_size(rnn) * hidden;
    return {at, at + wide, at + 4 * wide, at + 4 * wide + hidden, at + 4 * wide + 2 * hidden,
            at + 4 * wide + 3 * hidden, at + 2 * wide, at + 3 * wide};
  }
};
std::size_t reserve_bytes(const Rnn& rnn, const Data& x) {
  return 8 * (1 + std::size_t(rnn.cells()) * x.steps * x.batch * step_size(rnn) * rnn.hidden);
}
std::size_t workspace_bytes(const Rnn& rnn, const Data& x) { return 64 + 8 * std::size_t(x.batch) * rnn.hidden; }
enum Phase { kForwardDone = 71, kDataDone = 72, kUsedUp = 73 };

// The real library notices nothing and computes nonsense.
void require_phase(const Reserve& reserve, Phase phase) {
  if (reserve.memory[0] == phase) return;
  std::fprintf(stderr, "the reserve of a recurrent layer is used in a wrong order\n");
  std::abort();
}

int check(const Object* handle, const Rnn& rnn, const Data& x, const Data& y, const Object& h, const Object* c) {
  if (handle->stream == nullptr) return fail(kBadParam, "no stream is set");
  if (rnn.kind != Rnn::kKind || x.kind != Data::kKind || y.kind != Data::kKind || h.kind != kTensor)
    return fail(kBadParam, "kind of descriptor");
  if (rnn.dtype != x.dtype || x.dtype != y.dtype || h.dtype != x.dtype) return fail(kBadParam, "dtypes");
  if (x.layout != y.layout || x.steps != y.steps || x.batch != y.batch || x.lengths != y.lengths)
    return fail(kBadParam, "x and y differ");
  if (x.layout == 0 && rnn.padded == 0) return fail(kNotSupported, "unpacked data without padded io");
  if (x.features != rnn.input || y.features != rnn.directions * rnn.hidden) return fail(kBadParam, "features");
  if (h.shape[0] != rnn.cells() || h.shape[1] != x.batch || h.shape[2] != rnn.hidden || h.shape[3] != 1)
    return fail(kBadParam, "shape of the states");
  if (rnn.mode == kLstm && c != &h) return fail(kBadParam, "descriptor of c");
  last_math = rnn.math;
  return kSuccess;
}

int check_memory(const Rnn& rnn, const Data& x, std::size_t weight_bytes, void* workspace, std::size_t bytes,
                 std::initializer_list<const void*> arrays) {
  if (weight_bytes < rnn.weights() * size_of(rnn.dtype)) return fail(kBadParam, "size of the weights");
  if (workspace == nullptr || bytes < workspace_bytes(rnn, x)) return fail(kTooSmall, "workspace");
  for (const void* data : arrays)
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return fail(kMisaligned, "alignment");
  return kSuccess;
}

struct Network {
  const Rnn& rnn;
  const Data& x;
  const Values& weights;
  const Reserve& reserve;

  const double* matrix(int cell, int number) const { return &weights[rnn.place(false, cell, number)]; }
  double bias(int cell, int number, int unit) const {
    return rnn.bias ? weights[rnn.place(true, cell, number) + unit] : 0;
  }
  // Step t of a layer's input: x, or what the layer below gave.
  Values input(const Values& xs, int layer, int t, int n) const {
    Values values;
    if (layer == 0) {
      const double* from = &xs[x.row(t, n) * x.features];
      values.assign(from, from + x.features);
    }
    for (int d = 0; layer > 0 && d < rnn.directions; ++d) {
      const double* from = reserve.step((layer - 1) * rnn.directions + d, t, n).h;
      values.insert(values.end(), from, from + rnn.hidden);
    }
    return values;
  }
  // One step from the state (h, c) to the next.
  void forward(int cell, const Values& in, const Step& step, Values& h, Values& c) const {
    const int hidden = rnn.hidden, gates = rnn.gates();
    std::copy(h.begin(), h.end(), step.h_before);
    std::copy(c.begin(), c.end(), step.c_before);
    for (int g = 0; g < gates; ++g)
      for (int u = 0; u < hidden; ++u) {
        double a = bias(cell, g, u), b = bias(cell, gates + g, u);
        for (std::size_t k = 0; k < in.size(); ++k) a += matrix(cell, g)[u * in.size() + k] * in[k];
        for (int k = 0; k < hidden; ++k) b += matrix(cell, gates + g)[u * hidden + k] * step.h_before[k];
        step.gates[g * hidden + u] = a;
        step.state_part[g * hidden + u] = b;
      }
    for (int u = 0; u < hidden; ++u) {
      const auto sum = [&](int g) { return step.gates[g * hidden + u] + step.state_part[g * hidden + u]; };
      const auto gate = [&](int g) -> double& { return step.gates[g * hidden + u]; };
      if (rnn.mode == kRelu) h[u] = gate(0) = std::max(sum(0), 0.0);
      if (rnn.mode == kTanh) h[u] = gate(0) = std::tanh(sum(0));
      if (rnn.mode == kLstm) {  // i f g o
        for (int g : {0, 1, 3}) gate(g) = sigmoid(sum(g));
        gate(2) = std::tanh(sum(2));
        c[u] = gate(1) * c[u] + gate(0) * gate(2);
        h[u] = gate(3) * std::tanh(c[u]);
      }
      if (rnn.mode == kGru) {  // r i h
        for (int g : {0, 1}) gate(g) = sigmoid(sum(g));
        gate(2) = std::tanh(gate(2) + gate(0) * step.state_part[2 * hidden + u]);
        h[u] = (1 - gate(1)) * gate(2) + gate(1) * h[u];
      }
      step.h[u] = h[u];
      step.c[u] = c[u];
    }
  }
  // From grads of the state after a step to those of its gates and of the state before it.
  void backward(int cell, const Step& step, Values& dh, Values& dc) const {
    const int hidden = rnn.hidden, gates = rnn.gates();
    Values before(hidden);
    for (int u = 0; u < hidden; ++u) {
      const auto gate = [&](int g) { return step.gates[g * hidden + u]; };
      const auto grad = [&](int g) -> double& { return step.grads[g * hidden + u]; };
      const auto curved = [&](int g) { return gate(g) * (1 - gate(g)); };
      if (rnn.mode == kRelu) grad(0) = gate(0) > 0 ? dh[u] : 0;
      if (rnn.mode == kTanh) grad(0) = dh[u] * (1 - gate(0) * gate(0));
      if (rnn.mode == kLstm) {
        const double tanh_c = std::tanh(step.c[u]);
        dc[u] += dh[u] * gate(3) * (1 - tanh_c * tanh_c);
        grad(0) = dc[u] * gate(2) * curved(0);
        grad(1) = dc[u] * step.c_before[u] * curved(1);
        grad(2) = dc[u] * gate(0) * (1 - gate(2) * gate(2));
        grad(3) = dh[u] * tanh_c * curved(3);
        dc[u] *= gate(1);
      }
      if (rnn.mode == kGru) {
        grad(2) = dh[u] * (1 - gate(1)) * (1 - gate(2) * gate(2));
        grad(1) = dh[u] * (step.h_before[u] - gate(2)) * curved(1);
        grad(0) = grad(2) * step.state_part[2 * hidden + u] * curved(0);
        before[u] = dh[u] * gate(1);
      }
      for (int g = 0; g < gates; ++g)
        step.state_grads[g * hidden + u] = grad(g) * (rnn.mode == kGru && g == 2 ? gate(0) : 1);
    }
    for (int g = 0; g < gates; ++g)
      for (int u = 0; u < hidden; ++u)
        for (int k = 0; k < hidden; ++k)
          before[k] += step.state_grads[g * hidden + u] * matrix(cell, gates + g)[u * hidden + k];
    dh = before;
  }
};

Values part(const Values& values, std::size_t start, int count) {
  return Values(values.begin() + start, values.begin() + start + count);
}

}  // namespace

extern "C" {

int standin_cudnn_recurrent_math() { return last_math; }

int cudnnCreateRNNDescriptor(Rnn** o) { return make(o, "cudnnCreateRNNDescriptor"); }
int cudnnCreateRNNDataDescriptor(Data** o) { return make(o, "cudnnCreateRNNDataDescriptor"); }
int cudnnCreateDropoutDescriptor(Dropout** o) { return make(o, "cudnnCreateDropoutDescriptor"); }
int cudnnDestroyRNNDescriptor(Rnn* o) { return drop(o); }
int cudnnDestroyRNNDataDescriptor(Data* o) { return drop(o); }
int cudnnDestroyDropoutDescriptor(Dropout* o) { return drop(o); }

int cudnnSetTensorNdDescriptor(Object* o, int dtype, int axes, const int* shape, const int* strides) {
  if (o->kind != kTensor || dtype < 0 || dtype > 2 || axes < 3 || axes > 4) return fail(kBadParam, "tensor");
  *o = Object{kTensor, dtype};
  o->shape[3] = 1;
  int expected = 1;
  for (int i = axes - 1; i >= 0; --i) {
    if (shape[i] < 1 || strides[i] != expected) return fail(kBadParam, "shape or strides");
    expected *= o->shape[i] = shape[i];
  }
  return counted("cudnnSetTensorNdDescriptor");
}
int cudnnSetDropoutDescriptor(Dropout* o, Object* handle, float ratio, void* states, std::size_t bytes,
                              unsigned long long) {
  if (o->kind != Dropout::kKind || handle->kind != kHandle) return fail(kBadParam, "dropout");
  if (ratio != 0 && (states == nullptr || bytes == 0)) return fail(kBadParam, "dropout without states");
  o->ratio = ratio;
  return counted("cudnnSetDropoutDescriptor");
}
int cudnnSetRNNDescriptor_v8(Rnn* o, int algorithm, int mode, int bias, int directions, int input_mode, int dtype,
                             int compute, int math, std::int32_t input, std::int32_t hidden, std::int32_t projected,
                             std::int32_t layers, Dropout* dropout, std::uint32_t flags) {
  if (o->kind != Rnn::kKind || dropout == nullptr || dropout->kind != Dropout::kKind) return fail(kBadParam, "rnn");
  if (dropout->ratio != 0) return fail(kBadParam, "dropout");
  if (algorithm != 0 || mode < 0 || mode > 3 || (bias != 0 && bias != 2) || directions < 0 || directions > 1)
    return fail(kNotSupported, "algorithm, mode, bias or direction");
  if (input_mode != 0 || dtype < 0 || dtype > 2 || compute != (dtype == 1 ? 1 : 0) || math < 0 || math > 3)
    return fail(kNotSupported, "input mode or types");
  if (input < 1 || hidden < 1 || layers < 1 || projected != hidden || flags > 1) return fail(kBadParam, "sizes");
  o->mode = mode;
  o->bias = bias;
  o->directions = 1 + directions;
  o->dtype = dtype;
  o->math = math;
  o->input = input;
  o->hidden = hidden;
  o->layers = layers;
  o->padded = flags;
  return counted("cudnnSetRNNDescriptor_v8");
}
int cudnnSetRNNDataDescriptor(Data* o, int dtype, int layout, int steps, int batch, int features, const int* lengths,
                              void* padding) {
  if (o->kind != Data::kKind || dtype < 0 || dtype > 2 || layout < 0 || layout > 1) return fail(kBadParam, "data");
  if (steps < 1 || steps > 65535 || batch < 1 || features < 1 || lengths == nullptr) return fail(kBadParam, "sizes");
  o->lengths.assign(lengths, lengths + batch);
  if (*std::max_element(lengths, lengths + batch) != steps) return fail(kBadParam, "no sequence has all steps");
  if (*std::min_element(lengths, lengths + batch) < 1) return fail(kBadParam, "a length");
  if (layout == 1 && !std::is_sorted(o->lengths.rbegin(), o->lengths.rend())) return fail(kBadParam, "order");
  o->dtype = dtype;
  o->layout = layout;
  o->steps = steps;
  o->batch = batch;
  o->features = features;
  o->has_padding = padding != nullptr;
  if (padding != nullptr) o->padding = load(dtype, 1, padding)[0];
  return counted("cudnnSetRNNDataDescriptor");
}

int cudnnGetRNNWeightSpaceSize(Object*, Rnn* rnn, std::size_t* bytes) {
  *bytes = rnn->weights() * size_of(rnn->dtype);
  return counted("cudnnGetRNNWeightSpaceSize");
}
int cudnnGetRNNWeightParams(Object*, Rnn* rnn, std::int32_t cell, std::size_t bytes, const void* weights,
                            std::int32_t number, Object* matrix, void** matrix_data, Object* bias, void** bias_data) {
  if (cell < 0 || cell >= rnn->cells() || number < 0 || number >= 2 * rnn->gates()) return fail(kBadParam, "number");
  if (matrix->kind != kTensor || bias->kind != kTensor || bytes != rnn->weights() * size_of(rnn->dtype))
    return fail(kBadParam, "descriptors or size");
  char* const base = const_cast<char*>(static_cast<const char*>(weights));
  *matrix_data = base + rnn->place(false, cell, number) * size_of(rnn->dtype);
  *bias_data = rnn->bias ? base + rnn->place(true, cell, number) * size_of(rnn->dtype) : nullptr;
  return counted("cudnnGetRNNWeightParams");
}
int cudnnGetRNNTempSpaceSizes(Object*, Rnn* rnn, int training, Data* x, std::size_t* workspace, std::size_t* reserve) {
  if (rnn->dtype != x->dtype || rnn->input != x->features) return fail(kBadParam, "x");
  *workspace = workspace_bytes(*rnn, *x);
  *reserve = training ? reserve_bytes(*rnn, *x) : 0;
  return counted("cudnnGetRNNTempSpaceSizes");
}

int cudnnRNNForward(Object* handle, Rnn* rnn, int training, const std::int32_t*, Data* x, const void* x_data, Data* y,
                    void* y_data, Object* h, const void* h0, void* hy, Object* c, const void* c0, void* cy,
                    std::size_t weight_bytes, const void* weights, std::size_t workspace_size, void* workspace,
                    std::size_t reserve_size, void* reserve) {
  if (const int status = counted("cudnnRNNForward")) return status;
  if (const int status = check(handle, *rnn, *x, *y, *h, c)) return status;
  if (const int status = check_memory(*rnn, *x, weight_bytes, workspace, workspace_size,
                                      {x_data, y_data, h0, hy, c0, cy, weights, reserve}))
    return status;
  if (training ? reserve == nullptr || reserve_size < reserve_bytes(*rnn, *x) : reserve_size != 0 || reserve != nullptr)
    return fail(kBadParam, "reserve");
  return start(handle, [=, rnn = *rnn, x = *x, y = *y, h = *h] {
    std::memset(workspace, 0xff, workspace_size);
    Values own(training ? 0 : reserve_bytes(rnn, x) / 8);
    const Reserve kept{training ? static_cast<double*>(reserve) : own.data(), rnn, x};
    std::fill_n(kept.memory, reserve_bytes(rnn, x) / 8, 0.0);
    kept.memory[0] = kForwardDone;
    const std::size_t states = count(h);
    const int hidden = rnn.hidden;
    const Values xs = load(x.dtype, x.count(), x_data), ws = load(x.dtype, rnn.weights(), weights);
    Values hs = load(x.dtype, states, h0), cs = load(x.dtype, states, c0);
    Values ys = y.has_padding ? Values(y.count(), y.padding) : load(y.dtype, y.count(), y_data);
    const Network network{rnn, x, ws, kept};
    for (int cell = 0; cell < rnn.cells(); ++cell)
      for (int n = 0; n < x.batch; ++n) {
        const int layer = cell / rnn.directions, direction = cell % rnn.directions, end = x.lengths[n];
        const std::size_t at = (std::size_t(cell) * x.batch + n) * hidden;
        Values h_now = part(hs, at, hidden), c_now = part(cs, at, hidden);
        for (int i = 0; i < end; ++i) {
          const int t = direction == 0 ? i : end - 1 - i;
          network.forward(cell, network.input(xs, layer, t, n), kept.step(cell, t, n), h_now, c_now);
          if (layer == rnn.layers - 1)
            std::copy(h_now.begin(), h_now.end(), &ys[y.row(t, n) * y.features + direction * hidden]);
        }
        std::copy(h_now.begin(), h_now.end(), &hs[at]);
        std::copy(c_now.begin(), c_now.end(), &cs[at]);
      }
    store(x.dtype, ys, y_data);
    store(x.dtype, hs, hy);
    if (rnn.mode == kLstm) store(x.dtype, cs, cy);
  });
}

int cudnnRNNBackwardData_v8(Object* handle, Rnn* rnn, const std::int32_t*, Data* y, const void*, const void* dy, Data* x,
                            void* dx, Object* h, const void*, const void* dhy, void* dh0, Object* c, const void*,
                            const void* dcy, void* dc0, std::size_t weight_bytes, const void* weights,
                            std::size_t workspace_size, void* workspace, std::size_t reserve_size, void* reserve) {
  if (const int status = counted("cudnnRNNBackwardData_v8")) return status;
  if (const int status = check(handle, *rnn, *x, *y, *h, c)) return status;
  if (const int status = check_memory(*rnn, *x, weight_bytes, workspace, workspace_size,
                                      {dy, dx, dhy, dh0, dcy, dc0, weights, reserve}))
    return status;
  if (reserve_size < reserve_bytes(*rnn, *x) || dx == nullptr) return fail(kBadParam, "reserve or dx");
  return start(handle, [=, rnn = *rnn, x = *x, y = *y, h = *h] {
    std::memset(workspace, 0xff, workspace_size);
    const Reserve kept{static_cast<double*>(reserve), rnn, x};
    require_phase(kept, kForwardDone);
    kept.memory[0] = kDataDone;
    const std::size_t states = count(h);
    const int hidden = rnn.hidden, directions = rnn.directions;
    const Values ws = load(x.dtype, rnn.weights(), weights);
    Values dhs = load(x.dtype, states, dhy), dcs = load(x.dtype, states, dcy);
    Values dys = load(x.dtype, y.count(), dy);  // of the outputs of the layer that is next
    Values dxs = load(x.dtype, x.count(), dx);
    const Network network{rnn, x, ws, kept};
    for (int layer = rnn.layers - 1; layer >= 0; --layer) {
      const int width = rnn.columns(layer * directions, 0);
      Values din(x.count() / x.features * width);
      for (int direction = 0; direction < directions; ++direction)
        for (int n = 0; n < x.batch; ++n) {
          const int cell = layer * directions + direction, end = x.lengths[n];
          const std::size_t at = (std::size_t(cell) * x.batch + n) * hidden;
          Values dh = part(dhs, at, hidden), dc = part(dcs, at, hidden);
          for (int i = end - 1; i >= 0; --i) {
            const int t = direction == 0 ? i : end - 1 - i;
            const Step step = kept.step(cell, t, n);
            for (int u = 0; u < hidden; ++u)
              dh[u] += dys[x.row(t, n) * directions * hidden + direction * hidden + u];
            network.backward(cell, step, dh, dc);
            for (int g = 0; g < rnn.gates(); ++g)
              for (int u = 0; u < hidden; ++u)
                for (int k = 0; k < width; ++k)
                  din[x.row(t, n) * width + k] += step.grads[g * hidden + u] * network.matrix(cell, g)[u * width + k];
          }
          std::copy(dh.begin(), dh.end(), &dhs[at]);
          std::copy(dc.begin(), dc.end(), &dcs[at]);
        }
      dys = din;
    }
    for (int n = 0; n < x.batch; ++n)  // behind the ends dx stays as it is
      for (int t = 0; t < x.lengths[n]; ++t)
        std::copy_n(&dys[x.row(t, n) * x.features], x.features, &dxs[x.row(t, n) * x.features]);
    store(x.dtype, dxs, dx);
    store(x.dtype, dhs, dh0);
    if (rnn.mode == kLstm) store(x.dtype, dcs, dc0);
  });
}

int cudnnRNNBackwardWeights_v8(Object* handle, Rnn* rnn, int add, const std::int32_t*, Data* x, const void* x_data,
                               Object* h, const void*, Data* y, const void*, std::size_t weight_bytes, void* dweights,
                               std::size_t workspace_size, void* workspace, std::size_t reserve_size, void* reserve) {
  if (const int status = counted("cudnnRNNBackwardWeights_v8")) return status;
  if (const int status = check(handle, *rnn, *x, *y, *h, h)) return status;
  if (const int status = check_memory(*rnn, *x, weight_bytes, workspace, workspace_size, {x_data, dweights, reserve}))
    return status;
  if (add != 0) return fail(kNotSupported, "gradients are added");
  if (reserve_size < reserve_bytes(*rnn, *x)) return fail(kBadParam, "reserve");
  return start(handle, [=, rnn = *rnn, x = *x] {
    std::memset(workspace, 0xff, workspace_size);
    const Reserve kept{static_cast<double*>(reserve), rnn, x};
    require_phase(kept, kDataDone);
    kept.memory[0] = kUsedUp;
    const int hidden = rnn.hidden, gates = rnn.gates();
    const Values xs = load(x.dtype, x.count(), x_data);
    Values ws = load(x.dtype, rnn.weights(), dweights);
    const Network network{rnn, x, ws, kept};
    for (int cell = 0; cell < rnn.cells(); ++cell)
      for (int n = 0; n < x.batch; ++n)
        for (int t = 0; t < x.lengths[n]; ++t) {
          const Values in = network.input(xs, cell / rnn.directions, t, n);
          const Step step = kept.step(cell, t, n);
          for (int g = 0; g < gates; ++g)
            for (int u = 0; u < hidden; ++u) {
              const double grad = step.grads[g * hidden + u], of_state = step.state_grads[g * hidden + u];
              for (std::size_t k = 0; k < in.size(); ++k) ws[rnn.place(false, cell, g) + u * in.size() + k] += grad * in[k];
              for (int k = 0; k < hidden; ++k)
                ws[rnn.place(false, cell, gates + g) + u * hidden + k] += of_state * step.h_before[k];
              if (rnn.bias == 0) continue;
              ws[rnn.place(true, cell, g) + u] += grad;
              ws[rnn.place(true, cell, gates + g) + u] += of_state;
            }
        }
    store(x.dtype, ws, dweights);
  });
}

}  // extern "C"
