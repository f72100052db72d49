// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "record/record.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "hash/crc32c.h"
#include "support/check.h"

using namespace kvstrata;

namespace {

using Bytes = std::vector<unsigned char>;

Digest digest(unsigned char fill) {
  Digest d;
  d.fill(fill);
  return d;
}

RecordSpec spec() {
  return RecordSpec{digest(1), digest(2), digest(3), digest(4), 256, 1'700'000'000'000};
}

// A sealed record with a random payload.
Bytes sealed(const std::vector<std::uint32_t>& lengths, unsigned seed = 1) {
  std::uint64_t payload = 0;
  for (const std::uint32_t n : lengths) {
    payload += n;
  }
  std::uint64_t total = 0;
  CHECK_OK(record_bytes(lengths.size(), payload, &total));
  Bytes bytes(total);
  std::mt19937_64 random(seed);
  for (auto& b : bytes) {
    b = static_cast<unsigned char>(random());
  }
  CHECK_OK(seal_record(bytes.data(), bytes.size(), spec(), lengths.data(), lengths.size()));
  return bytes;
}

template <typename T>
void put(Bytes& bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

template <typename T>
T get(const Bytes& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Makes both header CRCs right again after a field was changed on purpose.
void reseal_headers(Bytes& bytes) {
  const auto count = get<std::uint32_t>(bytes, 268);
  std::uint32_t crc = crc32c(bytes.data() + 256, 252);
  crc = crc32c(bytes.data() + 512, std::size_t{count} * 16, crc);
  put(bytes, 508, crc);
  put(bytes, 252, crc32c(bytes.data(), 252));
}

StatusCode read_code(const Bytes& bytes) {
  // An own allocation of exactly this size, so that the address sanitizer sees a read beyond it.
  std::unique_ptr<unsigned char[]> copy(new unsigned char[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), copy.get());
  RecordHeader header;
  return read_record_header(copy.get(), bytes.size(), &header).code();
}

}  // namespace

TEST(every_truncation_is_refused_without_reading_on) {
  const Bytes good = sealed(std::vector<std::uint32_t>(300, 3));
  for (std::size_t n = 0; n < good.size(); n += n < 600 ? 1 : 97) {
    const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(n));
    CHECK(read_code(cut) == StatusCode::kOutOfRange);
  }
}

TEST(a_huge_section_count_is_refused_before_the_table_is_touched) {
  for (const std::uint32_t count : {0u, 65'537u, 0xffffffffu}) {
    Bytes bytes = sealed({64});
    put(bytes, 268, count);
    put(bytes, 252, crc32c(bytes.data(), 252));
    CHECK(read_code(bytes) == StatusCode::kCorrupt);
  }
  Bytes bytes = sealed({64});  // possible, but the extent is too short for it
  put<std::uint32_t>(bytes, 268, 65'536);
  put<std::uint32_t>(bytes, 12, static_cast<std::uint32_t>(record_header_bytes(65'536)));
  put(bytes, 252, crc32c(bytes.data(), 252));
  CHECK(read_code(bytes) == StatusCode::kOutOfRange);
}

TEST(random_bytes_behind_the_magics_are_refused_without_reading_outside) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 3000; ++round) {
    Bytes bytes = sealed({64, 200, 8});
    bytes.resize(512 + random() % 8192);
    for (int i = 0; i < 8; ++i) {
      const std::size_t fields[] = {8, 12, 88, 96, 264, 266, 268, 272, 280, 512, 520, 528};
      const std::size_t at = fields[random() % std::size(fields)];
      bytes[at + random() % 4] = static_cast<unsigned char>(random());
    }
    if (get<std::uint32_t>(bytes, 268) <= (bytes.size() - 512) / 16) {
      reseal_headers(bytes);
    }
    std::unique_ptr<unsigned char[]> copy(new unsigned char[bytes.size()]);
    std::memcpy(copy.get(), bytes.data(), bytes.size());
    const StatusCode code = verify_record(copy.get(), bytes.size(), nullptr).code();
    CHECK(code != StatusCode::kNoSpace && code != StatusCode::kInternal);
  }
}
