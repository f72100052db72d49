// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A SHA-256 digest, as stored in files and messages: keys, identities, slices.
#pragma once

#include <array>

namespace kvstrata {

using Digest = std::array<unsigned char, 32>;

}  // namespace kvstrata
