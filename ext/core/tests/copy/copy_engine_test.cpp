// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/engine.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "support/check.h"

using namespace kvstrata;

namespace {

using Bytes = std::vector<unsigned char>;
using PlanPtr = std::shared_ptr<const CopyPlan>;

Digest key_of(std::size_t chunk) {
  Digest key{};
  key[0] = static_cast<unsigned char>(chunk);
  key[1] = static_cast<unsigned char>(chunk >> 8);
  return key;
}

// Engine memory of some sections, and extents for chunks of `blocks_per_chunk` blocks each.
struct World {
  std::size_t chunks;
  std::size_t blocks_per_chunk;
  std::size_t section_bytes;
  Bytes memory;
  Bytes extents;
  std::uint64_t extent_bytes = 0;
  PlanPtr plan;

  World(std::size_t chunks_, std::size_t sections, std::size_t blocks_per_chunk_, std::size_t block)
      : chunks(chunks_), blocks_per_chunk(blocks_per_chunk_) {
    const std::size_t blocks = chunks * blocks_per_chunk;
    section_bytes = blocks * block;
    memory.resize(section_bytes * sections);
    std::mt19937_64 random(11);
    for (auto& b : memory) {
      b = static_cast<unsigned char>(random());
    }
    std::vector<CopySection> list;
    for (std::size_t i = 0; i < sections; ++i) {
      list.push_back({reinterpret_cast<std::uint64_t>(memory.data()) + i * section_bytes, block});
    }
    std::vector<BlockShape> shape(1);
    CHECK_OK(BlockShape::create({}, block, &shape[0]));
    CHECK_OK(CopyPlan::create(list, blocks, shape, &plan));
    CHECK_OK(plan->record_bytes(blocks_per_chunk, &extent_bytes));
    extents.resize(extent_bytes * chunks);
  }

  CopyItem item(std::size_t chunk) {
    CopyItem i;
    for (std::size_t b = 0; b < blocks_per_chunk; ++b) {
      i.blocks.push_back(static_cast<std::uint32_t>(chunk * blocks_per_chunk + b));
    }
    i.record = extents.data() + chunk * extent_bytes;
    i.length = extent_bytes;
    i.spec.key = key_of(chunk);
    return i;
  }
  std::vector<CopyItem> items(std::size_t begin, std::size_t end) {
    std::vector<CopyItem> list;
    for (std::size_t c = begin; c < end; ++c) {
      list.push_back(item(c));
    }
    return list;
  }
};

std::shared_ptr<CopyEngine> start(int threads, std::size_t queue) {
  std::shared_ptr<CopyEngine> engine;
  CHECK_OK(CopyEngine::create(threads, queue, &engine));
  return engine;
}

bool all(const std::vector<CopyOutcome>& outcomes, CopyOutcome outcome) {
  return !outcomes.empty() &&
         std::ranges::all_of(outcomes, [&](CopyOutcome one) { return one == outcome; });
}

// The next `count` completions, once they are there.
std::vector<CopyCompletion> await(CopyEngine& engine, std::size_t count) {
  std::vector<CopyCompletion> all;
  while (all.size() < count) {
    pollfd p{engine.event_fd(), POLLIN, 0};
    CHECK_EQ(poll(&p, 1, 60'000), 1);
    std::vector<CopyCompletion> done;
    engine.completions(&done);
    all.insert(all.end(), done.begin(), done.end());
  }
  return all;
}

}  // namespace

TEST(every_item_is_either_copied_or_cancelled_never_both) {
  // One thread, one long job in front: the jobs behind it race with their cancellation, and then
  // the long one itself is cancelled somewhere in the middle.
  World world(300, 2, 1, 65'536);
  const auto engine = start(1, 200);
  CHECK_OK(engine->submit(0, CopyKind::kGather, world.plan, world.items(0, 200)));
  for (std::size_t c = 200; c < 300; ++c) {
    CHECK_OK(engine->submit(c, CopyKind::kGather, world.plan, world.items(c, c + 1)));
  }
  std::vector<bool> cancelled(300);
  for (std::size_t c = 299; c >= 200; --c) {
    cancelled[c] = engine->cancel(c);
    CHECK(!engine->cancel(c));  // once only
  }
  const bool cut = engine->cancel(0);
  CHECK(!engine->cancel(0));
  const std::vector<CopyCompletion> done = await(*engine, 101);
  CHECK_EQ(done.size(), 101u);
  const auto copied = [&](std::size_t chunk) {
    const Digest key = key_of(chunk);
    return verify_record(world.item(chunk).record, world.extent_bytes, &key).ok();
  };
  for (const CopyCompletion& c : done) {
    if (c.job_id >= 200) {
      const bool was = cancelled[c.job_id];
      CHECK(all(c.outcomes, was ? CopyOutcome::kCancelled : CopyOutcome::kOk));
      CHECK_EQ(copied(c.job_id), !was);
      continue;
    }
    CHECK_EQ(c.outcomes.size(), 200u);
    CHECK_EQ(c.outcomes.back() == CopyOutcome::kCancelled, cut);
    for (std::size_t i = 0; i < 200; ++i) {
      const bool ok = c.outcomes[i] == CopyOutcome::kOk;
      CHECK(ok || c.outcomes[i] == CopyOutcome::kCancelled);
      CHECK_EQ(copied(i), ok);  // a cancelled item wrote nothing
      CHECK(i == 0 || ok <= (c.outcomes[i - 1] == CopyOutcome::kOk));
    }
  }
}

TEST(an_item_that_has_begun_is_copied_whole_in_spite_of_a_cancel) {
  World world(40, 6, 1, 1'500'000);  // six units an item
  const auto engine = start(2, 8);
  CHECK_OK(engine->submit(1, CopyKind::kGather, world.plan, world.items(0, 40)));
  usleep(300);  // let some begin
  static_cast<void>(engine->cancel(1));
  const std::vector<CopyCompletion> done = await(*engine, 1);
  for (std::size_t i = 0; i < 40; ++i) {
    const Digest key = key_of(i);
    const bool ok = verify_record(world.item(i).record, world.extent_bytes, &key).ok();
    CHECK_EQ(ok, done[0].outcomes[i] == CopyOutcome::kOk);
  }
}

TEST(close_ends_every_job_and_keeps_its_completion) {
  World world(64, 2, 1, 65'536);
  const auto engine = start(2, 64);
  for (std::size_t c = 0; c < 64; ++c) {
    CHECK_OK(engine->submit(c, CopyKind::kGather, world.plan, world.items(c, c + 1)));
  }
  engine->close();
  engine->close();
  CHECK(engine->submit(99, CopyKind::kGather, world.plan, world.items(0, 1)).code() ==
        StatusCode::kClosed);
  std::vector<CopyOutcome> outcomes;
  CHECK(engine->run(CopyKind::kGather, world.plan, world.items(0, 1), &outcomes).code() ==
        StatusCode::kClosed);
  std::vector<CopyCompletion> done;
  engine->completions(&done);
  CHECK_EQ(done.size(), 64u);
  for (const CopyCompletion& c : done) {
    CHECK(all(c.outcomes, CopyOutcome::kOk) || all(c.outcomes, CopyOutcome::kCancelled));
  }
}

TEST(submitters_runners_and_readers_may_race) {
  World world(96, 3, 1, 20'000);
  const auto engine = start(2, 16);
  std::atomic<std::size_t> refused{0};
  std::atomic<std::size_t> bad{0};
  std::atomic<std::size_t> completed{0};
  std::thread reader([&] {
    std::vector<CopyCompletion> done;
    while (completed < 64) {
      pollfd p{engine->event_fd(), POLLIN, 0};
      poll(&p, 1, 5);
      engine->completions(&done);
      for (const CopyCompletion& c : done) {
        completed += 1;
        bad += !all(c.outcomes, CopyOutcome::kOk);
      }
    }
  });
  std::vector<std::thread> writers;
  std::atomic<std::size_t> accepted{0};
  for (std::size_t w = 0; w < 2; ++w) {
    writers.emplace_back([&, w] {
      for (std::size_t c = w * 32; c < w * 32 + 32; ++c) {
        for (;;) {
          const Status status =
              engine->submit(c, CopyKind::kGather, world.plan, world.items(c, c + 1));
          if (status.ok()) break;
          if (status.code() != StatusCode::kQueueFull) ++bad;
          ++refused;
          std::this_thread::yield();
        }
        ++accepted;
      }
    });
  }
  writers.emplace_back([&] {
    std::vector<CopyOutcome> outcomes;
    for (int round = 0; round < 10; ++round) {
      for (const CopyKind kind : {CopyKind::kGather, CopyKind::kScatter}) {
        if (!engine->run(kind, world.plan, world.items(64, 96), &outcomes).ok() ||
            !all(outcomes, CopyOutcome::kOk)) {
          ++bad;
        }
      }
    }
  });
  for (std::thread& t : writers) {
    t.join();
  }
  reader.join();
  CHECK_EQ(bad.load(), 0u);
  CHECK_EQ(accepted.load(), 64u);
  CHECK_EQ(completed.load(), 64u);
}
