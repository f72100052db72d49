// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "memory/backing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "support/check.h"

using kvstrata::Backing;

namespace {

constexpr std::uint64_t kStep = Backing::kStepBytes;
constexpr std::uint64_t kSteps = 4;
constexpr int kRounds = 50;

struct SparseFile {
  int fd = memfd_create("backing_test", MFD_CLOEXEC);

  SparseFile() { CHECK_EQ(ftruncate(fd, kSteps * kStep), 0); }
  ~SparseFile() { close(fd); }
  SparseFile(const SparseFile&) = delete;
  SparseFile& operator=(const SparseFile&) = delete;
};

// Two threads ensure each step of the file at the same time; returns how many of their calls were
// refused.
int refused_by_two_threads(Backing& backing) {
  std::atomic<int> refused{0};
  std::barrier together(2);
  const auto work = [&] {
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      together.arrive_and_wait();
      if (!backing.ensure(step * kStep, kStep)) refused.fetch_add(1);
    }
  };
  std::thread other(work);
  work();
  other.join();
  return refused.load();
}

}  // namespace

TEST(two_threads_at_one_step_are_both_served_up_to_the_last_step) {
  for (int round = 0; round < kRounds; ++round) {
    SparseFile file;
    Backing backing;
    CHECK_OK(backing.attach(file.fd, kSteps * kStep));
    CHECK_EQ(refused_by_two_threads(backing), 0);
    CHECK_EQ(backing.backed_bytes(), kSteps * kStep);
  }
}
