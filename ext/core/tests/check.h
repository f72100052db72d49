// The test harness of ext/core: one header, no dependency. Each tests/*.cpp is one program.
//
//     #include "check.h"
//     TEST(released_extents_can_be_allocated_again) {
//         CHECK_EQ(pool.free_bytes(), before);
//     }
//
// A failed check prints file, line, expression and both values, marks the test failed and ends it
// by an exception that nothing but the runner catches; so checks may stand in helper functions, but
// not on other threads than the test's own: hand a thread's result back and check it after joining.
//
// The program runs all tests, or those whose name contains the first argument, and exits with the
// number of failed tests, at most 99. It exits with 99 also when no test ran: a program without
// tests is a mistake.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvstrata::testing {

struct Test {
  const char* name;
  void (*run)();
};

struct CheckFailed {};

inline std::vector<Test>& registry() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, void (*run)()) { registry().push_back({name, run}); }
};

template <typename T>
std::string shown(const T& value) {
  std::ostringstream text;
  if constexpr (std::is_same_v<T, bool>) {
    text << (value ? "true" : "false");
  } else if constexpr (std::is_enum_v<T>) {
    text << static_cast<long long>(value);
  } else if constexpr (std::is_integral_v<T> && sizeof(T) == 1) {
    text << static_cast<int>(value);
  } else if constexpr (requires { text << value; }) {
    text << value;
  } else {
    text << "(" << sizeof(T) << " bytes)";
  }
  return text.str();
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  throw CheckFailed{};
}

// Signed and unsigned integers are compared by value.
template <typename A, typename B>
constexpr bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool> && !std::is_same_v<A, char> && !std::is_same_v<B, char>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

inline int run_all(const char* program, const char* filter) {
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

}  // namespace kvstrata::testing

#define TEST(name)                                                             \
  static void kvstrata_test_##name();                                          \
  static const ::kvstrata::testing::Registration kvstrata_registration_##name( \
      #name, &kvstrata_test_##name);                                           \
  static void kvstrata_test_##name()

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      ::kvstrata::testing::fail(__FILE__, __LINE__, "CHECK(" #condition ") is false"); \
    }                                                                                  \
  } while (false)

#define CHECK_EQ(left, right)                                                               \
  do {                                                                                      \
    const auto& kvstrata_left = (left);                                                     \
    const auto& kvstrata_right = (right);                                                   \
    if (!::kvstrata::testing::equal(kvstrata_left, kvstrata_right)) {                       \
      ::kvstrata::testing::fail(                                                            \
          __FILE__, __LINE__,                                                               \
          "CHECK_EQ(" #left ", " #right "): " + ::kvstrata::testing::shown(kvstrata_left) + \
              " is not " + ::kvstrata::testing::shown(kvstrata_right));                     \
    }                                                                                       \
  } while (false)

// For a kvstrata Status: CHECK_OK(pool.commit(...)).
#define CHECK_OK(expression)                                                       \
  do {                                                                             \
    const auto& kvstrata_status = (expression);                                    \
    if (!kvstrata_status.ok()) {                                                   \
      ::kvstrata::testing::fail(                                                   \
          __FILE__, __LINE__,                                                      \
          std::string("CHECK_OK(" #expression "): ") + kvstrata_status.message()); \
    }                                                                              \
  } while (false)

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  return ::kvstrata::testing::run_all(argv[0], argc > 1 ? argv[1] : nullptr);
}
