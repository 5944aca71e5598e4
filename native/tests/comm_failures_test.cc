// SPDX-License-Identifier: Apache-2.0
// How a world ends badly: which ranks report it, in which words, and that neither memory nor a file is left.
#include <fcntl.h>
#include <sys/stat.h>

#include <chrono>
#include <thread>

#include "world.h"

using namespace singa_lite;

namespace {

constexpr std::size_t kFew = 33, kMany = 1000003;

struct Reduction {
  Floats array;
  Request request;
  explicit Reduction(std::size_t count, const char* name = "sum") : array(count, 1, 1.0f) {
    request = {Kind::kAllReduce, ReduceOp::kSum, DType::kFloat32, DType::kFloat32, 0, array.data(), array.data(), count, name};
  }
};

void sum_once(Engine& engine, std::size_t count, const char* name = "sum") {
  Reduction one(count, name);
  finish(engine, *engine.start(one.request));
}

void test_abort_reaches_everyone(std::size_t count) {
  run_world(3, [&](Engine& engine, int rank) {
    sum_once(engine, kFew);
    if (rank == 1) {
      engine.abort("the input is missing");
      CHECK_SAYS(error_of([&] { sum_once(engine, count); }), "broken by an earlier failure");
      return;
    }
    CHECK_SAYS(error_of([&] { sum_once(engine, count); }), "the input is missing");
    CHECK_SAYS(error_of([&] { sum_once(engine, count); }), "broken by an earlier failure");
  });
}

void test_a_killed_rank_is_told_of(std::size_t count) {
  const auto body = [&](Engine& engine, int rank) {
    sum_once(engine, kFew);
    if (rank == 2) kill(getpid(), SIGKILL);
    const std::string text = error_of([&] { sum_once(engine, count); });
    // the second to notice may get it from the first
    CHECK_SAYS(text, "rank 2");
    CHECK_SAYS(text, "died");
  };
  run_world(3, body, {0, 0, kKilled});
}

void test_a_closed_rank_is_told_of() {
  run_world(2, [&](Engine& engine, int rank) {
    sum_once(engine, kFew);
    if (rank == 1) {
      engine.close();
      engine.close();
      CHECK_SAYS(error_of([&] { sum_once(engine, kFew); }), "this communicator is closed");
      engine.abort("too late to matter");
      return;
    }
    CHECK_SAYS(error_of([&] { sum_once(engine, kFew); }), "rank 1");
  });
}

void test_a_late_rank_is_told_of() {
  run_world(
      2,
      [&](Engine& engine, int rank) {
        sum_once(engine, kFew);
        if (rank == 1) {
          sleep(1);
          CHECK_SAYS(error_of([&] {  // what rank 0 posted in time is still good
            for (;;) sum_once(engine, kFew);
          }), "rank 0");
          return;
        }
        CHECK_SAYS(error_of([&] { sum_once(engine, kFew); }), "waited 0.5 s for rank 1");
      },
      {}, 0.5);
}

void test_ranks_that_disagree_are_shown_both_calls() {
  run_world(2, [&](Engine& engine, int rank) {
    const std::string long_name(3000, 'n');  // longer than a descriptor has space for
    sum_once(engine, kFew, long_name.c_str());
    const std::string text = error_of([&] { sum_once(engine, rank == 0 ? 5 : 7, rank == 0 ? "a" : "b"); });
    CHECK_SAYS(text, "float32[5]");
    CHECK_SAYS(text, "float32[7]");
  });
}

// Both names differ in one character, at `at`.
void test_long_names_are_compared_to_their_end(std::size_t at, const std::string& rank_0, const std::string& rank_1) {
  run_world(2, [&](Engine& engine, int rank) {
    std::string name;
    while (name.size() < 2000) name += "layer" + std::to_string(name.size()) + ".W ";
    sum_once(engine, kFew, name.c_str());
    name[at] = rank == 0 ? '<' : '>';
    const std::string text = error_of([&] { sum_once(engine, kFew, name.c_str()); });
    CHECK_SAYS(text, "the ranks disagree: ");
    CHECK_SAYS(text, rank_0);
    CHECK_SAYS(text, rank_1);
    CHECK(text.size() < 1000);
  });
}

void test_close_with_collectives_in_flight(std::size_t count) {
  run_world(2, [&](Engine& engine, int rank) {
    Reduction one(count), two(count);
    if (rank == 0) {
      const auto first = engine.start(one.request), second = engine.start(two.request);
      usleep(20000);
      engine.close();
      CHECK(first->state.load() == 2 && second->state.load() == 2);
      CHECK_SAYS(error_of([&] { finish(engine, *first); }), "closed while a collective was in flight");
      return;
    }
    usleep(60000);
    CHECK_SAYS(error_of([&] {  // what rank 0 posted before it left is still good
      for (;;) sum_once(engine, count);
    }), "rank 0");
  });
}

// A thread waits, another aborts: the waiter fails too, and no memory is used after it was cleared.
void test_abort_by_another_thread(std::size_t count) {
  run_world(2, [&](Engine& engine, int rank) {
    if (rank == 1) {
      std::thread other([&] {
        usleep(30000);
        engine.abort("interrupted");
        engine.abort("twice");
      });
      CHECK_SAYS(error_of([&] {
        for (;;) sum_once(engine, count);
      }), "aborted: interrupted");
      other.join();
      return;
    }
    CHECK_SAYS(error_of([&] {
      for (;;) sum_once(engine, count);
    }), "interrupted");
  });
}

// A thread waits, another closes: the waiter ends with an error before the memory goes.
void test_close_by_another_thread(std::size_t count) {
  run_world(2, [&](Engine& engine, int rank) {
    if (rank == 1) {
      std::thread other([&] {
        usleep(30000);
        engine.close();
      });
      CHECK_SAYS(error_of([&] {
        for (;;) sum_once(engine, count);
      }), "close");
      other.join();
      return;
    }
    CHECK_SAYS(error_of([&] {
      for (;;) sum_once(engine, count);
    }), "rank 1");
  });
}

void test_a_forked_child_is_refused() {
  run_world(1, [&](Engine& engine, int) {
    sum_once(engine, kMany);  // with the thread
    const pid_t child = fork();
    if (child == 0) {
      const bool is_refused = error_of([&] { sum_once(engine, kFew); }).find("made before fork()") != std::string::npos;
      engine.abort("nothing happens");
      engine.close();
      _exit(is_refused ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQUAL(status, 0);
    sum_once(engine, kFew);
  });
}

void test_worlds_that_cannot_gather() {
  for (auto [rank, size] : {std::pair<int, int>{-1, 2}, {2, 2}, {0, 0}, {0, kMaxRanks + 1}})
    CHECK_SAYS(error_of([rank = rank, size = size] { Engine(new_rendezvous_id(), rank, size, 1); }), "is not possible");
  for (const std::string& rendezvous_id : {std::string(), std::string(201, 'x'), std::string("a/b")})
    CHECK_SAYS(error_of([&] { Engine(rendezvous_id, 0, 1, 1); }), "1 to 200 characters");
  CHECK_SAYS(error_of([] { Engine(new_rendezvous_id(), 1, 2, 0.05); }), "was not made by rank 0");

  const std::string rendezvous_id = new_rendezvous_id(), path = "/dev/shm/singa_lite-" + rendezvous_id;
  run_ranks(1, [&](int) {
    Engine engine(rendezvous_id, 0, 2, 0.2);
    CHECK_SAYS(error_of([&] { engine.wait_for_all(); }), "for rank 1 to start");
  });
  CHECK(access(path.c_str(), F_OK) != 0);

  run_ranks(3, [&](int process) {  // one is started with three
    const std::string text = error_of([&] {
      Engine engine(rendezvous_id, process == 2 ? 1 : process, process == 0 ? 2 : 3, 5);
      engine.wait_for_all();
    });
    CHECK_SAYS(text, process == 0 ? "aborted" : "");
  });
  CHECK(access(path.c_str(), F_OK) != 0);

  // a file of the same name that is not a segment: too short, then of another kind
  for (std::size_t bytes : {std::size_t(10), std::size_t(1) << 16}) {
    const int file = open(path.c_str(), O_CREAT | O_RDWR, 0600);
    CHECK(file >= 0);
    const std::string filling(bytes, 'x');
    CHECK(write(file, filling.data(), bytes) == ssize_t(bytes));
    CHECK_SAYS(error_of([&] { Engine(rendezvous_id, 0, 2, 1); }), "exists already");
    CHECK_SAYS(error_of([&] { Engine(rendezvous_id, 1, 2, 0.1); }), bytes == 10 ? "was not filled" : "not a segment");
    CHECK(fchmod(file, 0644) == 0);
    CHECK_SAYS(error_of([&] { Engine(rendezvous_id, 1, 2, 0.1); }), "open to other users");
    CHECK(close(file) == 0 && unlink(path.c_str()) == 0);
  }
}

void test_a_rank_taken_twice() {
  const std::string rendezvous_id = new_rendezvous_id();
  run_ranks(2, [&](int process) {
    if (process == 1) usleep(200000);
    Engine engine(rendezvous_id, 0, 1, 5);
    engine.wait_for_all();
    sum_once(engine, kFew);
  });
}

}  // namespace

int main() {
  for (std::size_t count : {kFew, kMany}) {
    test_abort_reaches_everyone(count);
    test_a_killed_rank_is_told_of(count);
    test_close_with_collectives_in_flight(count);
    for (int repeat = 0; repeat < 10; ++repeat) {
      test_abort_by_another_thread(count);
      test_close_by_another_thread(count);
    }
  }
  test_a_closed_rank_is_told_of();
  test_a_late_rank_is_told_of();
  test_ranks_that_disagree_are_shown_both_calls();
  test_long_names_are_compared_to_their_end(3, "'lay<r0.W layer9.W", "'lay>r0.W layer9.W");
  test_long_names_are_compared_to_their_end(500, "<", ">");
  test_long_names_are_compared_to_their_end(1900, "bytes, which differ after byte 1032) sum", "(20");
  test_a_forked_child_is_refused();
  test_worlds_that_cannot_gather();
  test_a_rank_taken_twice();
}
