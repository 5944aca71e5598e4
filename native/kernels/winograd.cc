// SPDX-License-Identifier: Apache-2.0
#include "kernels/winograd.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels/layout.h"
#include "kernels/memory.h"
#include "kernels/onednn.h"
#include "kernels/threads.h"
#include "kernels/winograd_tiles.h"

#ifdef SINGA_LITE_ONEDNN
namespace singa_lite {
namespace {

constexpr std::int64_t kElements = kWinogradElements;
// How many tiles are transformed before they are multiplied: fewer where many threads would fill memory with them.
constexpr std::int64_t kMostTiles = 128, kLeastTiles = 8;
constexpr std::int64_t kMostFloats = 16 << 20;

// Matrices (rows, columns), row by row, one for each element of a tile.
struct TileMatrices {
  std::int64_t rows, columns;
  float* data = nullptr;

  std::int64_t step() const { return rows * columns + 16; }  // else one index of all of them would share a set of a cache
  float* matrix(std::int64_t element) const { return data + element * step(); }
};

// Put them into the calling thread's scratch.
void allocate(std::vector<TileMatrices>* all) {
  std::int64_t floats = 0;
  for (const TileMatrices& matrices : *all) floats += kElements * matrices.step();
  auto* next = static_cast<float*>(thread_scratch(std::size_t(floats) * sizeof(float)));
  for (TileMatrices& matrices : *all) {
    matrices.data = next;
    next += kElements * matrices.step();
  }
}

TiledImages images_of_x(const Conv& c) { return {c.channels, c.height, c.width, c.x_block}; }
TiledImages images_of_y(const Conv& c) { return {c.outputs, c.out_height, c.out_width, c.y_block}; }

// Cut `from` and `to`, which a convolution with so much padding makes of it, into the same tiles.
void cut(const std::int64_t (&padding)[2], TiledImages* from, TiledImages* to) {
  from->rows = to->rows = (to->height + 1) / 2;
  from->columns = to->columns = (to->width + 1) / 2;
  from->first_row = -padding[0];
  from->first_column = -padding[1];
}

std::int64_t num_tiles(const Conv& c, const TiledImages& images) { return c.batch * images.rows * images.columns; }

// c (m, n) = a b, or c += a b. a is (m, k), transposed where transpose_a is 'T'; b is (k, n) likewise. False if it fails.
bool multiply(char transpose_a, char transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const float* a,
              const float* b, bool adds, float* c) {
  return dnnl_sgemm(transpose_a, transpose_b, m, n, k, 1.0f, a, transpose_a == 'T' ? m : k, b, transpose_b == 'T' ? k : n,
                    adds ? 1.0f : 0.0f, c, n) == dnnl_success;
}

// Call body(begin, end) for parts of the filters, which are of kWinogradLanes.
template <class Body>
void for_filters(const TileMatrices& weights, const Body& body) {
  parallel_for(std::size_t(weights.rows * weights.columns / kWinogradLanes), kElements * kWinogradLanes,
               [&](std::size_t begin, std::size_t end) {
                 body(std::int64_t(begin) * kWinogradLanes, std::int64_t(end) * kWinogradLanes);
               });
}

// y = x convolved with w, plus bias; or, where is_rotated, with the filters of w rotated by 180 degrees, from outputs to
// channels.
template <class T>
bool convolve(const Conv& c, const TiledImages& from, const TiledImages& to, bool is_rotated, const T* w, const T* x,
              const float* bias, bool relu, T* y) {
  const std::int64_t tiles = num_tiles(c, to), threads = num_threads();
  const std::int64_t fit = kMostFloats / (threads * kElements * (from.channels + to.channels));
  const std::int64_t most = std::clamp(std::min((tiles + threads - 1) / threads, fit), kLeastTiles, kMostTiles);
  const std::int64_t parts = (tiles + most - 1) / most, shares = std::min(threads, parts);
  std::vector<TileMatrices> all{{c.outputs, c.channels}};
  for (std::int64_t share = 0; share < shares; ++share) all.insert(all.end(), {{most, from.channels}, {most, to.channels}});
  allocate(&all);
  const TileMatrices& weights = all[0];
  for_filters(weights, [&](std::int64_t begin, std::int64_t end) {
    transform_weights(w, is_rotated, begin, end, weights.data, weights.step());
  });
  const auto run_share = [&](std::int64_t share) {
    const TileMatrices &inputs = all[std::size_t(1 + 2 * share)], &sums = all[std::size_t(2 + 2 * share)];
    bool is_done = true;
    for (std::int64_t part = parts * share / shares; part < parts * (share + 1) / shares; ++part) {
      const std::int64_t first = part * most, last = std::min(tiles, first + most);
      transform_images(from, x, first, last, inputs.data, inputs.step());
      for (std::int64_t i = 0; i < kElements; ++i)
        is_done &= multiply('N', is_rotated ? 'N' : 'T', last - first, to.channels, from.channels, inputs.matrix(i),
                            weights.matrix(i), false, sums.matrix(i));
      finish_images(to, sums.data, sums.step(), bias, relu, first, last, y);
    }
    return is_done;
  };
  std::atomic<bool> is_done{true};
  const SignalsBlocked blocked;
  note_parallel_region(num_threads());  // sgemm's, where there is one share
  parallel_for(std::size_t(shares), std::size_t(most * from.channels * to.channels), [&](std::size_t begin, std::size_t end) {
    for (std::size_t share = begin; share < end; ++share)
      if (!run_share(std::int64_t(share))) is_done = false;
  });
  return is_done;
}

template <class T>
bool forward(const Conv& c, const void* x, const void* w, const float* b, void* y) {
  TiledImages from = images_of_x(c), to = images_of_y(c);
  cut(c.padding, &from, &to);
  return convolve(c, from, to, false, static_cast<const T*>(w), static_cast<const T*>(x), b, c.relu, static_cast<T*>(y));
}

template <class T>
bool backward_data(const Conv& c, const void* dy, const void* w, void* dx) {
  TiledImages from = images_of_y(c), to = images_of_x(c);
  cut({2 - c.padding[0], 2 - c.padding[1]}, &from, &to);
  return convolve(c, from, to, true, static_cast<const T*>(w), static_cast<const T*>(dy), nullptr, false, static_cast<T*>(dx));
}

// db += the sums over tiles: those of a tile's four gradients are element 1, 1.
void add_gradients(const TileMatrices& gradients, std::int64_t tiles, float* db) {
  std::vector<float> sums(std::size_t(gradients.columns), 0.0f);
  for (std::int64_t tile = 0; tile < tiles; ++tile)
    for (std::int64_t output = 0; output < gradients.columns; ++output)
      sums[std::size_t(output)] += gradients.matrix(5)[tile * gradients.columns + output];
  for (std::int64_t output = 0; output < gradients.columns; ++output) db[output] += sums[std::size_t(output)];
}

template <class T>
bool backward_weight(const Conv& c, const void* dy, const void* x, float* dw, float* db) {
  TiledImages from = images_of_x(c), to = images_of_y(c);
  cut(c.padding, &from, &to);
  const std::int64_t tiles = num_tiles(c, to), most = std::min(kMostTiles, tiles);
  std::vector<TileMatrices> all{{most, c.channels}, {most, c.outputs}, {c.outputs, c.channels}};
  allocate(&all);
  const TileMatrices &inputs = all[0], &gradients = all[1], &sums = all[2];
  if (db) std::fill(db, db + c.outputs, 0.0f);
  std::atomic<bool> is_done{true};
  const SignalsBlocked blocked;
  note_parallel_region(num_threads());  // sgemm's, where the last products are too few for more threads than one
  for (std::int64_t first = 0; first < tiles; first += most) {
    const std::int64_t count = std::min(most, tiles - first);
    parallel_for(std::size_t(count), std::size_t(kElements * (c.channels + c.outputs)), [&](std::size_t begin, std::size_t end) {
      const auto b = std::int64_t(begin), e = std::int64_t(end);
      transform_images(from, static_cast<const T*>(x), first + b, first + e, inputs.data + b * c.channels, inputs.step());
      transform_gradients(to, static_cast<const T*>(dy), first + b, first + e, gradients.data + b * c.outputs,
                          gradients.step());
    });
    parallel_for(std::size_t(kElements), std::size_t(count * c.channels * c.outputs), [&](std::size_t begin, std::size_t end) {
      for (auto i = std::int64_t(begin); i < std::int64_t(end); ++i)
        if (!multiply('T', 'N', c.outputs, c.channels, count, gradients.matrix(i), inputs.matrix(i), first > 0,
                      sums.matrix(i)))
          is_done = false;
    });
    if (db) add_gradients(gradients, count, db);
  }
  for_filters(sums, [&](std::int64_t begin, std::int64_t end) { finish_weights(sums.data, sums.step(), begin, end, dw); });
  return is_done;
}

// The images of x or y in blocks that tiles can be cut from: they themselves, or a copy.
class Blocked {
 public:
  Blocked(const Image& image, std::int64_t* block, void* data)
      : image_(image), given_(*block), data_(data), is_copy_(*block % kWinogradLanes != 0),
        copy_(is_copy_ ? num_bytes(image) : 0) {
    if (is_copy_) *block = kWinogradLanes;
  }
  void* data() const { return is_copy_ ? copy_.data() : data_; }
  bool read() const { return !is_copy_ || reorder(image_, data_, given_, copy_.data(), kWinogradLanes); }
  bool write() const { return !is_copy_ || reorder(image_, copy_.data(), kWinogradLanes, data_, given_); }

 private:
  static std::size_t num_bytes(const Image& image) {
    return std::size_t(image.batch * image.channels * image.height * image.width) * (image.is_bfloat16 ? 2 : 4);
  }
  Image image_;
  std::int64_t given_;
  void* data_;
  bool is_copy_;
  PoolBlock copy_;
};

Blocked x_of(Conv* c, const void* x) {
  return {{c->batch, c->channels, c->height, c->width, c->is_bfloat16}, &c->x_block, const_cast<void*>(x)};
}
Blocked y_of(Conv* c, const void* y) {
  return {{c->batch, c->outputs, c->out_height, c->out_width, c->is_bfloat16}, &c->y_block, const_cast<void*>(y)};
}

}  // namespace

bool has_winograd(const Conv& c) {
  const auto is = [&](int axis, std::int64_t size, std::int64_t out_size) {
    return c.kernel[axis] == 3 && c.stride[axis] == 1 && c.dilation[axis] == 1 && c.padding[axis] >= 0 &&
           c.padding[axis] <= 2 && out_size == size + 2 * c.padding[axis] - 2;
  };
  return is(0, c.height, c.out_height) && is(1, c.width, c.out_width) && c.groups == 1 &&
         c.channels % kWinogradLanes == 0 && c.outputs % kWinogradLanes == 0;
}

bool winograd_forward(Conv c, const void* x, const void* w, const float* b, void* y) {
  const Blocked from = x_of(&c, x), to = y_of(&c, y);
  const auto run = c.is_bfloat16 ? forward<Bfloat16> : forward<float>;
  return from.read() && run(c, from.data(), w, b, to.data()) && to.write();
}

bool winograd_backward_data(Conv c, const void* dy, const void* w, void* dx) {
  const Blocked from = y_of(&c, dy), to = x_of(&c, dx);
  const auto run = c.is_bfloat16 ? backward_data<Bfloat16> : backward_data<float>;
  return from.read() && run(c, from.data(), w, to.data()) && to.write();
}

bool winograd_backward_weight(Conv c, const void* dy, const void* x, float* dw, float* db) {
  const Blocked gradients = y_of(&c, dy), images = x_of(&c, x);
  const auto run = c.is_bfloat16 ? backward_weight<Bfloat16> : backward_weight<float>;
  return gradients.read() && images.read() && run(c, gradients.data(), images.data(), dw, db);
}

}  // namespace singa_lite
#endif
