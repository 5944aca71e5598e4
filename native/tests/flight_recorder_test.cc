// SPDX-License-Identifier: Apache-2.0
// The flight record: what is written can be read, newer calls take the place of older ones, and damage does no harm.
#include "comm/flight_recorder.h"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "common/error.h"

using namespace singa_lite;
using namespace std::string_literals;

namespace {

Fingerprint call_of(std::uint64_t number, std::size_t name_bytes) {
  return {number, 12, number * 7, 0, 1, 1, 5, 0, std::uint32_t(name_bytes), bits_of(1)};
}

void fill(FlightRecord& record, int rank, std::uint64_t count) {
  record.join(rank, 100 + rank, 10 + rank);
  for (std::uint64_t number = 0; number < count; ++number) {
    const std::string name = "call\0"s + std::to_string(number) + std::string(number % 2 ? 200 : 0, 'x');
    record.start(rank, call_of(number, name.size()), name, {"/a/folder/script.py", int(number), 2, {3, 4}}, double(number));
    if (number + 1 == count) return;
    record.all_there(rank, number, double(number) + 0.25);
    record.end(rank, number, number % 5 ? FlightState::kEnded : FlightState::kFailed, double(number) + 0.5);
  }
}

void what_is_written_can_be_read() {
  FlightFile file(3);
  file.record().describe("an id", "world");
  fill(file.record(), 0, 100);
  fill(file.record(), 2, 3);
  file.record().name_rank(1, 7, 11);
  const FlightReading reading = read_flight(file.memory(), file.bytes());
  CHECK(reading.id == "an id" && reading.title == "world" && reading.ranks.size() == 3);
  CHECK(reading.ranks[1].pid == 7 && reading.ranks[1].world_rank == 11 && reading.ranks[1].joined_s == 0);
  CHECK(reading.ranks[1].calls.empty() && reading.ranks[2].calls.size() == 3);
  const RankReading& rank = reading.ranks[0];
  CHECK(rank.num_calls == 100 && rank.calls.size() == kFlightCalls);
  for (std::size_t i = 0; i < kFlightCalls; ++i) {
    const CallReading& call = rank.calls[i];
    const std::uint64_t number = 100 - kFlightCalls + i;
    CHECK(call.number == number && call.line == int(number) && call.name_hash == number * 7);
    CHECK(call.kind == "all_reduce" && call.op == "mean" && call.dtype == "float32" && call.wire == "bfloat16");
    CHECK(call.file == "/a/folder/script.py" && call.dims == (std::vector<std::uint64_t>{3, 4}));
    CHECK(call.name.substr(0, 7) == "call\0"s + std::to_string(number));
    CHECK(call.name.size() == (number % 2 ? kFlightTextBytes + 3 : 7) && (number % 2 == 0 || call.name.back() == '.'));
    CHECK(call.state == (number == 99 ? FlightState::kStarted : number % 5 ? FlightState::kEnded : FlightState::kFailed));
  }
}

void a_report_is_claimed_once() {
  FlightFile file(1);
  file.record().describe("mine", "world");
  const std::string path = "/proc/self/fd/" + std::to_string(file.descriptor());
  CHECK(!claim_report(path, "another").has_value());
  CHECK(!claim_report("/proc/self/fd/9999", "mine").has_value());
  CHECK(!read_flight(file.memory(), file.bytes()).is_reported);
  CHECK(claim_report(path, "mine") == true);
  CHECK(read_flight(file.memory(), file.bytes()).is_reported);
  CHECK(claim_report(path, "mine") == false);
  CHECK(!file.record().claim_report());
}

void damage_is_an_error_or_a_record() {
  FlightFile file(2);
  file.record().describe("an id", "world");
  fill(file.record(), 0, 70);
  fill(file.record(), 1, 5);
  std::mt19937 random(1);
  int records = 0, errors = 0;
  for (int round = 0; round < 3000; ++round) {
    const std::size_t bytes = round % 4 ? file.bytes() : random() % (file.bytes() + 1);
    // exactly as long as it says, so that the sanitizers see any read beyond
    void* room = nullptr;
    CHECK(posix_memalign(&room, kLine, bytes) == 0);
    const std::unique_ptr<char, decltype(&std::free)> memory(static_cast<char*>(room), &std::free);
    std::memcpy(memory.get(), file.memory(), bytes);
    const std::size_t limit = round % 3 ? bytes : std::min<std::size_t>(bytes, 600);  // the header more often
    for (unsigned i = 0; limit != 0 && i < 1 + random() % 50; ++i) memory.get()[random() % limit] = char(random());
    try {
      const FlightReading reading = read_flight(memory.get(), bytes);
      CHECK(reading.ranks.size() >= 1 && reading.ranks.size() <= 2);
      for (const RankReading& rank : reading.ranks) CHECK(rank.calls.size() <= kFlightCalls);
      ++records;
    } catch (const CommError&) {
      ++errors;
    }
  }
  CHECK(records > 100 && errors > 100);
}

}  // namespace

int main() {
  what_is_written_can_be_read();
  a_report_is_claimed_once();
  damage_is_an_error_or_a_record();
}
