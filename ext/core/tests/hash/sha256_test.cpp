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

Digest filled(unsigned char value) {
  Digest d;
  d.fill(value);
  return d;
}

}  // namespace

// The Makefile runs this program with each value of KVSTRATA_SIMD.
TEST(published_examples) {
  CHECK_EQ(hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hash(std::string(1'000'000, 'a')),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(every_length_has_the_digest_that_all_implementations_agree_on) {
  std::mt19937_64 random(1);
  std::vector<unsigned char> bytes(700);
  for (auto& b : bytes) {
    b = static_cast<unsigned char>(random());
  }
  std::string all;
  for (std::size_t n = 0; n + 3 < bytes.size(); ++n) {
    all += hex(sha256(bytes.data() + n % 4, n));
  }
  CHECK_EQ(hash(all), "a89437f0fdf20e2003815659c6ea077b7aa425c4b3711849d006a947a689387d");
}

TEST(less_than_a_chunk_has_no_key) {
  const std::vector<std::uint32_t> tokens(15);
  chain_keys(filled(0), tokens, 16, {}, nullptr);
  chain_keys(filled(0), {}, 16, {}, nullptr);
}
