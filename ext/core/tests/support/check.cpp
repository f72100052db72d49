// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "support/check.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

namespace kvstrata::testing {

namespace {

std::vector<Test>& registry() {
  static std::vector<Test> tests;
  return tests;
}

int run_all(const char* program, const char* filter) {
  int failed = 0;
  int ran = 0;
  for (const Test& test : registry()) {
    if (filter != nullptr && std::strstr(test.name, filter) == nullptr) {
      continue;
    }
    ran += 1;
    try {
      test.run();
    } catch (const CheckFailed&) {
      failed += 1;
      std::fprintf(stderr, "FAILED %s\n", test.name);
    } catch (const std::exception& error) {
      failed += 1;
      std::fprintf(stderr, "FAILED %s: exception: %s\n", test.name, error.what());
    }
  }
  const char* slash = std::strrchr(program, '/');
  std::printf("%s: %d passed, %d failed\n", slash == nullptr ? program : slash + 1, ran - failed,
              failed);
  if (ran == 0) {
    std::fprintf(stderr, "no test ran\n");
    return 99;
  }
  return failed < 99 ? failed : 99;
}

}  // namespace

Registration::Registration(const char* name, void (*run)()) {
  registry().push_back({name, run});
}

void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  throw CheckFailed{};
}

void fail_check(const char* file, int line, const char* condition) {
  fail(file, line, std::string("CHECK(") + condition + ") is false");
}

void fail_equal(const char* file, int line, const char* left, const char* right,
                const std::string& left_shown, const std::string& right_shown) {
  fail(file, line,
       std::string("CHECK_EQ(") + left + ", " + right + "): " + left_shown + " is not " +
           right_shown);
}

void fail_status(const char* file, int line, const char* expression, const std::string& message) {
  fail(file, line, std::string("CHECK_OK(") + expression + "): " + message);
}

}  // namespace kvstrata::testing

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return ::kvstrata::testing::run_all(argv[0], argc > 1 ? argv[1] : nullptr);
}
