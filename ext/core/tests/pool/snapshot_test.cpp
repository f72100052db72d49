#include "pool/snapshot.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <random>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

constexpr std::uint32_t kCapacity = 200;

// An index file of garbage behind a sound static header.
int garbage(std::mt19937_64& draw) {
  const IndexLayout layout = IndexLayout::of(kCapacity);
  std::vector<std::uint64_t> bytes(layout.file_bytes / 8);
  for (std::uint64_t& word : bytes)
    word = draw() & draw();
  IndexView view(bytes.data(), layout);
  IndexHeader& header = view.header();
  header.magic = kIndexMagic;
  header.format_version = kIndexFormatVersion;
  header.entry_capacity = layout.entry_capacity;
  header.bucket_lines = layout.bucket_lines;
  header.slab_bytes &= ~(kExtentAlignment - 1);
  view.seal_static_header();
  const int fd = memfd_create("index", MFD_CLOEXEC);
  CHECK(write(fd, bytes.data(), layout.file_bytes) == static_cast<ssize_t>(layout.file_bytes));
  return fd;
}

}  // namespace

TEST(garbage_behind_a_sound_header_is_read_within_bounds) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 draw(seed);
    const int fd = garbage(draw);
    IndexSnapshot snapshot;
    FormatMismatch mismatch;
    CHECK_OK(IndexSnapshot::open(fd, &snapshot, &mismatch));
    CHECK(snapshot.entries_touched() <= kCapacity);
    CHECK(snapshot.runs().size() <= kMaxSlabs);
    std::vector<IndexSnapshot::Entry> entries;
    std::uint32_t next = 0;
    CHECK_OK(snapshot.read(fd, 0, &entries, &next));
    CHECK_EQ(next, 0u);
    CHECK(entries.size() <= kCapacity);
    CHECK_OK(snapshot.read(fd, 0xFFFFFFFFu, &entries, &next));
    CHECK_EQ(next, 0u);
    CHECK_EQ(ftruncate(fd, 70'000), 0);
    CHECK(snapshot.read(fd, 0, &entries, &next).code() == StatusCode::kCorrupt);
    close(fd);
  }
}
