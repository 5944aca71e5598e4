// SPDX-License-Identifier: Apache-2.0
// Memory that is reused: fresh pages cost several times what a kernel needs to fill them (a 2.9 MB relu: 1.2 ms with,
// 0.2 ms without), and malloc returns large blocks to the system at every step.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>

namespace singa_lite {

// Blocks freed are kept for later requests of their size. In use and kept together the pool holds at most a quarter (or
// kSlack) more than was in use at once since the last release: before a new block would pass that, those unused for
// longest are released. Without the slack a step that needs three large blocks now and ten small ones later would trade
// them at every step.
class MemoryPool {
 public:
  static constexpr std::size_t kAlignment = 64;      // a cache line, and the widest vector
  static constexpr std::size_t kSlack = 16 << 20;  // with it a step of the MNIST CNN at batch 64 takes no new block

  ~MemoryPool();
  void* acquire(std::size_t bytes);  // throws std::bad_alloc
  void release(void* block, std::size_t bytes);
  void release_cached_memory();  // all of it, to the system
  // Between true and false, which nest, a new block has all kept ones released first: for steps that run once.
  void save_memory(bool begins);

  std::size_t bytes_held() const;  // in use and kept

  // What fork() calls before and after, so that a child has the pool as no thread was changing it.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  struct Block {
    std::size_t bytes;
    void* memory;
  };
  std::size_t limit() const;
  void drop_oldest();

  mutable std::mutex mutex_;
  std::deque<Block> kept_;  // in the order they were freed
  std::size_t kept_bytes_ = 0, used_bytes_ = 0, most_used_bytes_ = 0;
  int savers_ = 0;
};

MemoryPool& memory_pool();

// Lets the system take the whole pages among these bytes, which then are zeros (or, in some systems, as before).
void discard_pages(void* memory, std::size_t bytes);

// Bytes of the pool, for as long as this lives; of none data() is null.
class PoolBlock {
 public:
  explicit PoolBlock(std::size_t bytes) : bytes_(bytes), data_(bytes ? memory_pool().acquire(bytes) : nullptr) {}
  ~PoolBlock() {
    if (data_) memory_pool().release(data_, bytes_);
  }
  PoolBlock(const PoolBlock&) = delete;
  PoolBlock& operator=(const PoolBlock&) = delete;
  void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

// At least so many bytes that are the calling thread's until its next call: what one kernel needs while it runs. They are
// grown as needed and kept.
void* thread_scratch(std::size_t bytes);
void release_thread_scratch();  // of the calling thread, to the system

}  // namespace singa_lite
