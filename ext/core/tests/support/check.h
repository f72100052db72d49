// The test harness of ext/core: no dependency. Each tests/*_test.cpp is one program, linked with
// check.cpp, which has main(), and with what else the tests share.
//
//     #include "support/check.h"
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

#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

namespace kvstrata::testing {

struct Test {
  const char* name;
  void (*run)();
};

struct CheckFailed {};

struct Registration {
  Registration(const char* name, void (*run)());
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

[[noreturn]] void fail(const char* file, int line, const std::string& what);
[[noreturn]] void fail_check(const char* file, int line, const char* condition);
[[noreturn]] void fail_equal(const char* file, int line, const char* left, const char* right,
                             const std::string& left_shown, const std::string& right_shown);
[[noreturn]] void fail_status(const char* file, int line, const char* expression,
                              const std::string& message);

// Signed and unsigned integers are compared by value, and so is a byte with an enumeration.
template <typename A, typename B>
constexpr bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool> && !std::is_same_v<A, char> && !std::is_same_v<B, char>) {
    return std::cmp_equal(a, b);
  } else if constexpr (std::is_same_v<A, unsigned char> && std::is_enum_v<B>) {
    return a == static_cast<unsigned char>(b);
  } else {
    return a == b;
  }
}

// A function, so that the compiler makes it once for two types and not for each check.
template <typename A, typename B>
[[gnu::noinline]] void check_equal(const char* file, int line, const char* left_text,
                                   const char* right_text, const A& left, const B& right) {
  if (!equal(left, right)) fail_equal(file, line, left_text, right_text, shown(left), shown(right));
}

// For a kvstrata Status.
template <typename Status>
[[gnu::noinline]] void check_ok(const char* file, int line, const char* text,
                                const Status& status) {
  if (!status.ok()) fail_status(file, line, text, std::string(status.message()));
}

}  // namespace kvstrata::testing

#define TEST(name)                                                             \
  static void kvstrata_test_##name();                                          \
  static const ::kvstrata::testing::Registration kvstrata_registration_##name( \
      #name, &kvstrata_test_##name);                                           \
  static void kvstrata_test_##name()

#define CHECK(condition)                                               \
  do {                                                                 \
    if (!(condition)) {                                                \
      ::kvstrata::testing::fail_check(__FILE__, __LINE__, #condition); \
    }                                                                  \
  } while (false)

#define CHECK_EQ(left, right) \
  ::kvstrata::testing::check_equal(__FILE__, __LINE__, #left, #right, (left), (right))

// For a kvstrata Status: CHECK_OK(pool.commit(...)).
#define CHECK_OK(expression) \
  ::kvstrata::testing::check_ok(__FILE__, __LINE__, #expression, (expression))
