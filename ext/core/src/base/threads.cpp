// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "base/threads.h"

#include <pthread.h>

#include <cstddef>

namespace kvstrata {

SignalsBlocked::SignalsBlocked() noexcept {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalsBlocked::~SignalsBlocked() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void name_thread(std::thread& thread, const std::string& name) noexcept {
  char text[16];
  const std::size_t length = name.copy(text, sizeof text - 1);
  text[length] = '\0';
  pthread_setname_np(thread.native_handle(), text);
}

}  // namespace kvstrata
