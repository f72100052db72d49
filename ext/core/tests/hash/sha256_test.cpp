// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "hash/sha256.h"

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

std::string hex(const Digest& d) {
  static const char* digits = "0123456789abcdef";
  std::string s;
  for (const unsigned char b : d) {
    s += digits[b >> 4];
    s += digits[b & 15];
  }
  return s;
}

std::string hash(const std::string& text) {
  return hex(sha256(text.data(), text.size()));
}

template <typename Body>
void for_every_path(Body body) {
  for (int i = 0; i < kSha256PathCount; ++i) {
    const auto path = static_cast<Sha256Path>(i);
    if (!sha256_path_supported(path)) {
      CHECK(sha256_set_path(path).code() == StatusCode::kUnsupported);
      continue;
    }
    CHECK_OK(sha256_set_path(path));
    CHECK(sha256_path() == path);
    body();
  }
  sha256_reset_path();
}

Digest filled(unsigned char value) {
  Digest d;
  d.fill(value);
  return d;
}

}  // namespace

TEST(published_examples) {
  for_every_path([] {
    CHECK_EQ(hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ(hash(std::string(1'000'000, 'a')),
             "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  });
}

TEST(all_paths_agree_on_every_length) {
  std::mt19937_64 random(1);
  std::vector<unsigned char> bytes(700);
  for (auto& b : bytes) {
    b = static_cast<unsigned char>(random());
  }
  std::vector<std::vector<std::string>> seen;
  for_every_path([&] {
    seen.emplace_back();
    for (std::size_t n = 0; n + 3 < bytes.size(); ++n) {
      seen.back().push_back(hex(sha256(bytes.data() + n % 4, n)));
    }
  });
  for (const auto& list : seen) {
    CHECK(list == seen[0]);
  }
}

TEST(less_than_a_chunk_has_no_key) {
  const std::vector<std::uint32_t> tokens(15);
  chain_keys(filled(0), tokens, 16, {}, nullptr);
  chain_keys(filled(0), {}, 16, {}, nullptr);
}
