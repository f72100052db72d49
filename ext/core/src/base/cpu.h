// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The features of the CPU that this process runs on. Builds target the baseline of the
// architecture; kernels that need more are compiled with a per-function target and chosen at run
// time by these features.
//
// The environment variable KVSTRATA_SIMD leaves features out, so that one machine can measure what
// another one would do: `avx2` leaves out AVX-512, `sse` also AVX, `none` leaves out all. Python
// checks its value (config/load.py); here any other value leaves out nothing.
#pragma once

namespace kvstrata {

struct CpuFeatures {
  bool intel = false;  // made by Intel
  // x86-64. avx2, avx512 and vpclmulqdq are set only if the operating system saves their registers.
  bool sse42 = false;
  bool pclmul = false;
  bool ssse3 = false;
  bool sha_ni = false;
  bool avx2 = false;
  bool avx512 = false;  // F, BW, DQ and VL together
  bool vpclmulqdq = false;
  // aarch64
  bool arm_crc32 = false;
  bool arm_sha2 = false;
};

// Thread-safe; the first call probes the CPU and reads the environment. The reference stays valid
// as long as the process runs.
const CpuFeatures& cpu_features() noexcept;

}  // namespace kvstrata
