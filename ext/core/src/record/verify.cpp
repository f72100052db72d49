// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "record/verify.h"

namespace kvstrata {

void verify_each(Crew& crew, std::span<StoredRecord> records) {
  crew.each(records.size(), [&](std::size_t i) {
    StoredRecord& record = records[i];
    record.status = verify_stored_record(record.bytes, record.length, &record.key);
  });
}

}  // namespace kvstrata
