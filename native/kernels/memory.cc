// SPDX-License-Identifier: Apache-2.0
#include "kernels/memory.h"

#include <algorithm>
#include <cstdint>
#include <new>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace singa_lite {
namespace {

constexpr std::size_t kMostBytes = std::size_t(1) << 60;  // more than any machine has

// Sizes have three significant bits, so that blocks fit again; at most 1/8 is lost (and pages never touched cost nothing).
std::size_t rounded(std::size_t bytes) {
  if (bytes > kMostBytes) throw std::bad_alloc();  // or the steps below would overflow
  std::size_t step = MemoryPool::kAlignment;
  while (step * 16 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

#ifdef __linux__
// Large blocks have pages of their own: malloc would put them between others, where freed ones leave holes.
constexpr std::size_t kOwnPages = 1 << 20;

void* allocate(std::size_t bytes) {
  if (bytes < kOwnPages) return ::operator new(bytes, std::align_val_t(MemoryPool::kAlignment));
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void deallocate(void* memory, std::size_t bytes) {
  if (bytes < kOwnPages) ::operator delete(memory, std::align_val_t(MemoryPool::kAlignment));
  else munmap(memory, bytes);
}
#else
void* allocate(std::size_t bytes) { return ::operator new(bytes, std::align_val_t(MemoryPool::kAlignment)); }
void deallocate(void* memory, std::size_t) { ::operator delete(memory, std::align_val_t(MemoryPool::kAlignment)); }
#endif

}  // namespace

MemoryPool::~MemoryPool() {
  while (!kept_.empty()) drop_oldest();
}

void MemoryPool::drop_oldest() {
  const Block block = kept_.front();
  deallocate(block.memory, block.bytes);
  kept_bytes_ -= block.bytes;
  kept_.pop_front();
}

std::size_t MemoryPool::limit() const {
  return savers_ ? used_bytes_ : most_used_bytes_ + std::max(kSlack, most_used_bytes_ / 4);
}

void* MemoryPool::acquire(std::size_t bytes) {
  const std::size_t size = rounded(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  // the one freed last is most likely in the cache
  const auto fit = std::find_if(kept_.rbegin(), kept_.rend(), [=](const Block& block) { return block.bytes == size; });
  void* memory = nullptr;
  if (fit != kept_.rend()) {
    memory = fit->memory;
    kept_bytes_ -= size;
    kept_.erase(std::prev(fit.base()));
  } else {
    while (!kept_.empty() && used_bytes_ + kept_bytes_ + size > limit()) drop_oldest();
    memory = allocate(size);
  }
  used_bytes_ += size;
  most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
  return memory;
}

void MemoryPool::release(void* block, std::size_t bytes) {
  const std::size_t size = rounded(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  used_bytes_ -= size;
  kept_bytes_ += size;
  kept_.push_back({size, block});
}

void MemoryPool::release_cached_memory() {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!kept_.empty()) drop_oldest();
  most_used_bytes_ = used_bytes_;
#ifdef __GLIBC__
  malloc_trim(0);  // freed memory below what is still in use goes back as well
#endif
}

void MemoryPool::save_memory(bool begins) {
  const std::lock_guard<std::mutex> lock(mutex_);
  savers_ += begins ? 1 : -1;
}

std::size_t MemoryPool::bytes_held() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_bytes_ + kept_bytes_;
}

MemoryPool& memory_pool() {
  static MemoryPool* const pool = new MemoryPool;  // never destroyed: arrays may outlive everything at exit
  static const int registered = pthread_atfork([] { pool->lock_for_fork(); }, [] { pool->unlock_after_fork(); },
                                               [] { pool->unlock_after_fork(); });
  static_cast<void>(registered);
  return *pool;
}

void discard_pages(void* memory, std::size_t bytes) {
#ifdef __linux__
  const auto page = std::uintptr_t(sysconf(_SC_PAGESIZE)), start = std::uintptr_t(memory);
  const std::uintptr_t first = (start + page - 1) / page * page, last = (start + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
  (void)memory, (void)bytes;
#endif
}

namespace {

struct ThreadScratch {
  void* memory = nullptr;
  std::size_t bytes = 0;

  ~ThreadScratch() { release(); }
  void release() {
    if (memory) deallocate(memory, bytes);
    memory = nullptr;
    bytes = 0;
  }
};

thread_local ThreadScratch thread_memory;

}  // namespace

void* thread_scratch(std::size_t bytes) {
  if (bytes > thread_memory.bytes) {
    thread_memory.release();
    thread_memory.memory = allocate(bytes);
    thread_memory.bytes = bytes;
  }
  return thread_memory.memory;
}

void release_thread_scratch() { thread_memory.release(); }

}  // namespace singa_lite
