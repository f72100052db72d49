// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/engine.h"

#include <cstring>
#include <random>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

using Bytes = std::vector<unsigned char>;
using PlanPtr = std::shared_ptr<const CopyPlan>;

Bytes noise(std::size_t n, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(n);
  for (auto& b : bytes) {
    b = static_cast<unsigned char>(random());
  }
  return bytes;
}

std::uint64_t address(const void* p) {
  return reinterpret_cast<std::uint64_t>(p);
}

RecordSpec spec(unsigned char fill = 1) {
  RecordSpec s;
  s.key.fill(fill);
  s.chunk_tokens = 256;
  s.created_unix_ms = 1;
  return s;
}

struct Shape {
  std::vector<CopyDim> dims;
  std::size_t run;
  std::size_t stride;  // from one block to the next
};

// An engine's memory: sections one after the other, and the plan over it.
struct Engine {
  Bytes memory;
  PlanPtr plan;
  std::vector<std::size_t> bases;
  std::vector<Shape> shapes;  // of each section

  Engine(std::size_t sections, std::size_t blocks, std::vector<CopyDim> dims, std::size_t run,
         std::size_t stride, unsigned seed)
      : Engine(std::vector<Shape>(sections, Shape{std::move(dims), run, stride}), blocks, seed) {}

  Engine(std::vector<Shape> of_sections, std::size_t blocks, unsigned seed)
      : shapes(std::move(of_sections)) {
    std::size_t end = 0;
    for (const Shape& shape : shapes) {
      bases.push_back(end);
      end += shape.stride * (blocks - 1) + shape.run + seed % 7;
      for (const CopyDim& d : shape.dims) {
        end += (d.count - 1) * d.stride;
      }
    }
    memory = noise(end, seed);
    std::vector<CopySection> sections;
    std::vector<BlockShape> described;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      sections.push_back(CopySection{address(memory.data()) + bases[i], shapes[i].stride,
                                     static_cast<std::uint32_t>(described.size())});
      CHECK_OK(BlockShape::create(shapes[i].dims, shapes[i].run, &described.emplace_back()));
    }
    CHECK_OK(CopyPlan::create(sections, blocks, described, &plan));
  }

  // The definition of the stored bytes: visits (offset in memory, bytes) of each run.
  template <typename Visit>
  void each_run(const std::vector<std::uint32_t>& ids, Visit visit) const {
    for (std::size_t s = 0; s < shapes.size(); ++s) {
      for (const std::uint32_t id : ids) {
        each(bases[s] + id * shapes[s].stride, shapes[s], 0, visit);
      }
    }
  }
  template <typename Visit>
  void each(std::size_t at, const Shape& shape, std::size_t dim, Visit& visit) const {
    if (dim == shape.dims.size()) {
      visit(at, shape.run);
      return;
    }
    for (std::size_t i = 0; i < shape.dims[dim].count; ++i) {
      each(at + i * shape.dims[dim].stride, shape, dim + 1, visit);
    }
  }
  Bytes packed(const std::vector<std::uint32_t>& ids) const {
    Bytes out;
    each_run(ids, [&](std::size_t at, std::size_t run) {
      out.insert(out.end(), memory.begin() + static_cast<std::ptrdiff_t>(at),
                 memory.begin() + static_cast<std::ptrdiff_t>(at + run));
    });
    return out;
  }
};

CopyResult copy(CopyKind kind, const Engine& engine, const std::vector<std::uint32_t>& ids,
                Bytes& record) {
  static const std::shared_ptr<CopyEngine> copier = [] {
    std::shared_ptr<CopyEngine> made;
    CHECK_OK(CopyEngine::create(0, 1, &made));
    return made;
  }();
  std::vector<CopyResult> results;
  CHECK_OK(copier->run(kind, engine.plan, {{ids, record.data(), record.size(), spec()}}, &results));
  return results.at(0);
}

Bytes gathered(const Engine& engine, const std::vector<std::uint32_t>& ids) {
  std::uint64_t total = 0;
  CHECK_OK(engine.plan->record_bytes(ids.size(), &total));
  Bytes record(total);
  CHECK(copy(CopyKind::kGather, engine, ids, record).outcome == CopyOutcome::kOk);
  return record;
}

CopyResult scattered(const Engine& engine, const std::vector<std::uint32_t>& ids, Bytes record) {
  return copy(CopyKind::kScatter, engine, ids, record);
}

std::vector<Shape> shapes() {
  return {
      {{}, 4096, 4096},                                 // one contiguous run, blocks adjacent
      {{}, 1000, 1500},                                 // odd run, gaps
      {{{2, 65'536}}, 2048, 2048},                      // K and V apart
      {{{2, 65'536}, {8, 512}}, 256, 4096},             // heads with gaps
      {{{2, 40'000}, {3, 3000}, {5, 300}}, 100, 9001},  // nothing merges, nothing is aligned
      {{{4, 1024}, {4, 256}}, 256, 4096},               // merges into one run
      {{{1, 7}, {4, 512}, {1, 9}}, 512, 2048},          // dimensions of one element
      {{{3, 0}}, 64, 64},                               // a repeated run
      {{{300, 24}}, 8, 7200},                           // more runs than a batch
  };
}

// All shapes in order, then all of them again, so that equal shapes are not adjacent.
std::vector<Shape> unlike() {
  std::vector<Shape> all = shapes();
  const std::size_t once = all.size();
  for (std::size_t i = 0; i < once; ++i) {
    all.push_back(all[i]);
  }
  return all;
}

}  // namespace

TEST(sections_of_unlike_blocks_follow_each_other_in_the_record) {
  Engine engine(unlike(), 9, 300);
  const std::vector<std::uint32_t> ids = {7, 2, 4};
  const Bytes record = gathered(engine, ids);
  const Bytes expected = engine.packed(ids);
  const std::size_t count = engine.shapes.size();
  const std::size_t header = record_header_bytes(static_cast<std::uint32_t>(count));
  CHECK_EQ(record.size(), header + expected.size());
  CHECK(std::memcmp(record.data() + header, expected.data(), expected.size()) == 0);
  const Digest key = spec().key;
  CHECK_OK(verify_record(record.data(), record.size(), &key));
  std::uint64_t at = 0;
  for (std::size_t s = 0; s < count; ++s) {
    CHECK_EQ(engine.plan->section_offset(s, ids.size()), at);
    at += engine.plan->section_bytes(s, ids.size());
  }
  CHECK_EQ(at, expected.size());

  const Bytes before = engine.memory;
  Bytes wiped = before;
  engine.each_run({7, 4}, [&](std::size_t where, std::size_t run) {
    std::memset(wiped.data() + where, 0, run);
  });
  engine.memory.assign(wiped.begin(), wiped.end());
  const std::vector<std::uint32_t> some = {7, kSkipBlock, 4};
  CHECK(scattered(engine, some, record).outcome == CopyOutcome::kOk);
  CHECK(engine.memory == before);
  for (const std::size_t bad : {std::size_t{0}, count / 2, count - 1}) {
    Bytes flipped = record;
    flipped[header + engine.plan->section_offset(bad + 1, ids.size()) - 1] ^= 1;
    const CopyResult result = scattered(engine, some, flipped);
    CHECK(result.outcome == CopyOutcome::kCorrupt);
    CHECK_EQ(result.section, static_cast<std::int32_t>(bad));
  }
}

TEST(a_section_beyond_32_bits_is_refused) {
  PlanPtr plan;
  const std::uint64_t huge = std::uint64_t{1} << 30;
  std::vector<BlockShape> two(2);
  CHECK_OK(BlockShape::create({}, 64, &two[0]));
  CHECK_OK(BlockShape::create({}, huge, &two[1]));
  CHECK_OK(CopyPlan::create({{4096, 64, 0}, {4096, huge, 1}}, 8, two, &plan));
  std::uint64_t total = 0;
  CHECK_OK(plan->payload_bytes(3, &total));
  CHECK_EQ(total, 3 * 64 + 3 * huge);
  CHECK_EQ(plan->section_bytes(1, 3), 3u << 30);
  CHECK(plan->payload_bytes(4, &total).code() == StatusCode::kBadArgument);
  CHECK(plan->payload_bytes(~std::uint64_t{0}, &total).code() == StatusCode::kBadArgument);
}
