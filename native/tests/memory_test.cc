// SPDX-License-Identifier: Apache-2.0
#include "kernels/memory.h"

#include <new>
#include <thread>
#include <vector>

#include "check.h"

using namespace singa_lite;

namespace {

void test_a_freed_block_comes_again() {
  MemoryPool pool;
  for (std::size_t bytes : {0, 1, 63, 64, 65, 1023, 1025, 100001, 1 << 20}) {
    void* first = pool.acquire(bytes);
    CHECK(std::uintptr_t(first) % MemoryPool::kAlignment == 0);
    std::memset(first, 1, bytes);  // all of it is ours
    pool.release(first, bytes);
    void* second = pool.acquire(bytes);
    CHECK(first == second);
    pool.release(second, bytes);
  }
}

void test_a_block_fits_sizes_near_its_own() {
  MemoryPool pool;
  Random random(71);
  for (int i = 0; i < 2000; ++i) {
    const std::size_t bytes = random.below(std::size_t(1) << random.below(22));
    auto* block = static_cast<char*>(pool.acquire(bytes));
    std::memset(block, i, bytes);
    pool.release(block, bytes);
  }
}

void test_what_is_kept_stays_below_the_limit() {
  MemoryPool pool;
  constexpr std::size_t kMega = 1 << 20;
  std::size_t most_used = 0;
  for (std::size_t mega = 1; mega <= 64; ++mega) {  // every size once: nothing fits again
    void* block = pool.acquire(mega * kMega);
    most_used = std::max(most_used, mega * kMega * 9 / 8);
    CHECK(pool.bytes_held() <= most_used + std::max(MemoryPool::kSlack, most_used / 4) + most_used / 8);
    pool.release(block, mega * kMega);
  }
}

void test_nothing_more_is_kept_while_memory_is_saved() {
  MemoryPool pool;
  constexpr std::size_t kMega = 1 << 20;
  pool.save_memory(true);
  pool.save_memory(true);
  pool.save_memory(false);  // it nests
  for (std::size_t mega = 1; mega <= 16; ++mega) {  // every size once
    pool.release(pool.acquire(mega * kMega), mega * kMega);
    CHECK_EQUAL(pool.bytes_held(), mega * kMega);
  }
  pool.release(pool.acquire(kMega), kMega);  // less than was in use before
  CHECK_EQUAL(pool.bytes_held(), kMega);
  pool.save_memory(false);
  pool.release(pool.acquire(2 * kMega), 2 * kMega);
  CHECK_EQUAL(pool.bytes_held(), 3 * kMega);
}

void test_the_limit_follows_what_was_used_since_the_last_release() {
  MemoryPool pool;
  constexpr std::size_t kMega = 1 << 20;
  pool.release(pool.acquire(256 * kMega), 256 * kMega);
  pool.release_cached_memory();
  for (std::size_t mega = 1; mega <= 8; ++mega) pool.release(pool.acquire(mega * kMega), mega * kMega);
  CHECK(pool.bytes_held() <= 8 * kMega + MemoryPool::kSlack);
}

void test_only_whole_pages_are_discarded() {
  MemoryPool pool;
  constexpr std::size_t kBytes = 1 << 20;
  auto* block = static_cast<unsigned char*>(pool.acquire(kBytes));
  std::memset(block, 7, kBytes);
  discard_pages(block + 1, kBytes - 2);
  CHECK_EQUAL(block[0], 7);
  CHECK_EQUAL(block[kBytes - 1], 7);
#ifdef __linux__
  CHECK_EQUAL(block[kBytes / 2], 0);
#endif
  discard_pages(block, 10);  // less than a page
  CHECK_EQUAL(block[0], 7);
  discard_pages(nullptr, 0);
  pool.release(block, kBytes);
}

void test_what_is_given_back_is_no_longer_held() {
  MemoryPool pool;
  constexpr std::size_t kBytes = 1 << 20;
  void* used = pool.acquire(kBytes);
  pool.release(pool.acquire(2 * kBytes), 2 * kBytes);
  pool.release_cached_memory();
  CHECK_EQUAL(pool.bytes_held(), kBytes);
  pool.release(used, kBytes);
  pool.release_cached_memory();
  CHECK_EQUAL(pool.bytes_held(), std::size_t(0));
}

void test_scratch_grows() {
  void* const small = thread_scratch(1000);
  CHECK(thread_scratch(500) == small);
  std::memset(thread_scratch(1 << 20), 1, 1 << 20);
  CHECK_EQUAL(std::uintptr_t(thread_scratch(1 << 20)) % MemoryPool::kAlignment, 0);
}

void test_too_much_is_bad_alloc_and_changes_nothing() {
  MemoryPool pool;
  void* block = pool.acquire(1000);
  const std::size_t held = pool.bytes_held();
  for (std::size_t bytes : {~std::size_t(0), ~std::size_t(0) - 100, ~std::size_t(0) / 2 + 1, std::size_t(1) << 61}) {
    bool has_thrown = false;
    try {
      pool.acquire(bytes);
    } catch (const std::bad_alloc&) {
      has_thrown = true;
    }
    CHECK(has_thrown);
    CHECK_EQUAL(pool.bytes_held(), held);
  }
  pool.release(block, 1000);
}

void test_threads_share_one_pool() {
  MemoryPool pool;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&pool, t] {
      Random random(72 + std::uint64_t(t));
      for (int i = 0; i < 3000; ++i) {
        const std::size_t bytes = 1 + random.below(5000);
        auto* block = static_cast<unsigned char*>(pool.acquire(bytes));
        std::memset(block, t, bytes);
        if (i % 16 == 0) std::this_thread::yield();
        CHECK_EQUAL(block[0], t);
        CHECK_EQUAL(block[bytes - 1], t);
        pool.release(block, bytes);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  test_a_freed_block_comes_again();
  test_a_block_fits_sizes_near_its_own();
  test_what_is_kept_stays_below_the_limit();
  test_nothing_more_is_kept_while_memory_is_saved();
  test_the_limit_follows_what_was_used_since_the_last_release();
  test_only_whole_pages_are_discarded();
  test_what_is_given_back_is_no_longer_held();
  test_scratch_grows();
  test_too_much_is_bad_alloc_and_changes_nothing();
  test_threads_share_one_pool();
  CHECK(&memory_pool() == &memory_pool());
}
