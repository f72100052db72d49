"""Encoding and decoding of records: the codecs, their order, and the bytes that they write (`docs/formats.md`).

This module knows no adapters and no event loop.  Any number of threads may encode and decode at the same time.

    fp8 (1)       lossy; only for engines that opted in
    planes2 (2)   sorts the bytes of 16-bit numbers into planes; only before zstd
    zstd (3)      in slabs of 1 MiB
    aes-gcm (4, 5) and mac (6)   codec_seal.py

Invariants
1. Codecs are applied in the order of their numbers, each at most once; a record names those that were applied to it.
2. When `decode` returns, its target has passed the checksum of every section of the original record.
3. Whatever a record claims, `decode` allocates and writes no more than its target and one slab.
"""

from __future__ import annotations

import collections
import importlib.util
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from kvstrata.native import copying
from kvstrata.native import record as native_record
from kvstrata.native.codec import fp8_decode, fp8_encode, fp8_sizes, join_planes, split_planes
from kvstrata.native.copying import buffer_address
from kvstrata.native.record import CopyOutcome, RecordError
from kvstrata.policy.reasons import LENGTH, UNAUTHENTICATED
from kvstrata.storage.base import PayloadKind
from kvstrata.storage.wrap.codec_fields import ChainSettings
from kvstrata.storage.wrap.codec_seal import (
    AES_GCM,
    SEAL_BYTES,
    SEALS,
    TAG_BYTES,
    BadRecord,
    CannotDecode,
    Seals,
)
from kvstrata.storage.wrap.staging import PAGE_BYTES

FP8, PLANES2, ZSTD = 1, 2, 3
SLAB_BYTES = 1 << 20
RAW_SLAB = 1 << 31
LARGEST_FP8_SECTION_BYTES = 64 << 20
_FP8_FRAME = struct.Struct("<B3x5II")
_LENGTH = struct.Struct("<Q")
NOTHING = memoryview(bytearray())


class Encoded(NamedTuple):
    """The result of `encode`: the encoded record's length (0: store the record as it is), and its codecs."""

    length: int
    codecs: bytes


class _Tools:
    """The buffers and zstd contexts that one thread needs while it encodes or decodes."""

    def __init__(self, level: int, has_zstd: bool) -> None:
        if has_zstd:
            import zstandard

            self.compressor = zstandard.ZstdCompressor(level=level)
            self.decompressor = zstandard.ZstdDecompressor(max_window_size=SLAB_BYTES)
        self.slab = bytearray(SLAB_BYTES)
        self.section = bytearray()


class Chain:
    """The codecs of one adapter. It decodes with any codec that a record names, if it has the library and the key."""

    def __init__(self, settings: ChainSettings) -> None:
        self.settings = settings
        self.encodes = settings.encodes
        self._tools: collections.deque[_Tools] = collections.deque()
        """Tools that no thread uses now; they are kept because making them is expensive."""
        self._has_zstd = importlib.util.find_spec("zstandard") is not None
        self.seals = Seals(settings)

    def cannot_decode(self, codecs: bytes) -> str:
        """The short reason why a record with these codec numbers cannot be decoded here; empty if it can."""
        if any(number not in (FP8, PLANES2, ZSTD, *SEALS) for number in codecs) or list(codecs) != sorted(
            set(codecs)
        ):
            return "codec_unknown"
        sealed = sum(number in SEALS for number in codecs)
        if (PLANES2 in codecs and ZSTD not in codecs) or sealed > 1:
            return "codec_unknown"
        if self.settings.authenticates and not sealed:
            return UNAUTHENTICATED
        if ZSTD in codecs and not self._has_zstd:
            return "codec_missing"
        if sealed and not self.seals.reads:
            return "no_key"
        return ""

    def staging_bytes(self, record_bytes: int) -> int:
        """Bytes that `encode` needs in the worst case for a record of this length."""
        slabs = -(-record_bytes // SLAB_BYTES)
        encoded_bytes = record_bytes + SEAL_BYTES + _LENGTH.size + 4 * slabs
        return encoded_bytes + (fp8_room(record_bytes) if self.settings.fp8 else 0)

    @staticmethod
    def longest_stored_bytes(codecs: bytes, record_bytes: int) -> int:
        """The longest stored record that these codecs make of a record of this length."""
        longest = record_bytes
        if FP8 in codecs:
            longest = max(longest, fp8_room(record_bytes))
        if ZSTD in codecs:
            longest += _LENGTH.size + 4 * -(-longest // SLAB_BYTES)
        return longest + (SEAL_BYTES if any(number in SEALS for number in codecs) else 0)

    @staticmethod
    def scratch_bytes(codecs: bytes, record_bytes: int) -> int:
        """Bytes that `decode` needs beside the stored record for a record that decodes to this length."""
        return fp8_room(record_bytes) if FP8 in codecs and ZSTD in codecs else 0

    # -- encoding ------------------------------------------------------------------------------------------

    def encode(
        self, source: memoryview, target: memoryview, kind_of: Callable[[bytes, bytes], PayloadKind | None]
    ) -> Encoded:
        """Encode the record `source` into `target`, which is `staging_bytes` long.

        The result's length is 0 if no codec changed the record; store it as it is then.  (zstd is left out where it
        would not make the record shorter.)  `kind_of(identity, slice digest)` describes the payload, if it is known.
        A description has a shape only if the engine has opted in to fp8, and only such payloads are encoded as fp8.
        """
        source_at, source_bytes = buffer_address(source), len(source)
        header = native_record.record_header(source_at, source_bytes)
        start, n = header.header_bytes, header.payload_bytes
        payload = source[start : start + n]
        kind = kind_of(header.identity, header.slice_digest)
        zstd, seal = self.settings.zstd, self.seals.writes
        body_at = start + (SEAL_BYTES - TAG_BYTES if seal else 0)
        codecs, section_crcs = b"", None
        if self.settings.fp8 and kind is not None and kind.fp8 is not None:
            room = target[len(target) - fp8_room(source_bytes) :]
            lengths = [length for _, length, _ in header.sections]
            made = self._to_fp8(kind.fp8, payload, lengths, room)
            if made is not None:
                payload, section_crcs = made
                codecs = bytes([FP8])
        body_bytes = len(payload)
        if zstd is not None:
            element_bytes = 1 if codecs else zstd.planes or (kind.element_bytes if kind is not None else 2)
            splits = element_bytes == 2
            compressed = self._compress(payload, target[body_at : body_at + _frame_bytes(body_bytes)], splits)
            if compressed < body_bytes:
                codecs += bytes([PLANES2, ZSTD] if splits else [ZSTD])
                body_bytes = compressed
                payload = target[body_at : body_at + body_bytes]
        if not codecs and not seal:
            return Encoded(0, b"")
        at = buffer_address(target, writable=True)
        stored_bytes = body_bytes
        if seal != AES_GCM and ZSTD not in codecs:
            copying.copy_at(
                buffer_address(target) + body_at, buffer_address(payload), body_bytes, cached=True
            )
        if seal:
            codecs += bytes([seal])
            stored_bytes += SEAL_BYTES
            native_record.write_encoded_header(
                at, len(target), source_at, source_bytes, codecs, stored_bytes, 0, section_crcs
            )
            self.seals.write(
                header.identity, payload, target[: start + stored_bytes], start, len(header.sections)
            )
        stored_crc = copying.crc32c_at(at + start, stored_bytes)
        native_record.write_encoded_header(
            at, len(target), source_at, source_bytes, codecs, stored_bytes, stored_crc, section_crcs
        )
        return Encoded(start + stored_bytes, codecs)

    def _to_fp8(
        self, fp8: tuple[int, ...], payload: memoryview, lengths: list[int], out: memoryview
    ) -> tuple[memoryview, list[int]] | None:
        """Encode `payload` with fp8 into `out`; returns the used part of `out`, and the CRCs of the decoded sections.

        A tail has fewer blocks than the shape `fp8`.  None if the payload does not have this shape otherwise, or a
        number is not finite.
        """
        dtype, most_blocks, rest = fp8[0], fp8[1], fp8[2:]
        section_bytes, count = lengths[0] if lengths else 0, len(lengths)
        blocks = section_bytes // (2 * math.prod(rest))
        shape = (min(max(blocks, 1), most_blocks), *rest)
        n, scales = fp8_sizes(shape)
        if set(lengths) != {2 * n} or 2 * n > LARGEST_FP8_SECTION_BYTES:
            return None
        scales_at = _FP8_FRAME.size
        codes_at = scales_at + 4 * scales * count
        out = out[: codes_at + n * count]
        _FP8_FRAME.pack_into(out, 0, dtype, *shape, count)
        tools = self._take_tools()
        try:
            if len(tools.section) < 2 * n:
                tools.section = bytearray(2 * n)
            section = memoryview(tools.section)[: 2 * n]
            crcs = []
            for i in range(count):
                of = out[scales_at + 4 * scales * i :][: 4 * scales]
                codes = out[codes_at + n * i :][:n]
                if not fp8_encode(shape, dtype, payload[2 * n * i : 2 * n * (i + 1)], codes, of):
                    return None
                fp8_decode(shape, dtype, codes, of, section)
                crcs.append(copying.crc32c(section))
        finally:
            self._tools.append(tools)
        return out, crcs

    def _compress(self, payload: memoryview, out: memoryview, splits: bool) -> int:
        """Compress `payload` with zstd into `out`; returns the number of bytes written."""
        tools = self._take_tools()
        n = len(payload)
        table_at, at = _LENGTH.size, _LENGTH.size + 4 * -(-n // SLAB_BYTES)
        _LENGTH.pack_into(out, 0, n)
        for begin in range(0, n, SLAB_BYTES):
            slab = payload[begin : begin + SLAB_BYTES]
            if splits:
                planes = memoryview(tools.slab)[: len(slab)]
                split_planes(planes, slab)
                slab = planes
            reader = tools.compressor.stream_reader(slab, size=len(slab))
            size = _fill(reader, out[at : at + len(slab) - 1])
            if size < 0:  # compression would not make the slab shorter
                out[at : at + len(slab)] = slab
                size = len(slab) | RAW_SLAB
            struct.pack_into("<I", out, table_at, size)
            table_at += 4
            at += size & ~RAW_SLAB
        self._tools.append(tools)
        return at

    # -- decoding ------------------------------------------------------------------------------------------

    def decode(
        self, stored: memoryview, target: memoryview, key: bytes, scratch: memoryview = NOTHING
    ) -> None:
        """Decode `stored`, which is overwritten, into `target`, and verify the record there.

        `scratch` is `scratch_bytes` long.  Raises BadRecord or CannotDecode; CannotDecode also if `target` has another
        length than the record.
        """
        stored_at = buffer_address(stored, writable=True)
        try:
            header = native_record.record_header(stored_at, len(stored))
        except RecordError as error:
            raise BadRecord(str(error)) from None
        start, n = header.header_bytes, header.payload_bytes
        if start + header.stored_bytes != len(stored):
            raise BadRecord(f"{len(stored)} bytes instead of {start + header.stored_bytes}")
        if reason := self.cannot_decode(header.codecs):
            raise CannotDecode(reason, f"codecs {list(header.codecs)}")
        if len(target) != start + n:
            raise CannotDecode(LENGTH, f"{len(target)} bytes were reserved for {start + n}")
        body = stored[start:]
        for codec in header.codecs:
            if codec in SEALS:
                body = self.seals.read(codec, header.identity, stored, start, len(header.sections))
        if FP8 in header.codecs:
            if ZSTD in header.codecs:
                (fp8_bytes,) = _LENGTH.unpack_from(body, 0) if len(body) >= _LENGTH.size else (0,)
                if fp8_bytes > fp8_room(len(target)):
                    raise BadRecord("fp8: longer than the numbers")
                if fp8_bytes > len(scratch):
                    raise CannotDecode(LENGTH, "no scratch room: its codecs were not known before the load")
                self._decompress(body, scratch[:fp8_bytes], PLANES2 in header.codecs)
                body = scratch[:fp8_bytes]
            _from_fp8(body, target[start:])
        elif ZSTD in header.codecs:
            self._decompress(body, target[start:], PLANES2 in header.codecs)
        elif len(body) == n:
            copying.copy_at(
                buffer_address(target, writable=True) + start, buffer_address(body), n, cached=True
            )
        else:
            raise BadRecord(f"{len(body)} bytes decoded instead of {n}")
        target_at = buffer_address(target, writable=True)
        native_record.write_decoded_header(target_at, len(target), stored_at, len(stored))
        if native_record.verify_record(target_at, len(target), key) != CopyOutcome.OK:
            why = native_record.explain_record(target_at, len(target), key)
            _clear(target)
            raise BadRecord(f"decoded to other bytes than the original: {why}")

    def _decompress(self, body: memoryview, out: memoryview, joins: bool) -> None:
        import zstandard

        n = len(out)
        slabs = -(-n // SLAB_BYTES)
        table_at, at = _LENGTH.size, _LENGTH.size + 4 * slabs
        if len(body) < at or _LENGTH.unpack_from(body, 0)[0] != n:
            raise BadRecord("zstd: the frame has another length than the payload")
        tools = self._take_tools()
        try:
            for begin in range(0, n, SLAB_BYTES):
                slab = out[begin : begin + SLAB_BYTES]
                (size,) = struct.unpack_from("<I", body, table_at)
                table_at += 4
                packed = body[at : at + (size & ~RAW_SLAB)]
                at += size & ~RAW_SLAB
                planes = memoryview(tools.slab)[: len(slab)] if joins else slab
                if size & RAW_SLAB:
                    if len(packed) != len(slab):
                        raise BadRecord("zstd: an uncompressed slab has another length")
                    planes[:] = packed
                elif _fill(tools.decompressor.stream_reader(packed), planes) != len(slab):
                    raise BadRecord("zstd: a slab decodes to another length")
                if joins:
                    join_planes(slab, planes)
        except zstandard.ZstdError as error:
            raise BadRecord(f"zstd: {error}") from None
        finally:
            self._tools.append(tools)
        if at != len(body):
            raise BadRecord("zstd: bytes are left over")

    def _take_tools(self) -> _Tools:
        try:
            return self._tools.pop()
        except IndexError:
            return _Tools(self.settings.zstd.level if self.settings.zstd is not None else 1, self._has_zstd)


def fp8_room(record_bytes: int) -> int:
    """An upper bound for the fp8 codec's bytes of a record of this length: one code per 2 bytes, one scale per 32."""
    return record_bytes * 5 // 8 + PAGE_BYTES


def _frame_bytes(n: int) -> int:
    """The longest result of the zstd codec for n bytes."""
    return _LENGTH.size + 4 * -(-n // SLAB_BYTES) + n


def _from_fp8(body: memoryview, out: memoryview) -> None:
    """Decode the fp8 codec's bytes."""
    if len(body) < _FP8_FRAME.size:
        raise BadRecord("fp8: too short")
    dtype, *shape, count = _FP8_FRAME.unpack_from(body, 0)
    try:
        n, scales = fp8_sizes(shape)
    except ValueError as error:
        raise BadRecord(f"fp8: {error}") from None
    codes_at = _FP8_FRAME.size + 4 * scales * count
    if dtype not in (1, 2) or 2 * n * count != len(out) or codes_at + n * count != len(body):
        raise BadRecord("fp8: the frame does not fit the payload")
    for i in range(count):
        of = body[_FP8_FRAME.size + 4 * scales * i :][: 4 * scales]
        fp8_decode(shape, dtype, body[codes_at + n * i :][:n], of, out[2 * n * i : 2 * n * (i + 1)])


def _clear(target: memoryview) -> None:
    """Overwrite the magic, so that the target is not taken for a record."""
    target[:8] = bytes(8)


def _fill(reader: Any, out: memoryview) -> int:
    """Fill `out` from the reader; returns the number of bytes, -1 if it has more than fit."""
    done = 0
    while done < len(out):
        count = reader.readinto(out[done:])
        if count == 0:
            return done
        done += count
    return -1 if reader.read(1) else done
