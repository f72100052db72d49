// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "memory/backing.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

namespace kvstrata {

namespace {

// Returns 0 or errno. A file system without fallocate reserves nothing, and the result is 0.
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
  backed_ = std::make_unique<std::atomic<std::uint64_t>[]>((steps_ + 63) / 64);
  // The mapping of a file of huge pages has reserved all of them already, on the NUMA nodes of the
  // mapping's policy, which fallocate would not follow.
  if (system.f_type == HUGETLBFS_MAGIC || static_cast<std::uint64_t>(info.st_blocks) * 512 >= bytes)
    mark_all();
  return Status();
}

void Backing::mark_all() noexcept {
  for (std::uint64_t word = 0; word < (steps_ + 63) / 64; ++word)
    backed_[word].store(~0ULL, std::memory_order_release);
  backed_bytes_.store(bytes_, std::memory_order_relaxed);
}

bool Backing::is_step_backed(std::uint64_t step) const noexcept {
  return (backed_[step / 64].load(std::memory_order_acquire) >> (step % 64) & 1) != 0;
}

bool Backing::is_backed(std::uint64_t offset, std::uint64_t length) const noexcept {
  for (std::uint64_t step = offset / kStepBytes; step * kStepBytes < offset + length; ++step) {
    if (!is_step_backed(step)) return false;
  }
  return true;
}

// Waiting for the mutex costs nothing more: the kernel's fallocate locks the file, too.
bool Backing::reserve_step(std::uint64_t step) noexcept {
  const std::scoped_lock lock(reserving_);
  if (is_step_backed(step)) return true;
  const std::uint64_t length = step_bytes(step);
  const int failed = reserve(fd_, step * kStepBytes, length);
  if (failed != 0) {
    error_.store(failed, std::memory_order_release);
    return false;
  }
  backed_[step / 64].fetch_or(1ULL << (step % 64), std::memory_order_acq_rel);
  backed_bytes_.fetch_add(length, std::memory_order_relaxed);
  return true;
}

bool Backing::ensure(std::uint64_t offset, std::uint64_t length) noexcept {
  for (std::uint64_t step = offset / kStepBytes; step * kStepBytes < offset + length; ++step) {
    if (!is_step_backed(step) && (is_short() || !reserve_step(step))) return false;
  }
  return true;
}

void Backing::try_again() noexcept {
  if (!is_short()) return;
  std::uint64_t step = 0;
  while (step < steps_ && is_step_backed(step))
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
  // A waiter wakes only when the error changes.
  if (is_short()) error_.store(ECANCELED, std::memory_order_release);
  error_.notify_all();
}

}  // namespace kvstrata
