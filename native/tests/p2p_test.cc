// SPDX-License-Identifier: Apache-2.0
// Messages between workers and servers: order, all sizes, both directions at once, and how a peer's end is reported.
#include <cmath>
#include <memory>
#include <thread>

#include "comm/p2p.h"
#include "world.h"

using namespace singa_lite;

namespace {

constexpr double kForEver = 1e9;
const std::vector<std::pair<int, int>> kJobs = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {3, 1}};  // workers, servers

// Run body(messenger, rank) in every process of a complete job.
void run_job(int workers, int servers, const std::function<void(Messenger&, int)>& body,
             std::vector<int> expected = {}) {
  const std::string rendezvous_id = new_rendezvous_id();
  run_ranks(
      workers + servers,
      [&](int rank) {
        Messenger messenger(rendezvous_id, rank, workers, servers, kTimeoutS);
        messenger.wait_for_all();
        body(messenger, rank);
      },
      std::move(expected));
  CHECK(access(("/dev/shm/singa_lite-" + rendezvous_id).c_str(), F_OK) != 0);
}

// The bytes that `from` sends as the `number`th message.
std::string bytes_of(int from, int number, std::size_t count) {
  Random random(std::uint64_t(from) * 1000 + std::uint64_t(number));
  std::string bytes(count + sizeof(std::uint64_t), '\0');
  for (std::size_t i = 0; i < count; i += sizeof(std::uint64_t)) {
    const std::uint64_t bits = random.bits();
    std::memcpy(&bytes[i], &bits, sizeof bits);
  }
  bytes.resize(count);
  return bytes;
}

Memory memory_of(std::string& bytes) { return {bytes.data(), bytes.size()}; }

std::string read_all(Messenger& messenger, Incoming& message) {
  std::string bytes(message.frame.payload_bytes, '\0');
  const std::size_t half = bytes.size() / 2;  // in two pieces
  messenger.begin_read(message, {{bytes.data(), half}, {bytes.data() + half, bytes.size() - half}});
  CHECK(messenger.read(message, kForEver));
  return bytes;
}

std::vector<int> peers_of(int rank, int workers, int servers) {
  std::vector<int> peers;
  for (int peer = rank < workers ? workers : 0; peer < (rank < workers ? workers + servers : workers); ++peer)
    peers.push_back(peer);
  return peers;
}

// Sizes around frames, lines and rings; everything is sent before anything is received.
void test_all_sizes_in_order(int workers, int servers, bool waits_first) {
  run_job(workers, servers, [&](Messenger& messenger, int rank) {
    const std::vector<std::size_t> sizes = {0, 1, 63, 64, 65, 1000, kRingBytes - 200, kRingBytes, 3 * kRingBytes + 7, 0};
    const auto peers = peers_of(rank, workers, servers);
    std::vector<std::shared_ptr<Outgoing>> works;
    std::vector<std::unique_ptr<std::string>> kept;
    for (std::size_t i = 0; i < sizes.size(); ++i)
      for (int peer : peers) {
        kept.push_back(std::make_unique<std::string>(bytes_of(rank * 10 + peer, int(i), sizes[i])));
        std::string& bytes = *kept.back();
        const std::size_t third = bytes.size() / 3;
        works.push_back(messenger.send(peer, std::string(i * i * 997, 'h') + "end",
                                       {{bytes.data(), third}, {nullptr, 0}, {bytes.data() + third, bytes.size() - third}}));
      }
    if (waits_first)
      for (const auto& work : works) CHECK(messenger.wait(*work, kForEver));
    std::vector<std::size_t> next(std::size_t(workers + servers), 0);
    for (std::size_t left = sizes.size() * peers.size(); left > 0;) {
      const auto message = messenger.receive(kForEver);
      std::size_t& number = next[std::size_t(message->source)];
      if (!message->reason.empty()) {  // it has all, and all of its own has come
        CHECK_EQUAL(number, sizes.size());
        continue;
      }
      --left;
      CHECK(message->head == std::string(number * number * 997, 'h') + "end");
      CHECK(read_all(messenger, *message) == bytes_of(message->source * 10 + rank, int(number), sizes[number]));
      ++number;
    }
    for (const auto& work : works) CHECK(messenger.wait(*work, kForEver) && work->is_sent);
  });
}

// A worker that has sent much does not keep another waiting.
void test_turns() {
  int pipe_ends[2];
  CHECK(pipe(pipe_ends) == 0);
  run_job(2, 1, [&](Messenger& messenger, int rank) {
    const int count = rank == 0 ? 100 : 1;
    if (rank != 2) {
      for (int i = 0; i < count; ++i) CHECK(messenger.wait(*messenger.send(2, "few", {}), kForEver));
      CHECK(write(pipe_ends[1], "!", 1) == 1);
      CHECK(!messenger.receive(kForEver)->head.empty());
      return;
    }
    for (int i = 0; i < 2; ++i) {
      char told;
      CHECK(read(pipe_ends[0], &told, 1) == 1);
    }
    int first_of_1 = -1;
    for (int i = 0; i < 101; ++i)
      if (messenger.receive(kForEver)->source == 1) first_of_1 = i;
    CHECK(first_of_1 == 0 || first_of_1 == 1);
    for (int worker : {0, 1}) messenger.send(worker, "bye", {});
  });
}

// Two that only ask whether their messages have been sent.
void test_is_done_moves_both_directions() {
  run_job(1, 1, [&](Messenger& messenger, int rank) {
    std::string bytes = bytes_of(rank, 0, 5 * kRingBytes);
    const auto work = messenger.send(1 - rank, "large", {memory_of(bytes)});
    while (!messenger.is_done(*work)) usleep(100);
    CHECK(work->is_sent);
    const auto message = messenger.receive(kForEver);
    CHECK(read_all(messenger, *message) == bytes_of(1 - rank, 0, 5 * kRingBytes));
  });
}

// Neither reading late nor not at all holds up what comes afterwards.
void test_unread_messages() {
  run_job(1, 2, [&](Messenger& messenger, int rank) {
    std::string bytes = bytes_of(rank, 0, 2 * kRingBytes);
    if (rank != 0) {
      std::vector<std::shared_ptr<Outgoing>> works;
      for (int i = 0; i < 3; ++i) works.push_back(messenger.send(0, std::to_string(i), {memory_of(bytes)}));
      for (const auto& work : works) CHECK(messenger.wait(*work, kForEver));
      return;
    }
    std::vector<std::shared_ptr<Incoming>> messages;
    while (messages.size() < 6) {
      messages.push_back(messenger.receive(kForEver));
      if (!messages.back()->reason.empty()) messages.pop_back();  // of a server that has sent all
    }
    for (auto at = messages.rbegin(); at != messages.rend(); ++at)
      if ((*at)->head != "1") CHECK(read_all(messenger, **at) == bytes_of((*at)->source, 0, 2 * kRingBytes));
  });
}

// After a time-out the arrays are touched no more, the rest is thrown away, and the next message is whole.
void test_an_abandoned_read() {
  int pipe_ends[2];
  CHECK(pipe(pipe_ends) == 0);
  run_job(1, 1, [&](Messenger& messenger, int rank) {
    std::string bytes = bytes_of(1, 0, 3 * kRingBytes);
    if (rank == 1) {
      const auto work = messenger.send(0, "large", {memory_of(bytes)});  // a ring full, the rest when told
      char told;
      CHECK(read(pipe_ends[0], &told, 1) == 1);
      CHECK(messenger.wait(*work, kForEver));
      CHECK(messenger.wait(*messenger.send(0, "next", {memory_of(bytes)}), kForEver));
      return;
    }
    const auto message = messenger.receive(kForEver);
    {
      Array<char> gone(bytes.size());
      messenger.begin_read(*message, {{gone.data(), gone.size()}});
      CHECK(!messenger.read(*message, monotonic_s() + 0.02));
      messenger.abandon_read(*message);
    }
    CHECK(write(pipe_ends[1], "!", 1) == 1);
    const auto next = messenger.receive(kForEver);
    CHECK(next->head == "next" && read_all(messenger, *next) == bytes);
  });
}

// How far a worker gets before it ends, and what the server then has of it.
enum class Stage { kNothing, kMessage, kHead, kPayload };

void test_a_worker_that_ends(Stage stage, bool is_killed, bool reads) {
  run_job(
      2, 1,
      [&](Messenger& messenger, int rank) {
        std::string bytes = bytes_of(0, 0, 8 * kRingBytes), few = "few";
        if (rank == 0) {
          if (stage != Stage::kNothing) CHECK(messenger.wait(*messenger.send(2, "whole", {memory_of(few)}), kForEver));
          if (stage == Stage::kHead) messenger.send(2, bytes, {});  // a head longer than the ring
          if (stage == Stage::kPayload) messenger.send(2, "part", {memory_of(bytes)});
          if (is_killed) kill(getpid(), SIGKILL);
          messenger.leave("the input is missing");
        } else if (rank == 2) {
          int notices = 0, wholes = 0, parts = 0;
          bool is_other_done = false;
          while (notices == 0 || !is_other_done) {
            const auto message = messenger.receive(kForEver);
            if (message->source == 1) {
              CHECK(message->head == "good");
              is_other_done = true;
            } else if (!message->reason.empty()) {
              ++notices;
              CHECK_SAYS(message->reason, is_killed ? "worker 0 (process " : "worker 0 aborted: the input is missing");
              CHECK_SAYS(message->reason, is_killed ? ") died" : "missing");
            } else if (message->head == "whole") {
              ++wholes;
              CHECK(notices == 0 && read_all(messenger, *message) == "few");
            } else {
              CHECK(message->head == "part" && notices == 0);
              ++parts;
              if (!reads) continue;
              messenger.begin_read(*message, {memory_of(bytes)});
              CHECK(messenger.read(*message, kForEver));
              CHECK_SAYS(message->failure, "worker 0");
            }
          }
          CHECK_EQUAL(notices, 1);
          CHECK_EQUAL(wholes, stage == Stage::kNothing ? 0 : 1);
          CHECK_EQUAL(parts, stage == Stage::kPayload ? 1 : 0);
          const auto late = messenger.send(0, "late", {});
          CHECK(late->has_failed);
          CHECK_SAYS(late->failure, "worker 0");
          messenger.send(1, "bye", {});
        } else {
          CHECK(messenger.wait(*messenger.send(2, "good", {}), kForEver));
          CHECK(messenger.receive(kForEver)->head == "bye");
        }
      },
      {is_killed ? kKilled : 0, 0, 0});
}

// A send that waits for somebody who is gone ends with the reason.
void test_sending_to_a_process_that_ends(bool is_killed) {
  run_job(
      1, 1,
      [&](Messenger& messenger, int rank) {
        std::string bytes(8 * kRingBytes, 'x');
        if (rank == 1) {
          messenger.receive(kForEver);
          if (is_killed) kill(getpid(), SIGKILL);
          return;  // closes
        }
        const auto work = messenger.send(1, "large", {memory_of(bytes)});
        CHECK(messenger.wait(*work, kForEver) && work->has_failed && !work->is_sent);
        CHECK_SAYS(work->failure, is_killed ? ") died" : ") has closed its messenger");
      },
      {0, is_killed ? kKilled : 0});
}

void test_leaving_by_another_thread() {
  run_job(1, 1, [&](Messenger& messenger, int rank) {
    if (rank == 0) {
      CHECK_SAYS(messenger.receive(kForEver)->reason, "server 0 aborted: interrupted");
      return;
    }
    std::thread other([&] {
      usleep(20000);  // often in the midst of receive(); at any other time it must end likewise
      messenger.leave("interrupted");
      messenger.leave("twice");
    });
    CHECK_SAYS(error_of([&] { messenger.receive(kForEver); }), "this messenger is closed");
    other.join();
  });
}

void test_a_forked_child_is_refused() {
  run_job(1, 1, [&](Messenger& messenger, int rank) {
    if (rank == 0) {
      const pid_t child = fork();
      if (child == 0) {
        const std::string text = error_of([&] { messenger.send(1, "child", {}); });
        messenger.leave("nothing happens");
        _exit(text.find("made before fork()") == std::string::npos);
      }
      int status = -1;
      CHECK(waitpid(child, &status, 0) == child);
      CHECK_EQUAL(status, 0);
      CHECK(messenger.wait(*messenger.send(1, "parent", {}), kForEver));
      return;
    }
    CHECK(messenger.receive(kForEver)->head == "parent");
    CHECK_SAYS(messenger.receive(kForEver)->reason, "closed");
  });
}

void test_jobs_that_cannot_gather() {
  const std::string rendezvous_id = new_rendezvous_id(), path = "/dev/shm/singa_lite-" + rendezvous_id;
  for (auto [workers, servers] : {std::pair<int, int>{0, 1}, {1, 0}, {100, 100}})
    CHECK_SAYS(error_of([&, w = workers, s = servers] { Messenger(rendezvous_id, 0, w, s, 1); }), "cannot share a host");
  run_ranks(1, [&](int) {
    Messenger messenger(rendezvous_id, 0, 2, 2, 0.05);
    CHECK_SAYS(error_of([&] { messenger.wait_for_all(); }), "for worker 1, server 0, 1 to start");
  });
  CHECK(access(path.c_str(), F_OK) != 0);
  run_ranks(4, [&](int rank) {  // the same number of processes, but other roles
    const std::string text = error_of([&] {
      Messenger messenger(rendezvous_id, rank, rank == 3 ? 3 : 1, rank == 3 ? 1 : 3, kTimeoutS);
      messenger.wait_for_all();
    });
    if (rank == 3) CHECK_SAYS(text, "1 of the 4 processes are workers, not 3");
  });
  CHECK(access(path.c_str(), F_OK) != 0);
}

}  // namespace

int main() {
  for (auto [workers, servers] : kJobs)
    for (bool waits_first : {true, false}) test_all_sizes_in_order(workers, servers, waits_first);
  test_all_sizes_in_order(7, 7, true);
  test_turns();
  test_is_done_moves_both_directions();
  test_unread_messages();
  test_an_abandoned_read();
  for (Stage stage : {Stage::kNothing, Stage::kMessage, Stage::kHead, Stage::kPayload})
    for (bool is_killed : {true, false})
      for (bool reads : {true, false}) test_a_worker_that_ends(stage, is_killed, reads);
  for (bool is_killed : {true, false}) test_sending_to_a_process_that_ends(is_killed);
  for (int repeat = 0; repeat < 5; ++repeat) test_leaving_by_another_thread();
  test_a_forked_child_is_refused();
  test_jobs_that_cannot_gather();
}
