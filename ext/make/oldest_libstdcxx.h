// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Included in front of every source of a wheel (tests/tools/wheels.py). GCC 12 gave
// std::condition_variable::wait a new symbol version, which the libstdc++ of GCC 11 lacks. The
// older version behaves the same and is in both libraries, so a wheel that uses it runs with
// GLIBCXX_3.4.29 (RHEL 9).
#pragma once

#include <version>

#if defined(__GLIBCXX__) && defined(__x86_64__)
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
