# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The exceptions that native modules raise for errors of the C++ core, and the reasons that the core reports.
#
# All native modules get their exceptions from this one.  An exception's class depends on the error's code and on its
# *site*, the group of calls that it comes from:
#
# | site | calls | `os_error` | `bad_argument` | `no_space` | `closed` | other codes |
# |---|---|---|---|---|---|---|
# | `call` | all others | OSError | ValueError | MemoryError | ValueError | ValueError |
# | `items` | with items of copies | ValueError | ValueError | MemoryError | ValueError | ValueError |
# | `lanes` | of `NativeLanes` | OSError | ValueError | MemoryError | RuntimeError | ValueError |
# | `record` | that read a record's headers | RecordError | RecordError | RecordError | RecordError | RecordError |
# | `pool` | of a pool and of its mappings | OSError | ValueError | PoolError | PoolError | PoolError |
# | `registry` | of a registry | RegistryError | ValueError | RegistryError | RegistryError | RegistryError |
#
# PoolError and RegistryError have a stable `reason`.

cdef str message_of(const Status& status):
    cdef str text = status.message().decode()
    cdef list parts = []
    if status.detail(0) or status.detail(1):
        parts.append(f"got {status.detail(0)}")
    if status.detail(1):
        parts.append(f"limit {status.detail(1)}")
    if status.detail(2) > 0:
        parts.append(f"at index {status.detail(2)}")
    return f"{text} ({', '.join(parts)})" if parts else text


cdef str _item_message_of(const Status& status):
    where = f"items[{status.detail(2)}]." if status.detail(2) >= 0 else ""
    values = f" (got {status.detail(0)}, limit {status.detail(1)})" if status.detail(1) else ""
    return f"{where}{status.message().decode()}{values}"


cdef object _pool_error(const Status& status):
    reason = word_of(status.reason()) if status.reason() != Reason.kNone else status_code_name(status.code())
    values = f" ({status.detail(0)}, {status.detail(1)})" if status.detail(0) or status.detail(1) else ""
    return PoolError(f"{status.message().decode()}{values}", reason=reason.decode())


cdef object _error_of(const Status& status, Site site, str where):
    cdef StatusCode code = status.code()
    if code == StatusCode.kOsError and site not in (ITEMS, RECORD, REGISTRY):
        number = status.detail(0)
        return OSError(number, f"{where}{status.message().decode()}: {os.strerror(number)}")
    text = where + (_item_message_of(status) if site == ITEMS else message_of(status))
    if site == RECORD:
        return RecordError(text, field=text.partition(":")[0])
    if code == StatusCode.kBadArgument:
        return ValueError(text)
    if site == POOL:
        return _pool_error(status)
    if site == REGISTRY:
        reasons = {StatusCode.kNoSpace: "no_space", StatusCode.kNotFound: "bad_slot"}
        return RegistryError(text, reason=reasons.get(code, "damaged"))
    if code == StatusCode.kNoSpace:
        return MemoryError(text)
    if code == StatusCode.kClosed and site == LANES:
        return RuntimeError(text)
    return ValueError(text)


cdef int raise_for(const Status& status, Site site, str where="") except -1:
    if status.ok():
        return 0
    raise _error_of(status, site, where)


cdef int raise_for_format(
    const Status& status, Site site, const char* field, uint64_t found, uint64_t expected
) except -1:
    if status.code() == StatusCode.kIncompatible:
        raise PoolFormatError(field.decode(), found, expected)
    return raise_for(status, site)
