// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

namespace singa_lite {

namespace {

constexpr std::size_t kRing = 64;     // more collectives than a step has in flight
constexpr double kLookS = 0.005;      // how soon an error is noticed; each look costs some microseconds
constexpr double kGraceS = 1.0;       // for what a peer gave before it ended
constexpr double kLeaveS = 10.0;      // NCCL's end may wait for peers that are gone
constexpr int kSpins = 1000;          // NCCL mostly takes less than this to put a collective on the stream
constexpr int kDTypes[] = {6, 7, 8, 2, 4, 9};  // ncclFloat16, 32, 64, ncclInt32, 64, ncclBfloat16 for each DType
constexpr int kOps[] = {0, 4, 2, 3, 0};     // ncclSum, Avg, Max, Min for each ReduceOp

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string seconds(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  return (text.back() == '.' ? text.substr(0, text.size() - 1) : text) + " s";
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library, std::shared_ptr<const Driver> driver,
                                   const NcclId& id, int rank, int size, int device, double timeout_s,
                                   const std::vector<std::pair<int, int>>& peers, const NcclCommunicator* parent,
                                   bool is_blocking, const std::function<void()>& interrupt)
    : library_(std::move(library)),
      driver_(std::move(driver)),
      rank_(rank),
      size_(size),
      device_(device),
      timeout_s_(timeout_s),
      context_(driver_->primary_context(device)),
      ring_(kRing),
      peers_(peers) {
  ContextScope scope(*driver_, context_);
  stream_ = parent != nullptr ? parent->stream_ : std::make_shared<Stream>(driver_);
  NcclConfig config;
  config.blocking = is_blocking;
  try {
    library_->check(library_->init(&comm_, size_, id, rank_, &config), where("NCCL's start"));
    settle("NCCL's start", timeout_s_, interrupt);
    watcher_ = std::thread([this] { watch_all(); });
  } catch (...) {
    leave(library_->abort);
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { close(); }

// ---- collectives --------------------------------------------------------------------------------------

std::shared_ptr<NcclOp> NcclCommunicator::start(const NcclRequest& request, CudaStream stream) {
  check();
  ContextScope scope(*driver_, context_);
  const std::string label = std::string(name_of(request.kind)) + " #" + std::to_string(sequence_) + " '" +
                            request.name + "' (" + name_of(request.dtype) + "[" + std::to_string(request.count) + "]" +
                            (request.op == ReduceOp::kNone ? ")" : std::string(", ") + name_of(request.op) + ")");
  if (const int device = driver_->device_of(request.in); device != device_)
    throw CommError(where(label) + ": the array lives on GPU " + std::to_string(device) +
                    ", but this rank's communicator drives GPU " + std::to_string(device_));
  ++sequence_;
  std::shared_ptr<NcclOp> op = next_op(label);
  try {
    op->is_captured = driver_->is_capturing(stream);
    driver_->record(op->ready.get(), stream);
    driver_->wait(stream_->get(), op->ready.get());
    if (request.count > 0) {
      call_nccl(request);
      settle(label, timeout_s_);
    }
    driver_->record(op->ended.get(), stream_->get());
  } catch (const CommError& error) {
    fail(error.what());
  } catch (const std::runtime_error& error) {
    fail(where(label) + ": " + error.what());
  }
  check();
  if (!op->is_captured) keep(op);
  return op;
}

void NcclCommunicator::call_nccl(const NcclRequest& request) {
  const auto& [kind, op, dtype, root, in, out, count, name] = request;
  const int type = kDTypes[std::size_t(dtype)], operation = kOps[std::size_t(op)];
  void* const stream = stream_->get();
  std::lock_guard lock(nccl_);
  if (comm_ == nullptr) return;  // aborted just now; the caller's check() says why
  NcclLibrary::Status status = kNcclSuccess;
  switch (kind) {
    case Kind::kAllReduce: status = library_->all_reduce(in, out, count, type, operation, comm_, stream); break;
    case Kind::kReduce:
      status = library_->reduce(in, rank_ == root ? out : nullptr, count, type, operation, root, comm_, stream);
      break;
    case Kind::kBroadcast: status = library_->broadcast(in, out, count, type, root, comm_, stream); break;
    case Kind::kAllGather: status = library_->all_gather(in, out, count, type, comm_, stream); break;
    case Kind::kReduceScatter:
      status = library_->reduce_scatter(in, out, count, type, operation, comm_, stream);
      break;
  }
  library_->check(status, where(std::string(name_of(kind)) + " #" + std::to_string(sequence_ - 1) + " '" + name + "'"));
}

void NcclCommunicator::wait(const NcclOp& op, CudaStream stream) {
  check();
  ContextScope scope(*driver_, context_);
  driver_->wait(stream, op.ended.get());
}

bool NcclCommunicator::is_done(NcclOp& op) {
  check();
  if (op.is_captured || op.has_ended) return true;
  return driver_->has_happened(op.ended.get());
}

void NcclCommunicator::watch(CudaStream stream, const std::string& name) {
  check();
  ContextScope scope(*driver_, context_);
  std::shared_ptr<NcclOp> op = next_op("'" + name + "'");
  driver_->record(op->ready.get(), stream_->get());
  driver_->record(op->ended.get(), stream);
  keep(std::move(op));
}

std::shared_ptr<NcclOp> NcclCommunicator::next_op(std::string label) {
  std::shared_ptr<NcclOp>& place = ring_[next_++ % kRing];
  if (place.use_count() != 1) place = std::make_shared<NcclOp>(driver_);
  place->label = std::move(label);
  place->running_since_s = 0;
  place->is_captured = place->has_ended = false;
  return place;
}

void NcclCommunicator::keep(std::shared_ptr<NcclOp> op) {
  std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(op));
  if (in_flight_.size() == 1) wake_.notify_one();
}

void NcclCommunicator::settle(const std::string& label, double limit_s, const std::function<void()>& interrupt) {
  const double start_s = now_s();
  for (int turn = 1;; ++turn) {
    const NcclLibrary::Status status = state();
    library_->check(status, where(label));
    if (status != kNcclInProgress) return;
    if (turn <= kSpins) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (interrupt && turn % 100 == 0) interrupt();
    const std::string dead = watcher_.joinable() ? "" : peers_.dead();
    if (!dead.empty()) throw CommError(where(label) + ": " + dead + " died");
    if (now_s() - start_s > limit_s)
      throw CommError(where(label) + ": waited " + seconds(limit_s) +
                      " in NCCL for the other ranks; one is stopped, too slow, or does not make this call");
  }
}

NcclLibrary::Status NcclCommunicator::state() {
  std::lock_guard lock(nccl_);
  NcclLibrary::Status status = kNcclSuccess;
  if (comm_ != nullptr) library_->check(library_->get_async_error(comm_, &status), "ncclCommGetAsyncError");
  return status;
}

// ---- failure and the end ------------------------------------------------------------------------------

void NcclCommunicator::watch_all() {
  try {
    ContextScope scope(*driver_, context_);
    driver_->relax_captures();
    std::unique_lock lock(mutex_);
    while (!is_stopping_ && error_.empty()) {
      if (in_flight_.empty()) {
        wake_.wait(lock);
        continue;
      }
      wake_.wait_for(lock, std::chrono::duration<double>(kLookS));
      const std::string text = trouble();
      if (text.empty()) continue;
      lock.unlock();
      fail(text);
      lock.lock();
    }
  } catch (const std::runtime_error& error) {
    fail(where("watching: ") + error.what());
  }
}

// What is wrong with the oldest collective in flight, "" if nothing; forgets those that have ended.
std::string NcclCommunicator::trouble() {
  while (!in_flight_.empty() && driver_->has_happened(in_flight_.front()->ended.get())) {
    in_flight_.front()->has_ended = true;
    in_flight_.pop_front();
  }
  if (in_flight_.empty()) return "";
  NcclOp& op = *in_flight_.front();
  const NcclLibrary::Status status = state();
  if (status != kNcclSuccess && status != kNcclInProgress) return where(op.label) + ": " + library_->text_of(status);
  if (op.running_since_s == 0 && driver_->has_happened(op.ready.get())) op.running_since_s = now_s();
  if (op.running_since_s == 0) return "";
  if (const std::string dead = peers_.dead(); !dead.empty()) {
    if (dead_since_s_ == 0) dead_since_s_ = now_s();
    if (now_s() - dead_since_s_ > kGraceS) return where(op.label) + ": " + dead + " died";
  }
  if (now_s() - op.running_since_s <= timeout_s_) return "";
  return where(op.label) + ": waited " + seconds(timeout_s_) +
         " in NCCL for the other ranks; one is stopped, too slow, or does not make this call";
}

void NcclCommunicator::check() {
  if (is_usable_ && !is_forked()) return;
  std::lock_guard lock(mutex_);
  if (!error_.empty()) throw CommError(error_);
  if (is_forked())
    throw CommError(where("an NCCL communicator made before fork() is not usable in the child; make the world after"));
  if (is_closed_) throw CommError(where("this communicator is closed"));
}

void NcclCommunicator::fail(const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (!error_.empty()) return;
    error_ = text;
    is_usable_ = false;
    wake_.notify_all();
  }
  leave(library_->abort);
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<NcclOp>& op : in_flight_) op->has_ended = true;
  in_flight_.clear();
}

void NcclCommunicator::abort(const std::string& reason) {
  fail(where("this communicator is broken by an earlier failure: ") + reason);
  close();
}

void NcclCommunicator::close() {
  bool is_idle, is_well;
  {
    std::lock_guard lock(mutex_);
    if (is_closed_) return;
    is_closed_ = is_stopping_ = true;
    is_usable_ = false;
    is_well = error_.empty();
    is_idle = in_flight_.empty();
    wake_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
  if (!is_well) return;  // aborted already
  try {
    ContextScope scope(*driver_, context_);
    if (!is_idle && !peers_.dead().empty()) throw CommError("");
    {
      std::lock_guard lock(nccl_);
      library_->check(library_->finalize(comm_), "ncclCommFinalize");
    }
    settle("NCCL's end", std::min(timeout_s_, kLeaveS));
    leave(library_->destroy);
  } catch (const std::runtime_error&) {  // there is no one left to tell
    leave(library_->abort);
  }
}

// Ends NCCL's communicator in the way given, in a thread that is left to itself if it takes too long.
void NcclCommunicator::leave(NcclLibrary::Status (*how)(NcclHandle)) {
  NcclHandle comm;
  {
    std::lock_guard lock(nccl_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm == nullptr) return;
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> has_left = promise->get_future();
  std::thread([how, comm, promise, driver = driver_, context = context_] {
    try {
      ContextScope scope(*driver, context);
      how(comm);
    } catch (const CudaError&) {  // the GPU is lost, and NCCL's communicator with it
    }
    promise->set_value();
  }).detach();
  has_left.wait_for(std::chrono::duration<double>(std::min(timeout_s_, kLeaveS)));
}

}  // namespace singa_lite
