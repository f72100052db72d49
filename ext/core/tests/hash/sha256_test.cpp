// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "hash/sha256.h"

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

}  // namespace

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
