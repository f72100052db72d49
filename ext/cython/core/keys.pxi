# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Chunk keys in batches (SHA-256; definitions in `docs/internals/formats.md`).

cdef extern from *:
    """
    // Token i of a list, read without a new reference. Negative unless the item is exactly an int (not
    // of a subclass) from 0 to 2^32 - 1.
    static inline long long kvstrata_token(PyObject* list, Py_ssize_t i) {
      PyObject* item = PyList_GET_ITEM(list, i);
      if (!PyLong_CheckExact(item)) {
        return -1;
      }
    #if PY_VERSION_HEX >= 0x030C0000
      if (PyUnstable_Long_IsCompact((PyLongObject*)item)) {
        return (long long)PyUnstable_Long_CompactValue((PyLongObject*)item);
      }
    #else
      const Py_ssize_t size = Py_SIZE(item);
      const digit* digits = ((PyLongObject*)item)->ob_digit;
      if (size == 1) {
        return (long long)digits[0];
      }
      if (size == 0) {
        return 0;
      }
    #endif
      int overflow = 0;
      const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
      return overflow != 0 || value > UINT32_MAX ? -1 : value;
    }
    """
    long long kvstrata_token(object tokens, Py_ssize_t i)

# From this many chunks on, hashing takes long enough (40 us) to release the GIL for other threads. For fewer chunks,
# releasing it could cost the caller more: getting it back takes up to a switch interval.
cdef size_t SHORT_CHUNKS = 64


cdef object odd_token(object token, Py_ssize_t index):
    """The value of a token that kvstrata_token() could not read. Raises ValueError or TypeError, with the index, if the
    object is not a token.
    """
    try:
        value = token.__index__()
    except AttributeError:
        raise TypeError(f"tokens[{index}]: must be an int, not {type(token).__name__}") from None
    if not 0 <= value < 1 << 32:
        raise ValueError(f"tokens[{index}]: must be between 0 and 2**32 - 1, not {value}")
    return value


cdef int tokens_of_list(object tokens, Py_ssize_t first, size_t n, uint32_t* out) except -1:
    cdef size_t i
    cdef long long value
    for i in range(n):
        value = kvstrata_token(tokens, first + <Py_ssize_t>i)
        if value < 0:
            # The conversion may run code that shortens the list.
            value = odd_token(tokens[first + i], first + i)
            if <size_t>len(tokens) < <size_t>first + n:
                raise ValueError("tokens: the list became shorter while it was read")
        out[i] = <uint32_t>value
    return 0


cdef int read_extras(object extras, size_t chunks, vector[ChunkExtra]& out) except -1:
    cdef ChunkExtra extra
    for chunk in sorted(extras):
        if not 0 <= chunk < chunks:
            raise ValueError(f"extras: chunk {chunk} is not one of the {chunks} full chunks")
        extra.chunk = chunk
        set_digest(extra.bytes, extras[chunk], f"extras[{chunk}]")
        out.push_back(extra)
    return 0


cdef bytes chain(Digest& start, const uint32_t* tokens, size_t n, size_t chunk_tokens, object extras):
    cdef size_t chunks = n // chunk_tokens
    cdef vector[ChunkExtra] list_of
    if extras:
        read_extras(extras, chunks, list_of)
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(chunks * 32))
    cdef Digest* out = <Digest*>PyBytes_AS_STRING(keys)
    if chunks < SHORT_CHUNKS:
        c_chain_keys(start, U32Span(tokens, n), chunk_tokens, ExtraSpan(list_of.data(), list_of.size()), out)
    else:
        with nogil:
            c_chain_keys(
                start, U32Span(tokens, n), chunk_tokens, ExtraSpan(list_of.data(), list_of.size()), out
            )
    return keys


def chain_keys(
    start: bytes, tokens: Sequence[int] | Buffer, chunk_tokens: int,
    extras: Mapping[int, bytes] | None = None, first: int = 0
) -> bytes:
    """Chain keys of the full chunks of tokens[first:], 32 bytes each; tokens after the last full chunk are ignored.

    `start` is the chain key of the chunk before, or the identity's root.  `tokens` is a sequence of ints or a
    buffer of 32-bit unsigned numbers (a `bytes` object holds them little-endian).  `extras` maps the number of a chunk
    in this call to the 32 bytes that stand for its content other than tokens (media).

    Raises ValueError naming index and value for a token outside 0..2**32-1, and ValueError for an extra whose chunk is
    not full; TypeError for a token that is not an int.  Drops the GIL while it hashes 64 chunks or more.
    """
    cdef Digest previous
    cdef Py_ssize_t size = chunk_tokens
    cdef Py_ssize_t begin = first
    cdef Py_ssize_t total
    cdef size_t n
    cdef Py_buffer view
    cdef vector[uint32_t] converted
    set_digest(previous, start, "start")
    if size < 1:
        raise ValueError(f"chunk_tokens: must be at least 1, not {chunk_tokens}")
    if begin < 0:
        raise ValueError(f"first: must be at least 0, not {first}")

    if not PyObject_CheckBuffer(tokens):
        if not isinstance(tokens, list):
            tokens = list(tokens)
        total = len(tokens)
        n = <size_t>(max(total - begin, 0) // size * size)
        converted.resize(n)
        tokens_of_list(tokens, begin, n, converted.data())
        return chain(previous, converted.data(), n, size, extras)

    PyObject_GetBuffer(tokens, &view, PyBUF_FORMAT | PyBUF_ND)
    try:
        fmt = (<bytes>view.format).decode() if view.format != NULL else "B"
        if view.itemsize == 4 and fmt.lstrip("@=<") in ("I", "L"):
            total = view.len // 4
        elif view.itemsize == 1 and view.len % 4 == 0:
            total = view.len // 4
        else:
            raise ValueError(
                f"tokens: a buffer must hold 32-bit unsigned numbers (format 'I') or bytes of such, not "
                f"format {fmt!r} with {view.len} bytes"
            )
        n = <size_t>(max(total - begin, 0) // size * size)
        if <uintptr_t>view.buf % sizeof(uint32_t) == 0:
            return chain(previous, <const uint32_t*>view.buf + (begin if n else 0), n, size, extras)
        converted.resize(n)
        if n:
            memcpy(converted.data(), <const char*>view.buf + begin * 4, n * 4)
        return chain(previous, converted.data(), n, size, extras)
    finally:
        PyBuffer_Release(&view)


def storage_keys(root: Buffer, chain: Buffer, slice_digests: Buffer) -> bytes:
    """SHA-256(chain key ‖ SHA-256(root ‖ slice digest)) for each pair, chunk-major: all slices of chunk 0, then of 1, …

    `root` is the identity's.  Since it enters here once more, no chain key gives a storage key of another identity: a
    process that names foreign chain keys reaches nothing but chunks of its own identities.
    """
    cdef Digest identity
    cdef BorrowedBuffer first, second
    cdef size_t n = borrow(first, chain, KEY_BYTES, "chain")
    cdef size_t m = borrow(second, slice_digests, KEY_BYTES, "slice_digests")
    if m == 0:
        raise ValueError("slice_digests: must be one or more digests of 32 bytes, not 0 bytes")
    set_digest(identity, root, "root")
    cdef bytes keys = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(n * m * 32))
    cdef Digest* out = <Digest*>PyBytes_AS_STRING(keys)
    if n == 0:
        return keys
    cdef const Digest* c = <const Digest*>first.data()
    cdef const Digest* s = <const Digest*>second.data()
    if n * m < 4 * SHORT_CHUNKS:
        c_storage_keys(identity, DigestSpan(c, n), DigestSpan(s, m), out)
    else:
        with nogil:
            c_storage_keys(identity, DigestSpan(c, n), DigestSpan(s, m), out)
    return keys


def sha256_path() -> str:
    """The implementation in use: scalar, armsha2 or shani."""
    return c_sha256_path().decode()
