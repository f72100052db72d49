// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "memory/page_tables.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "support/check.h"

using kvstrata::map_present_pages;
using kvstrata::StatusCode;

namespace {

constexpr std::uint64_t kBytes = 16ULL << 20;

// A file on tmpfs, mapped twice, as by server and client.
struct TwoMappings {
  int fd = memfd_create("paging_test", MFD_CLOEXEC);
  std::uint8_t* server = nullptr;
  std::uint8_t* client = nullptr;

  TwoMappings() {
    CHECK_EQ(ftruncate(fd, kBytes), 0);
    for (std::uint8_t** mapping : {&server, &client}) {
      void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      CHECK(at != MAP_FAILED);
      *mapping = static_cast<std::uint8_t*>(at);
    }
  }
  ~TwoMappings() {
    munmap(server, kBytes);
    munmap(client, kBytes);
    close(fd);
  }
  [[nodiscard]] std::uint64_t file_bytes() const {
    struct stat found{};
    fstat(fd, &found);
    return static_cast<std::uint64_t>(found.st_blocks) * 512;
  }
};

// Bytes of the mapping at `address` that this process's page tables hold.
std::uint64_t in_page_tables(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<std::uintptr_t>(address) << "-";
  std::string line;
  while (std::getline(smaps, line)) {
    if (line.rfind(begin.str(), 0) != 0) continue;
    while (std::getline(smaps, line)) {
      if (line.rfind("Rss:", 0) == 0) return std::stoull(line.substr(4)) << 10;
    }
  }
  return ~0ULL;
}

}  // namespace

TEST(pages_that_exist_are_entered_into_the_page_tables) {
  TwoMappings file;
  std::memset(file.server, 7, kBytes);
  CHECK_EQ(in_page_tables(file.client), 0U);
  std::uint64_t mapped = 0;
  CHECK(map_present_pages(file.client, kBytes, &mapped).ok());
  CHECK_EQ(mapped, kBytes);
  CHECK_EQ(in_page_tables(file.client), kBytes);
}

TEST(pages_that_nobody_touched_stay_absent) {
  TwoMappings file;
  std::memset(file.server + (3 << 20), 7, 2 << 20);
  file.server[12 << 20] = 7;
  const std::uint64_t before = file.file_bytes();
  std::uint64_t mapped = 0;
  CHECK(map_present_pages(file.client, kBytes, &mapped).ok());
  CHECK_EQ(mapped, before);
  CHECK_EQ(file.file_bytes(), before);
}

TEST(an_address_within_a_page_is_refused) {
  TwoMappings file;
  std::uint64_t mapped = 1;
  CHECK(map_present_pages(file.client + 1, 4096, &mapped).code() == StatusCode::kBadArgument);
  CHECK_EQ(mapped, 0U);
}
