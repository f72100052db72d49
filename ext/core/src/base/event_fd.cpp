// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "base/event_fd.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace kvstrata {

EventFd::~EventFd() {
  if (fd_ >= 0) ::close(fd_);
}

Status EventFd::open() noexcept {
  fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return fd_ < 0 ? Status(StatusCode::kOsError, "eventfd: cannot create", errno) : Status();
}

void EventFd::signal() const noexcept {
  const std::uint64_t one = 1;
  // The write fails only when the counter is at its limit; the descriptor is readable then.
  [[maybe_unused]] const ssize_t written = ::write(fd_, &one, sizeof one);
}

void EventFd::drain() const noexcept {
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t taken = ::read(fd_, &count, sizeof count);
}

}  // namespace kvstrata
