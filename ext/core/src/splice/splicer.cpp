// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "splice/splicer.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace kvstrata {

namespace {

constexpr std::size_t kReadBytes = 64 << 10;
constexpr std::size_t kSizeLineBytes = 10;  // of a chunk of at most kReadBytes, and some more
constexpr std::string_view kLastChunk = "0\r\n\r\n";
constexpr std::size_t kAfterBytes = 2 + kLastChunk.size();
constexpr int kReadsInTurn = 4;
constexpr int kEventsInRound = 64;
constexpr int kSweepMs = 100;
// A round that takes longer was a pause of the process.
constexpr std::int64_t kPauseNs = 1'000'000'000;
// A new request, which the owner's thread handles, is let in between two tokens of other answers:
// where both want the core, the owner has three quarters of it.
constexpr int kStepsBelow = 5;
constexpr std::uint32_t kHangUp = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
constexpr std::string_view kEvent = "data:";
constexpr std::uintptr_t kClientBit =
    1;  // of an epoll event: the client's socket, not the engine's

std::int64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::uint64_t events_in(const std::uint8_t* body, std::size_t bytes) noexcept {
  std::uint64_t found = 0;
  const std::uint8_t* const end = body + bytes;
  while (const void* at =
             ::memmem(body, static_cast<std::size_t>(end - body), kEvent.data(), kEvent.size())) {
    ++found;
    body = static_cast<const std::uint8_t*>(at) + kEvent.size();
  }
  return found;
}

// Makes a chunk of the `bytes` at `body`, which has kSizeLineBytes before and kAfterBytes behind
// it, and appends the end of the body if it is the `last` one. Returns the chunk's place.
std::span<std::uint8_t> framed(std::uint8_t* body, std::size_t bytes, bool last) noexcept {
  std::uint8_t* begin = body;
  std::uint8_t* end = body + bytes;
  if (bytes > 0) {
    std::array<char, kSizeLineBytes> line{};
    char* at = std::to_chars(line.data(), line.data() + line.size() - 2, bytes, 16).ptr;
    *at++ = '\r';
    *at++ = '\n';
    begin -= at - line.data();
    std::memcpy(begin, line.data(), static_cast<std::size_t>(at - line.data()));
    *end++ = '\r';
    *end++ = '\n';
  }
  if (last) {
    std::memcpy(end, kLastChunk.data(), kLastChunk.size());
    end += kLastChunk.size();
  }
  return {begin, static_cast<std::size_t>(end - begin)};
}

void keep_tail(std::string* tail, const std::uint8_t* body, std::size_t bytes) noexcept {
  const std::size_t kept = std::min(bytes, Splice::kTailBytes);
  tail->append(reinterpret_cast<const char*>(body + bytes - kept), kept);
  if (tail->size() > 2 * Splice::kTailBytes) {
    tail->erase(0, tail->size() - Splice::kTailBytes);
  }
}

}  // namespace

Status Splicer::create(std::vector<std::int64_t> bounds_ns,
                       std::unique_ptr<Splicer>* out) noexcept {
  try {
    std::unique_ptr<Splicer> made(new Splicer(std::move(bounds_ns)));
    made->buffer_.resize(kSizeLineBytes + kReadBytes + kAfterBytes);
    KVSTRATA_RETURN_IF_ERROR(made->wake_.open());
    KVSTRATA_RETURN_IF_ERROR(made->ended_event_.open());
    made->epoll_fd_ = ::epoll_create1(EPOLL_CLOEXEC);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = 0;
    if (made->epoll_fd_ < 0 ||
        ::epoll_ctl(made->epoll_fd_, EPOLL_CTL_ADD, made->wake_.fd(), &event) != 0) {
      return Status(StatusCode::kOsError, "epoll: cannot create", errno);
    }
    made->thread_ = start_thread([splicer = made.get()] { splicer->run(); });
    name_thread(made->thread_, "kv-splice");
    *out = std::move(made);
  } catch (const std::system_error& error) {
    return Status(StatusCode::kOsError, "thread: cannot create", error.code().value());
  }
  return Status();
}

Splicer::~Splicer() {
  close();
  if (epoll_fd_ >= 0) {
    ::close(epoll_fd_);
  }
}

Status Splicer::start(const SpliceOptions& options, std::span<const std::uint8_t> head,
                      std::span<const std::uint8_t> early, std::shared_ptr<Splice>* out,
                      bool* under_way) noexcept {
  *under_way = false;
  if (closing_.load()) {
    return Status(StatusCode::kClosed, "splicer: was closed");
  }
  const auto splice = std::make_shared<Splice>();
  splice->options_ = options;
  splice->id = ++last_id_;
  splice->gaps.resize(bounds_ns_.size() + 1);
  splice->last_ns = splice->heard_ns_ = now_ns();
  std::vector<std::uint8_t> bytes(head.size() + kSizeLineBytes + early.size() + kAfterBytes);
  std::uint8_t* const body = bytes.data() + head.size() + kSizeLineBytes;
  std::ranges::copy(early, body);
  std::size_t used = 0;
  const std::size_t kept = splice->reader_.decode(body, early.size(), &used);
  const bool done = splice->reader_.done();
  splice->exact = done && used == early.size();
  splice->body_bytes = kept;
  keep_tail(&splice->tail, body, kept);
  const std::span<std::uint8_t> chunk = framed(body, kept, done);
  std::uint8_t* const first = chunk.data() - head.size();
  std::ranges::copy(head, first);
  {
    const std::lock_guard lock(mutex_);
    open_.emplace(splice->id, splice);
  }
  *out = splice;
  // Without the lock: what is sent, and what the engine sends, may wake the thread.
  SpliceEnd end = send(*splice, first, head.size() + chunk.size());
  if (end == SpliceEnd::kNone && (done || splice->reader_.broken())) {
    end = done ? SpliceEnd::kDone : SpliceEnd::kNotChunked;
    if (splice->full_ns_ != 0) {
      splice->after_pending_ = std::exchange(end, SpliceEnd::kNone);
    }
  }
  const std::lock_guard lock(mutex_);
  if (end == SpliceEnd::kNone) {
    if (watch(*splice)) {
      *under_way = true;
      if (open_count_.fetch_add(1) == 0) {
        wake_.signal();  // the thread waits without an end
      }
      return Status();
    }
    end = SpliceEnd::kStopped;
  }
  splice->end = end;
  open_.erase(splice->id);
  return Status();
}

// Hands both sockets to the thread, to which the splice belongs from then on; false if the system
// refuses.
bool Splicer::watch(Splice& splice) noexcept {
  splice.watched_ = true;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLET;
  event.data.ptr = &splice;
  if (!watch_client(splice, EPOLL_CTL_ADD)) {
    return false;
  }
  if (::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, splice.options_.engine_fd, &event) == 0) {
    return true;
  }
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, splice.options_.client_fd, nullptr);
  return false;
}

void Splicer::stop(std::uint64_t id) noexcept {
  {
    const std::lock_guard lock(mutex_);
    to_stop_.push_back(id);
  }
  wake_.signal();
}

std::shared_ptr<Splice> Splicer::take_ended() noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_ == nullptr) {
    ended_event_.drain();
    return nullptr;
  }
  std::shared_ptr<Splice> taken = std::move(ended_);
  ended_ = std::move(taken->next_ended_);
  return taken;
}

void Splicer::close() noexcept {
  if (!thread_.joinable()) {
    return;
  }
  closing_.store(true);
  wake_.signal();
  thread_.join();
  for (const auto& [id, splice] : open_) {
    end(*splice, SpliceEnd::kStopped);
  }
  publish();
}

// -- the thread ---------------------------------------------------------------------------------

void Splicer::run() noexcept {
  lower_priority(kStepsBelow);
  std::array<epoll_event, kEventsInRound> events{};
  std::int64_t swept_ns = now_ns();
  while (!closing_.load()) {
    const int wait_ms = open_count_.load() == 0 ? -1 : kSweepMs;
    const std::int64_t round_ns = now_ns();
    const int count = ::epoll_wait(epoll_fd_, events.data(), kEventsInRound, wait_ms);
    for (int i = 0; i < count; ++i) {
      const auto tagged = static_cast<std::uintptr_t>(events[i].data.u64);
      if (tagged == 0) {
        wake_.drain();
        obey();
        continue;
      }
      // Alive until publish(), even if an event before this one has ended it.
      Splice& splice = *reinterpret_cast<Splice*>(tagged & ~kClientBit);
      if (splice.end != SpliceEnd::kNone) {
        continue;
      }
      if ((tagged & kClientBit) == 0) {
        pass(splice, events[i].events);
      } else if ((events[i].events & kHangUp) != 0) {
        end(splice, SpliceEnd::kClientGone);
      } else {
        flush(splice);
      }
    }
    const std::int64_t now = now_ns();
    if (wait_ms >= 0 && now - round_ns >= kPauseNs) {
      forgive(now, now - round_ns);
    }
    if (now - swept_ns >= std::int64_t{kSweepMs} * 1'000'000) {
      swept_ns = now;
      sweep(now);
    }
    publish();
  }
}

// Reads what the engine has sent, and sends it on.
void Splicer::pass(Splice& splice, std::uint32_t flags) noexcept {
  std::uint8_t* const body = buffer_.data() + kSizeLineBytes;
  for (int turn = 0; turn < kReadsInTurn; ++turn) {
    if (splice.end != SpliceEnd::kNone || splice.full_ns_ != 0) {
      return;  // flush() reads on
    }
    const ssize_t got = ::recv(splice.options_.engine_fd, body, kReadBytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    }
    if (got <= 0) {
      end(splice, got == 0 ? SpliceEnd::kEngineClosed : SpliceEnd::kEngineFailed);
      return;
    }
    const std::int64_t now = splice.heard_ns_ = now_ns();
    std::size_t used = 0;
    const std::size_t kept = splice.reader_.decode(body, static_cast<std::size_t>(got), &used);
    const bool done = splice.reader_.done();
    if (kept > 0) {
      count(splice, body, kept, now);
    }
    const std::span<std::uint8_t> chunk = framed(body, kept, done);
    SpliceEnd why = send(splice, chunk.data(), chunk.size());
    if (why == SpliceEnd::kNone && (done || splice.reader_.broken())) {
      splice.exact = done && used == static_cast<std::size_t>(got);
      why = done ? SpliceEnd::kDone : SpliceEnd::kNotChunked;
      if (splice.full_ns_ != 0) {
        splice.after_pending_ = std::exchange(why, SpliceEnd::kNone);
      }
    }
    if (splice.full_ns_ != 0) {
      watch_client(splice, EPOLL_CTL_MOD);
    }
    if (why != SpliceEnd::kNone) {
      end(splice, why);
      return;
    }
    // A short read has emptied the socket; a hang-up shows only at the next read.
    if (static_cast<std::size_t>(got) < kReadBytes && (flags & kHangUp) == 0) {
      return;
    }
  }
  epoll_event event{};  // others get a turn; the change reports again what is still there
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLET;
  event.data.ptr = &splice;
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, splice.options_.engine_fd, &event);
}

// Sends what waits for the client, and then reads on.
void Splicer::flush(Splice& splice) noexcept {
  if (splice.full_ns_ == 0) {
    return;
  }
  const std::string bytes = std::exchange(splice.pending_, {});
  splice.full_ns_ = 0;
  SpliceEnd why = send(splice, reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  watch_client(splice, EPOLL_CTL_MOD);
  if (splice.full_ns_ != 0) {
    return;
  }
  if (why == SpliceEnd::kNone) {
    why = splice.after_pending_;
  }
  if (why != SpliceEnd::kNone) {
    end(splice, why);
    return;
  }
  splice.heard_ns_ = now_ns();
  pass(splice, EPOLLHUP);
}

void Splicer::count(Splice& splice, const std::uint8_t* body, std::size_t bytes,
                    std::int64_t now_ns) const noexcept {
  splice.body_bytes += bytes;
  keep_tail(&splice.tail, body, bytes);
  if (splice.options_.events) {
    if (const std::uint64_t events = events_in(body, bytes)) {
      const std::int64_t gap_ns = now_ns - splice.last_ns;
      const auto bucket = std::lower_bound(bounds_ns_.begin(), bounds_ns_.end(), gap_ns);
      splice.events += events;
      splice.gaps[static_cast<std::size_t>(bucket - bounds_ns_.begin())] += 1;
      splice.gaps_ns += gap_ns;
    }
  }
  splice.last_ns = now_ns;
}

// Sends to the client, and keeps what its socket does not take: then the splice is full. Returns
// why the splice must end, or kNone. REQUIRES: it is not full.
SpliceEnd Splicer::send(Splice& splice, const std::uint8_t* bytes, std::size_t length) noexcept {
  while (length > 0) {
    const ssize_t sent =
        ::send(splice.options_.client_fd, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      bytes += sent;
      length -= static_cast<std::size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      splice.pending_.assign(reinterpret_cast<const char*>(bytes), length);
      splice.full_ns_ = now_ns();
      return SpliceEnd::kNone;
    } else if (errno != EINTR) {
      return SpliceEnd::kClientGone;
    }
  }
  return SpliceEnd::kNone;
}

bool Splicer::watch_client(Splice& splice, int operation) const noexcept {
  epoll_event event{};
  event.events = EPOLLRDHUP | EPOLLET | (splice.full_ns_ != 0 ? EPOLLOUT : 0U);
  event.data.u64 = reinterpret_cast<std::uintptr_t>(&splice) | kClientBit;
  return ::epoll_ctl(epoll_fd_, operation, splice.options_.client_fd, &event) == 0;
}

void Splicer::end(Splice& splice, SpliceEnd why) noexcept {
  splice.end = why;
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, splice.options_.engine_fd, nullptr);
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, splice.options_.client_fd, nullptr);
  splice.pending_ = {};
  splice.next_in_round_ = std::exchange(ended_in_round_, &splice);
}

void Splicer::obey() noexcept {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t id : std::exchange(to_stop_, {})) {
    const auto found = open_.find(id);
    if (found != open_.end() && found->second->watched_ && found->second->end == SpliceEnd::kNone) {
      end(*found->second, SpliceEnd::kStopped);
    }
  }
}

// Puts limits off by a time in which this process did not run: what others sent waits unread.
void Splicer::forgive(std::int64_t now_ns, std::int64_t paused_ns) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, splice] : open_) {
    if (!splice->watched_) {
      continue;
    }
    splice->heard_ns_ = std::min(now_ns, splice->heard_ns_ + paused_ns);
    if (splice->full_ns_ != 0) {
      splice->full_ns_ = std::min(now_ns, splice->full_ns_ + paused_ns);
    }
  }
}

// Ends splices whose engine, or whose client, has done nothing for too long.
void Splicer::sweep(std::int64_t now_ns) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, splice] : open_) {
    if (!splice->watched_ || splice->end != SpliceEnd::kNone) {
      continue;
    }
    if (splice->full_ns_ != 0) {
      if (now_ns - splice->full_ns_ >= splice->options_.stalled_ns) {
        end(*splice, SpliceEnd::kStalled);
      }
    } else if (now_ns - splice->heard_ns_ >= splice->options_.silence_ns) {
      end(*splice, SpliceEnd::kSilent);
    }
  }
}

// Hands the splices that ended in this round to the owner.
void Splicer::publish() noexcept {
  if (ended_in_round_ == nullptr) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    while (ended_in_round_ != nullptr) {
      const auto found = open_.find(ended_in_round_->id);
      ended_in_round_ = ended_in_round_->next_in_round_;
      found->second->next_ended_ = std::move(ended_);
      ended_ = std::move(found->second);
      open_.erase(found);
      open_count_.fetch_sub(1);
    }
  }
  ended_event_.signal();
}

}  // namespace kvstrata
