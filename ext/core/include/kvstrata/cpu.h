// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What the CPU that runs us can do. Builds target the baseline of the architecture; the kernels
// that want more are compiled with per-function targets and chosen here, at run time.
#pragma once

namespace kvstrata {

struct CpuFeatures {
  // x86-64. An AVX-512 feature is only set when the operating system also saves its registers.
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

// Thread-safe; probes once. The reference lives as long as the process.
const CpuFeatures& cpu_features() noexcept;

}  // namespace kvstrata
