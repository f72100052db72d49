// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/backing.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

namespace kvstrata {

namespace {

// 0 or errno. A file system that cannot reserve says so and is left as it is.
int reserve(int fd, std::uint64_t offset, std::uint64_t length) noexcept {
  int failed = 0;
  do {
    failed =
        fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(length)) == 0 ? 0 : errno;
  } while (failed == EINTR);
  return failed == EOPNOTSUPP || failed == ENOSYS ? 0 : failed;
}

}  // namespace

void Backing::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Status Backing::attach(int fd, std::uint64_t bytes) noexcept {
  struct stat info{};
  struct statfs system{};
  if (fstat(fd, &info) != 0 || fstatfs(fd, &system) != 0)
    return Status(StatusCode::kOsError, "fstat of a pool file failed", errno);
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) return Status(StatusCode::kOsError, "a descriptor cannot be duplicated", errno);
  bytes_ = bytes;
  steps_ = (bytes + kStepBytes - 1) / kStepBytes;
  there_.reset(new (std::nothrow) std::atomic<std::uint64_t>[(steps_ + 63) / 64]());
  if (there_ == nullptr) return Status(StatusCode::kOsError, "no memory", ENOMEM);
  // Mapping a file of huge pages has reserved them all, on the nodes that the mapping names;
  // fallocate would not know these.
  if (system.f_type == HUGETLBFS_MAGIC || static_cast<std::uint64_t>(info.st_blocks) * 512 >= bytes)
    mark_all();
  return Status();
}

void Backing::mark_all() noexcept {
  for (std::uint64_t word = 0; word < (steps_ + 63) / 64; ++word)
    there_[word].store(~0ULL, std::memory_order_release);
  there_bytes_.store(bytes_, std::memory_order_relaxed);
}

bool Backing::is_step_there(std::uint64_t step) const noexcept {
  return (there_[step / 64].load(std::memory_order_acquire) >> (step % 64) & 1) != 0;
}

bool Backing::is_there(std::uint64_t offset, std::uint64_t length) const noexcept {
  for (std::uint64_t step = offset / kStepBytes; step * kStepBytes < offset + length; ++step) {
    if (!is_step_there(step)) return false;
  }
  return true;
}

// Two threads may reserve one step at a time; one of them counts it.
bool Backing::reserve_step(std::uint64_t step) noexcept {
  const std::uint64_t begin = step * kStepBytes;
  const std::uint64_t length = std::min(kStepBytes, bytes_ - begin);
  const int failed = reserve(fd_, begin, length);
  if (failed != 0) {
    error_.store(failed, std::memory_order_release);
    return false;
  }
  const std::uint64_t bit = 1ULL << (step % 64);
  if ((there_[step / 64].fetch_or(bit, std::memory_order_acq_rel) & bit) == 0)
    there_bytes_.fetch_add(length, std::memory_order_relaxed);
  return true;
}

bool Backing::ensure(std::uint64_t offset, std::uint64_t length) noexcept {
  for (std::uint64_t step = offset / kStepBytes; step * kStepBytes < offset + length; ++step) {
    if (!is_step_there(step) && (is_short() || !reserve_step(step))) return false;
  }
  return true;
}

void Backing::try_again() noexcept {
  if (!is_short()) return;
  std::uint64_t step = 0;
  while (step < steps_ && is_step_there(step))
    ++step;
  if (step < steps_ && !reserve_step(step)) return;
  error_.store(0, std::memory_order_release);
  error_.notify_all();
}

void Backing::wait_while_short() noexcept {
  int error = error_.load(std::memory_order_acquire);
  while (error != 0 && !stopped_.load(std::memory_order_acquire)) {
    error_.wait(error, std::memory_order_acquire);
    error = error_.load(std::memory_order_acquire);
  }
}

void Backing::stop_waiting() noexcept {
  stopped_.store(true, std::memory_order_release);
  // A waiter looks at the error alone, so it has to change.
  if (is_short()) error_.store(ECANCELED, std::memory_order_release);
  error_.notify_all();
}

}  // namespace kvstrata
