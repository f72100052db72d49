// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The registry at the size of a large cluster, for benchmarks/registry.py:
//
//   registry_table INSTANCES CHUNKS
//
// Each instance reports its chunks in batches of kBatchKeys into two hidden slots, the share
// kL1Share for L1 and the others for disk, and publishes the slots. All instances have the share
// kShared of the chunks in common. The table begins empty, so it grows during the reports. After
// them come reports that replace earlier reports, look-ups, and departures. Prints one line of
// JSON; times are in ns of CPU.
//
// For comparison the program also reads random lines of other memory of the same size, as many as
// it makes look-ups. That part of a look-up's time belongs to the machine.
#include <sys/mman.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "registry/registry.h"

using namespace kvstrata;

namespace {

constexpr std::size_t kBatchKeys = 8192;
constexpr std::size_t kChainKeys = 512;
constexpr double kL1Share = 0.2;
constexpr double kShared = 0.01;
constexpr int kRepeats = 7;
constexpr std::size_t kLookups = 400'000;

// CPU time of this thread, so that the load of other programs does not count.
struct Clock {
  static double now(clockid_t clock = CLOCK_THREAD_CPUTIME_ID) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) * 1e9 + static_cast<double>(time.tv_nsec);
  }
  // CPU time of the registry's own thread, which touches memory before the writer needs it.
  static double touching() { return now(CLOCK_PROCESS_CPUTIME_ID) - now(); }
};

double ns_since(double begin) {
  return Clock::now() - begin;
}

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "registry_table: %s\n", why);
  std::exit(1);
}

void must(const Status& status) {
  if (!status.ok()) fail(status.message());
}

std::uint64_t mixed(std::uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
  number = (number ^ number >> 27) * 0x94d049bb133111eb;
  return number ^ number >> 31;
}

std::uint64_t resident_bytes(const char* field) {
  std::FILE* const status = std::fopen("/proc/self/status", "r");
  char line[256];
  std::uint64_t kb = 0;
  while (std::fgets(line, sizeof line, status) != nullptr) {
    if (std::strncmp(line, field, std::strlen(field)) == 0)
      kb = std::strtoull(line + std::strlen(field) + 1, nullptr, 10);
  }
  std::fclose(status);
  return kb << 10;
}

class Cluster {
 public:
  Cluster(std::uint32_t instances, std::uint32_t chunks) : chunks_(chunks), slots_(instances) {
    must(Registry::create(std::uint64_t{4} << 30, kMaxSlots, &registry_));
    tags_.resize(chunks);
  }

  Registry& registry() { return *registry_; }

  // The tag of chunk `number` of an instance. Common chunks are scattered among the instance's own.
  Tag tag(std::uint32_t instance, std::uint32_t number) const {
    const bool shared = mixed(number) < kShared * 18446744073709551615.0;
    return mixed(std::uint64_t{shared ? 0 : instance + 1} << 32 | number);
  }

  double report(std::uint32_t instance) {
    for (std::uint32_t number = 0; number < chunks_; ++number)
      tags_[number] = tag(instance, number);
    const auto in_l1 = static_cast<std::size_t>(chunks_ * kL1Share);
    const Slots before = slots_[instance];
    const auto begin = Clock::now();
    const Slots now{registry_->open_slot(static_cast<std::uint16_t>(instance)),
                    registry_->open_slot(static_cast<std::uint16_t>(instance))};
    std::uint64_t added = 0;
    for (std::size_t at = 0; at < chunks_;) {
      const bool l1 = at < in_l1;
      const std::size_t count = std::min(kBatchKeys, (l1 ? in_l1 : chunks_) - at);
      must(registry_->admit(l1 ? now.l1 : now.disk, std::span(tags_).subspan(at, count), &added));
      at += count;
    }
    must(registry_->publish(now.l1, before.l1));
    must(registry_->publish(now.disk, before.disk));
    const double took_ns = ns_since(begin);
    if (added != chunks_) fail("a placement was lost");
    slots_[instance] = now;
    return took_ns;
  }

  double depart(std::uint32_t instance) {
    const Tag probe = own_tag(instance);
    std::vector<Slot> holders;
    registry_->lookup(probe, &holders);
    if (holders.size() != 1) fail("a placement is missing");
    holders.clear();
    const auto begin = Clock::now();
    must(registry_->retire(slots_[instance].l1));
    must(registry_->retire(slots_[instance].disk));
    registry_->lookup(probe, &holders);
    const double took_ns = ns_since(begin);
    if (!holders.empty()) fail("a placement is found after its instance has gone");
    slots_[instance] = {};
    return took_ns;
  }

  double sweep() {
    const auto begin = Clock::now();
    while (registry_->sweep(1 << 16) != 0) {
    }
    return ns_since(begin);
  }

  Tag own_tag(std::uint32_t instance) const {
    std::uint32_t number = 0;
    while (tag(instance, number) == tag(instance + 1, number))
      ++number;
    return tag(instance, number);
  }

 private:
  struct Slots {
    Slot l1 = kNoSlot;
    Slot disk = kNoSlot;
  };

  std::uint32_t chunks_;
  std::unique_ptr<Registry> registry_;
  std::vector<Slots> slots_;
  std::vector<Tag> tags_;
};

// Random reads of lines, without any table.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes) : lines_(bytes / kLineBytes), mapped_bytes_(bytes + kHuge) {
    void* const mapped = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) fail("no memory");
    const auto begin = (reinterpret_cast<std::uintptr_t>(mapped) + kHuge - 1) / kHuge * kHuge;
    begin_ = reinterpret_cast<std::uint8_t*>(begin);
    ::madvise(begin_, bytes, MADV_HUGEPAGE);
    std::memset(begin_, 0, bytes);
    at_.resize(kLookups);
  }

  double read(std::uint64_t seed) {
    for (std::uint64_t& at : at_)
      at = mixed(seed++) % lines_ * kLineBytes;
    std::uint64_t found = 0;
    const double begin = Clock::now();
    for (const std::uint64_t at : at_)
      found += begin_[at];
    const double took_ns = ns_since(begin) / kLookups;
    if (found != 0) fail("memory is not what was written");
    return took_ns;
  }

 private:
  static constexpr std::uint64_t kLineBytes = 64;
  static constexpr std::uint64_t kHuge = 2 << 20;

  std::uint64_t lines_;
  std::uint64_t mapped_bytes_;
  std::uint8_t* begin_ = nullptr;
  std::vector<std::uint64_t> at_;
};

std::string listed(const std::vector<double>& values) {
  std::string text = "[";
  for (const double value : values)
    text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("usage: registry_table INSTANCES CHUNKS");
  const auto instances = static_cast<std::uint32_t>(std::strtoul(argv[1], nullptr, 10));
  const auto chunks = static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 10));
  if (instances < 2 || chunks < 2 * kChainKeys) fail("too few");
  Cluster cluster(instances, chunks);
  Registry& registry = cluster.registry();
  const std::uint64_t before_bytes = resident_bytes("VmRSS:");

  std::vector<double> filled;
  std::vector<double> touched;
  for (std::uint32_t instance = 0; instance < instances; ++instance) {
    const double before_ns = Clock::touching();
    filled.push_back(cluster.report(instance));
    touched.push_back(Clock::touching() - before_ns);
  }
  const RegistryUsage full = registry.usage();

  std::vector<double> reported;
  std::vector<double> swept;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    reported.push_back(cluster.report(static_cast<std::uint32_t>(repeat) * 2 % instances));
    swept.push_back(cluster.sweep());
  }
  const std::uint64_t peak_bytes = resident_bytes("VmHWM:") - before_bytes;

  Memory memory(registry.usage().bytes);
  std::vector<double> raw;
  std::vector<Tag> tags(kLookups);
  std::vector<Slot> found;
  std::vector<std::size_t> ends;
  std::vector<double> one, batch, prefix;
  std::uint64_t seed = 1;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    raw.push_back(memory.read(seed));
    for (Tag& tag : tags) {
      const std::uint64_t drawn = mixed(seed++);
      tag = cluster.tag(static_cast<std::uint32_t>(drawn % instances),
                        static_cast<std::uint32_t>((drawn >> 32) % chunks));
    }
    found.reserve(kLookups * 4);
    found.clear();
    std::uint64_t hits = 0;
    auto begin = Clock::now();
    for (const Tag tag : tags) {
      found.clear();
      registry.lookup(tag, &found);
      hits += !found.empty();
    }
    one.push_back(ns_since(begin) / kLookups);
    if (hits != kLookups) fail("a placement is missing");

    double spent_ns = 0;
    for (std::size_t at = 0; at + kChainKeys <= kLookups; at += kChainKeys) {
      found.clear();
      ends.clear();
      begin = Clock::now();
      registry.lookup(std::span(tags).subspan(at, kChainKeys), &found, &ends);
      spent_ns += ns_since(begin);
      if (ends.size() != kChainKeys) fail("an answer is missing");
    }
    batch.push_back(spent_ns / static_cast<double>(kLookups / kChainKeys * kChainKeys));

    spent_ns = 0;
    std::vector<Tag> chain(kChainKeys);
    for (std::size_t at = 0; at + kChainKeys <= kLookups; at += kChainKeys) {
      const std::uint64_t drawn = mixed(seed++);
      const auto instance = static_cast<std::uint32_t>(drawn % instances);
      const auto first = static_cast<std::uint32_t>((drawn >> 32) % (chunks - kChainKeys));
      for (std::uint32_t i = 0; i < kChainKeys; ++i)
        chain[i] = cluster.tag(instance, first + i);
      begin = Clock::now();
      const std::vector<Candidate> best = registry.lookup_prefix(std::span(chain), {});
      spent_ns += ns_since(begin);
      if (best.size() != 1 || best[0].chunks != kChainKeys) fail("a prefix is missing");
    }
    prefix.push_back(spent_ns / static_cast<double>(kLookups / kChainKeys * kChainKeys));
  }

  std::vector<double> departed;
  for (std::uint32_t instance = 0; instance < std::min(7u, instances / 2); ++instance)
    departed.push_back(cluster.depart(instance * 2 + 1));
  swept.push_back(cluster.sweep());
  const RegistryUsage last = registry.usage();

  std::printf(
      "{\"fill_ns\": %s, \"touch_ns\": %s, \"one_ns\": %s, "
      "\"batch_ns\": %s, \"prefix_ns\": %s, \"report_ns\": %s, \"sweep_ns\": %s, "
      "\"depart_ns\": %s, \"raw_ns\": %s, \"placements\": %" PRIu64 ", \"shared_tags\": %" PRIu64
      ", \"rebuilds\": %" PRIu64 ", \"refused\": %" PRIu64 ", \"full_bytes\": %" PRIu64
      ", \"registry_bytes\": %" PRIu64 ", \"resident_bytes\": %" PRIu64 "}\n",
      listed(filled).c_str(), listed(touched).c_str(), listed(one).c_str(), listed(batch).c_str(),
      listed(prefix).c_str(), listed(reported).c_str(), listed(swept).c_str(),
      listed(departed).c_str(), listed(raw).c_str(), full.placements, full.shared_tags,
      last.rebuilds, last.refused, full.bytes, last.bytes, peak_bytes);
  return 0;
}
