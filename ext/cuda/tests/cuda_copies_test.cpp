// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The copy engine on the simulated driver (tests/harness/cuda_driver). The driver's device memory
// is host memory, so the sanitizers see every access of the copies, and ThreadSanitizer sees every
// checksum that begins before its bytes have arrived.
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "copy_engine.h"
#include "support/check.h"

extern "C" {
void simulated_cuda_set(const char* name, const char* value);
void simulated_cuda_hold(int held);
}

using namespace kvstrata;
using namespace kvstrata::cuda;

namespace {

constexpr auto kLong = std::chrono::seconds(120);
// The first bytes of a fatbin are enough, because the simulated driver brings its own kernels.
const std::string kImage = "\x50\xed\x55\xba";

void check_cuda(const Failure& failure) {
  if (failure) {
    testing::fail(
        __FILE__, __LINE__,
        std::string(failure.call) + " " + failure.text + " " + std::to_string(failure.number));
  }
}

Digest key_of(std::uint64_t chunk) {
  Digest key{};
  std::memcpy(key.data(), &chunk, sizeof chunk);
  return key;
}

// The scale of a number among those of its section.
std::size_t scale_at(const Fp8Shape& shape, std::size_t number) {
  const std::size_t run = std::size_t{shape.dim} * shape.heads;
  return number / (run * shape.tokens) % shape.groups * shape.heads +
         number / shape.dim % shape.heads;
}

// A section of bfloat16 numbers, rounded one number at a time: its scales, then its codes.
void round_section(const Fp8Shape& shape, const unsigned char* section, unsigned char* rounded) {
  std::vector<std::uint16_t> numbers(shape.numbers()), largest(shape.scales());
  std::memcpy(numbers.data(), section, 2 * numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    std::uint16_t& most = largest[scale_at(shape, i)];
    most = std::max(most, fp8::magnitude_of(numbers[i]));
  }
  std::vector<float> scales;
  for (const std::uint16_t most : largest)
    scales.push_back(fp8::scale_of(Fp8Source::kBfloat16, most));
  std::memcpy(rounded, scales.data(), 4 * scales.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const float factor = fp8::factor_of(scales[scale_at(shape, i)]);
    rounded[4 * scales.size() + i] = fp8::encode<Fp8Source::kBfloat16>(numbers[i], factor);
  }
}

void unround_section(const Fp8Shape& shape, const unsigned char* rounded, unsigned char* section) {
  std::vector<float> scales(shape.scales());
  std::memcpy(scales.data(), rounded, 4 * scales.size());
  for (std::size_t i = 0; i < shape.numbers(); ++i) {
    const std::uint8_t code = rounded[4 * scales.size() + i];
    const auto number = fp8::decode<Fp8Source::kBfloat16>(code, scales[scale_at(shape, i)]);
    std::memcpy(section + 2 * i, &number, 2);
  }
}

std::shared_ptr<Device> open_device() {
  std::shared_ptr<Device> device;
  check_cuda(Device::open(0, kImage, "", &device));
  return device;
}

std::shared_ptr<CudaCopyEngine> open_engine(const std::shared_ptr<Device>& device, Way way,
                                            std::size_t queue = 256, bool rounds = false) {
  EngineOptions options;
  options.rounds = rounds;
  options.way = way;
  options.staging_bytes = 32 << 10;
  options.queue = queue;
  Status status;
  std::shared_ptr<CudaCopyEngine> engine;
  check_cuda(CudaCopyEngine::create(device, options, &status, &engine));
  CHECK_OK(status);
  CHECK(engine->way() == way);
  return engine;
}

// Blocks on the device, either of two shapes, or of one shape with finite numbers that are rounded;
// and extents of host memory, which is registered as two regions that meet inside an extent.
struct World {
  static constexpr std::size_t kBlocks = 64;
  static constexpr std::size_t kSections = 5;
  static constexpr std::size_t kChunkBlocks = 6;
  static constexpr std::size_t kExtents = 24;

  std::shared_ptr<Device> device = open_device();
  DeviceAddress memory = 0;
  std::size_t memory_bytes = 0;
  CudaPlan plan;
  std::shared_ptr<const CopyPlan> unrounded;
  std::uint64_t extent_bytes = 0;   // of a record
  std::uint64_t extent_stride = 0;  // from an extent to the next
  unsigned char* extents = nullptr;
  std::vector<std::shared_ptr<HostRegion>> regions;

  explicit World(std::size_t run = 96, bool rounds = false) {
    const CurrentContext current(*device);
    const CopyDim dims[] = {{2, 4 * run}, {3, run + 16}};
    const std::size_t stride = 8 * run;
    memory_bytes = kSections * kBlocks * stride + 64;
    check_cuda(
        Device::check("cuMemAlloc", device->driver().memory_allocate(&memory, memory_bytes)));
    std::mt19937_64 random(run);
    for (std::size_t i = 0; i < memory_bytes; ++i)
      block_bytes()[i] = static_cast<unsigned char>(random() & (rounds ? 0xbf : 0xff));
    std::vector<CopySection> sections;
    for (std::uint32_t s = 0; s < kSections; ++s)
      sections.push_back({memory + s * kBlocks * stride, stride, rounds ? 0 : s % 2});
    std::vector<BlockShape> shapes(rounds ? 1 : 2);
    CHECK_OK(BlockShape::create(dims, run, &shapes[0]));
    if (!rounds) CHECK_OK(BlockShape::create({}, 2 * run + 4, &shapes[1]));
    CHECK_OK(CopyPlan::create(sections, kBlocks, shapes, &unrounded));
    std::shared_ptr<const CopyPlan> copy = unrounded;
    if (rounds) {
      // Six runs of two heads in a block.
      const Rounding rounding{{1, 2, 3, 2, static_cast<std::uint32_t>(run / 4)},
                              Fp8Source::kBfloat16};
      CHECK_OK(CopyPlan::rounded(*unrounded, rounding, &copy));
    }
    check_cuda(CudaPlan::create(copy, device, &plan));
    CHECK_OK(copy->record_bytes(kChunkBlocks, &extent_bytes));
    extent_stride = (extent_bytes + 63) / 64 * 64;
    extents =
        static_cast<unsigned char*>(mmap(nullptr, kExtents * extent_stride, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(extents != MAP_FAILED);
  }

  ~World() {
    regions.clear();
    const CurrentContext current(*device);
    static_cast<void>(device->driver().memory_free(memory));
    munmap(extents, kExtents * extent_stride);
  }

  [[nodiscard]] unsigned char* block_bytes() const {
    return reinterpret_cast<unsigned char*>(memory);
  }
  [[nodiscard]] unsigned char* extent(std::size_t i) const { return extents + i * extent_stride; }

  void pin(CudaCopyEngine& engine) {
    const std::uint64_t begin = reinterpret_cast<std::uint64_t>(extents);
    const std::uint64_t border = begin + (kExtents / 2) * extent_stride + extent_bytes / 2;
    const std::uint64_t end = begin + kExtents * extent_stride;
    const std::pair<std::uint64_t, std::uint64_t> halves[] = {{begin, border}, {border, end}};
    for (const auto& [from, to] : halves) {
      std::shared_ptr<HostRegion> region;
      check_cuda(HostRegion::create(device, from, to - from, &region));
      engine.pinned().add(region);
      regions.push_back(std::move(region));
    }
  }

  CopyItem item(std::size_t to, std::uint64_t key, std::mt19937_64& random, std::size_t first,
                std::size_t last) const {
    CopyItem item;
    std::set<std::uint32_t> used;
    while (item.blocks.size() < kChunkBlocks) {
      const auto block = static_cast<std::uint32_t>(first + random() % (last - first));
      if (used.insert(block).second) item.blocks.push_back(block);
    }
    item.record = extent(to);
    item.length = extent_bytes;
    item.spec.key = key_of(key);
    item.spec.created_unix_ms = 77;
    return item;
  }

  // The payload of the blocks as they are, section after section.
  [[nodiscard]] std::vector<unsigned char> packed(const CopyItem& item) const {
    std::vector<unsigned char> payload(unrounded->section_offset(kSections, kChunkBlocks) + 8);
    std::uint32_t crcs[kSections];
    unrounded->gather(item.blocks, payload.data(), 0, kSections, crcs);
    payload.resize(payload.size() - 8);
    return payload;
  }

  // The array of a section of a chunk.
  [[nodiscard]] Fp8Shape chunk() const {
    Fp8Shape shape = plan.copy->rounding()->block;
    shape.blocks = kChunkBlocks;
    return shape;
  }

  // The record that the CPU makes of the same blocks.
  [[nodiscard]] std::vector<unsigned char> record_of(const CopyItem& item) const {
    std::vector<unsigned char> record(extent_bytes + 8);
    if (plan.copy->rounding()) {
      const std::vector<unsigned char> payload = packed(item);
      Section sections[kSections];
      for (std::size_t s = 0; s < kSections; ++s) {
        const std::uint32_t length = plan.copy->section_bytes(s, kChunkBlocks);
        unsigned char* const section = record.data() + record_header_bytes(kSections) +
                                       plan.copy->section_offset(s, kChunkBlocks);
        round_section(chunk(), payload.data() + unrounded->section_offset(s, kChunkBlocks),
                      section);
        sections[s] = Section{0, length, crc32c(section, length)};
      }
      CHECK_OK(write_record_header(record.data(), extent_bytes, item.spec, sections, kSections));
    } else {
      static const std::shared_ptr<CopyEngine> cpu = [] {
        std::shared_ptr<CopyEngine> made;
        CHECK_OK(CopyEngine::create(0, 1, &made));
        return made;
      }();
      CopyItem there = item;
      there.record = record.data();
      std::vector<CopyOutcome> outcomes;
      CHECK_OK(cpu->run(CopyKind::kGather, plan.copy, {there}, &outcomes));
    }
    record.resize(extent_bytes);
    return record;
  }

  // Whether the item's blocks hold what its record says.
  [[nodiscard]] bool blocks_are_of(const CopyItem& item) const {
    const std::vector<unsigned char> now = packed(item);
    std::vector<unsigned char> expected(now.size());
    const auto* const payload =
        static_cast<const unsigned char*>(item.record) + record_header_bytes(kSections);
    if (!plan.copy->rounding()) return std::memcmp(now.data(), payload, now.size()) == 0;
    for (std::size_t s = 0; s < kSections; ++s) {
      const unsigned char* const section = payload + plan.copy->section_offset(s, kChunkBlocks);
      unround_section(chunk(), section,
                      expected.data() + unrounded->section_offset(s, kChunkBlocks));
    }
    return now == expected;
  }
};

// The next completions, once there are some.
std::vector<CopyCompletion> await(CudaCopyEngine& engine) {
  pollfd ended{engine.event_fd(), POLLIN, 0};
  CHECK_EQ(poll(&ended, 1, std::chrono::milliseconds(kLong).count()), 1);
  std::vector<CopyCompletion> done;
  engine.completions(&done);
  return done;
}

void calm() {
  for (const char* name : {"fail", "delay_us"})
    simulated_cuda_set(name, *name == 'f' ? "" : "0");
  simulated_cuda_hold(0);
}

// Several jobs on both directions at once, some of them cancelled, some with bad records: the
// results are those of the CPU, and no other byte is touched.
void storm(Way way, bool pinned, std::uint64_t seed, bool rounds = false) {
  calm();
  World world(seed % 3 != 0 ? 96 : rounds ? 36 : 33, rounds);
  const auto engine = open_engine(world.device, way, 64, rounds);
  if (pinned) world.pin(*engine);
  simulated_cuda_set("delay_us", "300");
  std::mt19937_64 random(seed);
  enum class Bad { kNo, kStale, kPayload, kHeader };
  struct Flying {
    CopyKind kind;
    std::vector<CopyItem> items;
    std::vector<Bad> bad;
    bool cancelled = false;
    std::vector<std::size_t> extents;
  };
  std::map<std::uint64_t, Flying> flying;
  std::set<std::size_t> busy;
  std::uint64_t next = 1;
  // Gathers read blocks [0, 32); scatters write [32, 64), each its own eighth at a time.
  std::set<std::size_t> free_groups = {0, 1, 2, 3};
  std::map<std::uint64_t, std::size_t> group_of;
  const auto settle = [&](const CopyCompletion& done) {
    const Flying job = flying.at(done.job_id);
    for (std::size_t i = 0; i < job.items.size(); ++i) {
      const CopyOutcome outcome = done.outcomes[i];
      if (outcome == CopyOutcome::kCancelled) {
        CHECK(job.cancelled);
        continue;
      }
      if (job.kind == CopyKind::kGather) {
        CHECK_EQ(outcome, CopyOutcome::kOk);
        const std::vector<unsigned char> expected = world.record_of(job.items[i]);
        CHECK(std::memcmp(expected.data(), job.items[i].record, expected.size()) == 0);
        continue;
      }
      switch (job.bad[i]) {
        case Bad::kNo:
          CHECK_EQ(outcome, CopyOutcome::kOk);
          CHECK(world.blocks_are_of(job.items[i]));
          break;
        case Bad::kStale:
          CHECK_EQ(outcome, CopyOutcome::kStale);
          break;
        case Bad::kPayload:
          CHECK_EQ(outcome, CopyOutcome::kCorrupt);
          break;
        case Bad::kHeader:
          CHECK(outcome == CopyOutcome::kCorrupt || outcome == CopyOutcome::kMismatch);
          break;
      }
    }
    for (const std::size_t extent : job.extents)
      busy.erase(extent);
    if (job.kind == CopyKind::kScatter) free_groups.insert(group_of.at(done.job_id));
    flying.erase(done.job_id);
  };
  const auto collect = [&] {
    std::vector<CopyCompletion> done;
    engine->completions(&done);
    for (const CopyCompletion& one : done)
      settle(one);
  };
  for (int round = 0; round < 60; ++round) {
    const bool gather = random() % 2 == 0 || free_groups.empty();
    Flying job{gather ? CopyKind::kGather : CopyKind::kScatter, {}, {}, false, {}};
    const std::size_t group = gather ? 0 : *free_groups.begin();
    const std::size_t count = gather ? 1 + random() % 3 : 1;
    for (std::size_t i = 0; i < count && busy.size() < World::kExtents; ++i) {
      std::size_t extent = random() % World::kExtents;
      while (busy.contains(extent))
        extent = (extent + 1) % World::kExtents;
      busy.insert(extent);
      job.extents.push_back(extent);
      job.bad.push_back(Bad::kNo);
      if (gather) {
        job.items.push_back(world.item(extent, next * 8 + i, random, 0, 32));
        continue;
      }
      CopyItem item = world.item(extent, next * 8, random, 32 + group * 8, 40 + group * 8);
      CopyItem source = world.item(extent, 0, random, 0, 32);
      source.spec = item.spec;
      auto* const bytes = static_cast<unsigned char*>(item.record);
      std::memcpy(bytes, world.record_of(source).data(), world.extent_bytes);
      Bad& bad = job.bad.back();
      switch (random() % 8) {
        case 0:
          bad = Bad::kStale;
          item.spec.key = key_of(~next);
          break;
        case 1: {
          bad = Bad::kPayload;
          const CopyPlan& plan = *world.plan.copy;
          const std::size_t section = plan.section_bytes(3, World::kChunkBlocks);
          bytes[record_header_bytes(World::kSections) +
                plan.section_offset(3, World::kChunkBlocks) + random() % section] ^= 4;
          break;
        }
        case 2:
          bad = Bad::kHeader;
          bytes[random() % 200] ^= 1;
          break;
        default:
          break;
      }
      job.items.push_back(item);
    }
    if (job.items.empty()) {
      collect();
      continue;
    }
    CudaPlan plan = world.plan;
    plan.layerwise = random() % 2 == 0;
    if (random() % 2 == 0) check_cuda(engine->moment(nullptr, &plan.behind));
    const std::uint64_t id = next++;
    if (!gather) {
      free_groups.erase(group);
      group_of[id] = group;
    }
    CHECK_OK(engine->submit(id, job.kind, plan, job.items));
    Flying& now = flying[id] = std::move(job);
    if (random() % 4 == 0) {
      if (random() % 2 == 0) usleep(static_cast<useconds_t>(random() % 500));
      now.cancelled = engine->cancel(id);
    }
    if (random() % 4 == 0 && !gather) {
      bool queued = false;
      check_cuda(engine->await_section(id, random() % World::kSections, nullptr, kLong, &queued));
      CHECK(queued || flying.at(id).cancelled);
    }
    if (random() % 3 == 0) collect();
  }
  while (!flying.empty())
    for (const CopyCompletion& one : await(*engine))
      settle(one);
  calm();
}

}  // namespace

TEST(copies_of_both_directions_at_once_are_what_the_cpu_says_by_dma) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    storm(Way::kDma, true, seed);
    storm(Way::kDma, false, seed);
  }
}

TEST(copies_of_both_directions_at_once_are_what_the_cpu_says_by_kernel) {
  for (const std::uint64_t seed : {4, 5, 6})
    storm(Way::kKernel, true, seed);
}

TEST(copies_that_round_are_what_the_codec_of_the_cpu_says) {
  for (const std::uint64_t seed : {10, 11, 12}) {
    storm(Way::kKernel, true, seed, true);
    storm(Way::kKernel, false, seed, true);
  }
}

TEST(an_engine_that_is_closed_with_jobs_in_flight_ends_them_all_and_touches_nothing_afterwards) {
  for (const Way way : {Way::kDma, Way::kKernel}) {
    calm();
    World world;
    std::mt19937_64 random(5);
    auto engine = open_engine(world.device, way);
    world.pin(*engine);
    simulated_cuda_hold(1);
    for (std::uint64_t id = 0; id < 12; ++id) {
      CHECK_OK(engine->submit(id, id % 2 == 0 ? CopyKind::kGather : CopyKind::kScatter, world.plan,
                              {world.item(id, id, random, 0, 32)}));
    }
    std::thread later([] {
      usleep(2000);
      simulated_cuda_hold(0);
    });
    engine->close();
    later.join();
    std::vector<CopyCompletion> done;
    engine->completions(&done);
    CHECK_EQ(done.size(), 12U);
    engine.reset();
    std::memset(world.extents, 0xee, World::kExtents * world.extent_stride);
  }
}

TEST(a_forked_child_leaves_the_engine_behind) {
  calm();
  World world;
  std::mt19937_64 random(7);
  auto engine = open_engine(world.device, Way::kDma);
  simulated_cuda_set("delay_us", "2000");
  CHECK_OK(engine->submit(1, CopyKind::kGather, world.plan, {world.item(0, 1, random, 0, 32)}));
  const pid_t child = fork();
  if (child == 0) {
    engine->close();
    engine.reset();
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(await(*engine).at(0).outcomes.at(0), CopyOutcome::kOk);
  calm();
}
