# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Records: their headers, checksums and verification (`docs/internals/formats.md`).
#
# Addresses are ints: memory is never touched through Python objects.  The caller keeps an address mapped until the
# call has returned.  Calls that touch payloads drop the GIL.  Every ValueError names the argument.

cdef extern from "base/crew.h" namespace "kvstrata" nogil:
    cdef cppclass Crew:
        Crew(size_t) except +


cdef extern from "record/record.h" namespace "kvstrata" nogil:
    cdef struct StoredRecord:
        const void* bytes
        uint64_t length
        Digest key
        Status status
    cdef cppclass RecordSpan "std::span<kvstrata::StoredRecord>":
        RecordSpan(StoredRecord*, size_t)
    void verify_each(Crew&, RecordSpan) except +


class CopyOutcome(enum.IntEnum):
    """What became of one record. Functions return these as plain ints."""

    OK = 0
    # Sound headers, but another chunk's key; no block was touched.
    STALE = 1
    # Headers or a section do not match their CRC; blocks already written must not be used.
    CORRUPT = 2
    # A sound record that this call cannot use: it has another shape than the plan or another format version, or is
    # encoded.
    MISMATCH = 3
    # The copy never began.
    CANCELLED = 4
    # Out of memory; for a copy by a GPU also the failures that `cuda.CudaCopyEngine` lists.
    FAILED = 5


class RecordError(MediumError):
    """The headers of a record are unsound; `field` names what is wrong."""

    code = "bad_record"


class RecordHeader(NamedTuple):
    """The checked headers of a record.

    `codecs` are the numbers of the codecs in the order of encoding; empty: the payload is stored as it is.  `sections`
    are (offset from the payload's start, length, crc).
    """

    key: bytes
    identity: bytes
    slice_digest: bytes
    parent_key: bytes
    chunk_tokens: int
    created_unix_ms: int
    header_bytes: int
    payload_bytes: int
    stored_bytes: int
    stored_crc: int
    codecs: bytes
    sections: tuple[tuple[int, int, int], ...]


cdef bytes digest_bytes(Digest& digest):
    return PyBytes_FromStringAndSize(<char*>digest.data(), 32)


def record_bytes(section_count: int, payload_bytes: int) -> int:
    """Length of a record: header, section table and payload."""
    cdef uint64_t result = 0
    raise_for(c_record_bytes(whole(section_count, "section_count"), whole(payload_bytes, "payload_bytes"), &result), CALL)
    return result


cdef class RecordSpec:
    """The facts that a record's writer states about its chunk. Keys and digests are 32 bytes."""

    def __cinit__(
        self, key: bytes, identity: bytes, slice_digest: bytes, parent_key: bytes, chunk_tokens: int,
        created_unix_ms: int = 0
    ) -> None:
        """`parent_key` b"" means none; `created_unix_ms` 0 means the time of writing."""
        set_digest(self.spec.key, key, "key")
        set_digest(self.spec.identity, identity, "identity")
        set_digest(self.spec.slice_digest, slice_digest, "slice_digest")
        set_digest(self.spec.parent_key, parent_key or bytes(32), "parent_key")
        self.spec.chunk_tokens = whole32(chunk_tokens, "chunk_tokens")
        self.spec.created_unix_ms = whole(created_unix_ms, "created_unix_ms")

    @property
    def key(self) -> bytes:
        return digest_bytes(self.spec.key)


cdef int verify(object address, object length, object expected_key, bint stored, Status* status) except -1:
    cdef const void* record = <const void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef Digest key
    cdef const Digest* expected = NULL
    if record == NULL:
        raise ValueError("address: may not be 0")
    if expected_key is not None:
        set_digest(key, expected_key, "expected_key")
        expected = &key
    with nogil:
        if stored:
            status[0] = c_verify_stored_record(record, n, expected)
        else:
            status[0] = c_verify_record(record, n, expected)
    return 0


def verify_record(address: int, length: int, expected_key: bytes | None) -> int:
    """Checks headers, key (unless None) and every section; returns a `CopyOutcome`.

    Never reads outside the `length` bytes, whatever they contain.
    """
    cdef Status status
    verify(address, length, expected_key, False, &status)
    return <int>copy_outcome(status)


def verify_stored_record(address: int, length: int, expected_key: bytes | None) -> int:
    """As `verify_record`, for a record as a medium stores it: of an encoded record, the stored bytes are checked."""
    cdef Status status
    verify(address, length, expected_key, True, &status)
    return <int>copy_outcome(status)


cdef class Verifier:
    """Threads that help to verify many records at once: one core checks bytes slower than memory delivers them."""

    cdef unique_ptr[Crew] crew

    def __cinit__(self, helpers: int) -> None:
        """At most `helpers` threads besides the caller's. They start with the first work and end with the object."""
        self.crew.reset(new Crew(<size_t>whole(helpers, "helpers")))

    def __dealloc__(self):
        with nogil:
            self.crew.reset()

    def verify_stored(self, records: Sequence[tuple[int, int, bytes]]) -> list[int]:
        """`verify_stored_record` of each (address, length, expected key), without the GIL; thread-safe."""
        cdef vector[StoredRecord] given
        cdef size_t i = 0
        given.resize(len(records))
        for address, length, key in records:
            given[i].bytes = <const void*><size_t>whole(address, "address")
            given[i].length = whole(length, "length")
            if given[i].bytes == NULL:
                raise ValueError("address: may not be 0")
            set_digest(given[i].key, key, "key")
            i += 1
        with nogil:
            verify_each(self.crew.get()[0], RecordSpan(given.data(), given.size()))
        return [<int>copy_outcome(given[i].status) for i in range(given.size())]


cdef int read_header(
    object address, object length, CRecordHeader* header, vector[Section]& sections
) except -1:
    """Read the checked headers and all rows of the section table. Raises RecordError if the record fails a check."""
    cdef const void* record = <const void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef Status status
    if record == NULL:
        raise ValueError("address: may not be 0")
    sections.resize(256)
    with nogil:
        status = read_record_header(record, n, header, sections.data(), sections.size())
        if status.ok() and header.section_count > sections.size():
            sections.resize(header.section_count)
            status = read_record_header(record, n, header, sections.data(), sections.size())
            # The bytes may change between two reads; callers index `sections` up to `section_count`.
            if status.ok() and header.section_count > sections.size():
                header.section_count = <uint32_t>sections.size()
    return raise_for(status, RECORD)


def write_encoded_header(
    address: int, length: int, source_address: int, source_length: int, codecs: Buffer, stored_bytes: int,
    stored_crc: int = 0
) -> int:
    """Writes the header of a record whose payload is stored encoded, and returns its length.

    All other fields are as in the header of `source`.  Raises RecordError for an unsound source, ValueError for bad
    arguments.
    """
    cdef CRecordHeader header
    cdef vector[Section] sections
    cdef RecordEncoding encoding
    cdef void* record = <void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef BorrowedBuffer chain
    cdef Status status
    chain.take(codecs)
    if chain.bytes() > 8:
        raise ValueError(f"codecs: a record names at most 8 codecs, not {chain.bytes()}")
    encoding.stored_bytes = whole(stored_bytes, "stored_bytes")
    encoding.stored_crc = whole32(stored_crc, "stored_crc")
    memcpy(encoding.codecs, chain.data(), chain.bytes())
    read_header(source_address, source_length, &header, sections)
    with nogil:
        status = c_write_encoded_header(
            record, n, header.spec, sections.data(), header.section_count, encoding
        )
    raise_for(status, CALL)
    return header.header_bytes


def write_decoded_header(address: int, length: int, source_address: int, source_length: int) -> None:
    """Writes the header of the record that the encoded record at `source` decodes to.

    Raises as `write_encoded_header`.
    """
    cdef CRecordHeader header
    cdef vector[Section] sections
    cdef void* record = <void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef Status status
    read_header(source_address, source_length, &header, sections)
    with nogil:
        status = write_record_header(record, n, header.spec, sections.data(), header.section_count)
    raise_for(status, CALL)


def explain_record(address: int, length: int, expected_key: bytes | None) -> str | None:
    """Why `verify_stored_record` does not answer OK, naming field or section, for a log; None if it does answer OK."""
    cdef Status status
    verify(address, length, expected_key, True, &status)
    return None if status.ok() else message_of(status)


def record_header(address: int, length: int) -> RecordHeader:
    """The headers of a record, checked except for the payload. Raises RecordError."""
    cdef CRecordHeader header
    cdef vector[Section] sections
    read_header(address, length, &header, sections)
    return RecordHeader(
        digest_bytes(header.spec.key),
        digest_bytes(header.spec.identity),
        digest_bytes(header.spec.slice_digest),
        digest_bytes(header.spec.parent_key),
        header.spec.chunk_tokens,
        header.spec.created_unix_ms,
        header.header_bytes,
        header.payload_bytes,
        header.stored_bytes,
        header.stored_crc,
        (<char*>header.codecs)[:8].rstrip(b"\0"),
        tuple([(sections[i].offset, sections[i].length, sections[i].crc) for i in range(header.section_count)]),
    )


def seal_record(address: int, length: int, RecordSpec spec not None, section_lengths: Sequence[int]) -> None:
    """Computes the CRCs of a payload, and writes the header into the room that was left before the payload.

    For writers that did not gather with a plan.  Raises ValueError, before anything is written.
    """
    cdef void* record = <void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef vector[uint32_t] lengths
    cdef Status status
    for section_length in section_lengths:
        lengths.push_back(whole32(section_length, "section_lengths"))
    with nogil:
        status = c_seal_record(record, n, spec.spec, lengths.data(), lengths.size())
    raise_for(status, CALL)
