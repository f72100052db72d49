"""Encoding and decoding of records: the codecs, their order, and what their bytes are (`docs/formats.md`).

Knows bytes only: no adapters, no event loop.  Any number of threads may encode and decode at the same time.

    fp8 (1)       lossy; only for engines that opted in
    planes2 (2)   bytes of 16-bit numbers sorted into planes; only before zstd
    zstd (3)      in slabs of 1 MiB
    aes-gcm (4)   with a key derived per identity, and the headers as associated data

Invariants
1. A chain is applied in the order of the numbers, each at most once; a record says which were applied to it.
2. What `decode` leaves in its target has passed the checksum of every section of the original record.
3. Nothing that a record claims makes `decode` allocate or write more than its target and one slab.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvstrata.config.lmcache_names import nearest
from kvstrata.config.private_file import read_token_file
from kvstrata.errors import ConfigError
from kvstrata.native import copying
from kvstrata.native.codec import fp8_decode, fp8_encode, fp8_sizes, join_planes, split_planes
from kvstrata.native.copying import CopyOutcome, RecordError, buffer_address
from kvstrata.storage.base import PayloadKind
from kvstrata.storage.wrap.staging import PAGE_BYTES

FP8, PLANES2, ZSTD, AES_GCM = 1, 2, 3, 4
SLAB_BYTES = 1 << 20
RAW_SLAB = 1 << 31
NONCE_BYTES, TAG_BYTES = 12, 16
MIN_KEY_CHARS = 32
NAMES = ("fp8", "zstd", "aes-gcm")
LARGEST_FP8_SECTION_BYTES = 64 << 20
_FP8_FRAME = struct.Struct("<B3x5II")
_LENGTH = struct.Struct("<Q")
_STORED_CRC = slice(96, 100)
_OUTER_CRC_AT = 252
_INNER_AT = 256
_ROW_BYTES = 16
NOTHING = memoryview(bytearray())
_PIP = "pip install 'kvstrata[codecs]'"


class CannotDecode(Exception):
    """A sound record that this server cannot decode. `reason` is a short word for outcomes."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class BadRecord(Exception):
    """The stored bytes are not what any codec wrote."""


class ZstdOptions(NamedTuple):
    level: int = 1
    planes: int | None = None
    """Bytes of a number (1 or 2); None: as the identity's dtype says, 2 where that is not known."""


class Encoded(NamedTuple):
    """What `encode` made: the stored record's length, 0 where it is to be stored as it is, and its codecs."""

    length: int
    codecs: bytes


class ChainSettings(NamedTuple):
    """A checked `codec` field. The empty one stores records as they are."""

    fp8: bool = False
    zstd: ZstdOptions | None = None
    master_key: bytes = b""
    """For aes-gcm; empty: not encrypted."""


def read_chain(value: object, path: str) -> ChainSettings:
    """The chain that the field `path` asks for. Raises ConfigError naming the part that is wrong."""
    if value is None:
        return ChainSettings()
    entries = value if isinstance(value, list) else [value]
    settings = ChainSettings()
    seen: list[str] = []
    for i, entry in enumerate(entries):
        where = f"{path}[{i}]" if isinstance(value, list) else path
        options: Mapping[str, Any] = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
            raise ConfigError(
                f'{where}: must be the name of a codec or an object with a "name", found {entry!r:.80}',
                field=where,
            )
        name = options["name"]
        if name not in NAMES:
            raise ConfigError(
                f"{where}: unknown codec {name!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}",
                field=where,
            )
        if seen and NAMES.index(name) <= NAMES.index(seen[-1]):
            raise ConfigError(
                f"{where}: {name!r} cannot come after {seen[-1]!r}; the order is {', '.join(NAMES)}, each once",
                field=where,
            )
        seen.append(name)
        if name == "fp8":
            known: tuple[str, ...] = ("name",)
            settings = settings._replace(fp8=True)
        elif name == "zstd":
            _need("zstandard", where, name)
            known = ("name", "level", "planes")
            settings = settings._replace(
                zstd=ZstdOptions(
                    _whole(options, "level", where, 1, -50, 19), _whole(options, "planes", where, None, 1, 2)
                )
            )
        else:
            _need("cryptography", where, name)
            known = ("name", "key_file")
            file = options.get("key_file")
            if not isinstance(file, str) or not file:
                raise ConfigError(
                    f"{where}.key_file: must be the path of a file with the key, found {file!r:.80}",
                    field=f"{where}.key_file",
                )
            settings = settings._replace(master_key=_read_key(os.path.expanduser(file), f"{where}.key_file"))
        for field in options:
            if field not in known:
                raise ConfigError(
                    f"{where}.{field}: unknown field{nearest(str(field), known)}", field=f"{where}.{field}"
                )
    return settings


def _need(module: str, where: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{where}: {name!r} needs the Python package {module!r}, which is not installed; {_PIP}",
            field=where,
        )


def _whole(options: Mapping[str, Any], name: str, where: str, default: Any, least: int, most: int) -> Any:
    value = options.get(name, default)
    if value is default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"{where}.{name}: must be a whole number from {least} to {most}, found {value!r:.80}",
            field=f"{where}.{name}",
        )
    return value


def _read_key(path: str, field: str) -> bytes:
    key = read_token_file(path, field)
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{field}: {path} holds {len(key)} characters, a key has at least {MIN_KEY_CHARS}; make one with"
            " openssl rand -hex 32",
            field=field,
        )
    return key.encode()


class _Tools:
    """What one thread needs while it encodes or decodes."""

    def __init__(self, level: int, has_zstd: bool) -> None:
        if has_zstd:
            import zstandard

            self.compressor = zstandard.ZstdCompressor(level=level)
            self.decompressor = zstandard.ZstdDecompressor(max_window_size=SLAB_BYTES)
        self.slab = bytearray(SLAB_BYTES)
        self.section = bytearray()


class Chain:
    """The codecs of one adapter. Decodes whatever a record says, if it has the library and the key for it."""

    def __init__(self, settings: ChainSettings) -> None:
        self.settings = settings
        self.encodes = settings.fp8 or settings.zstd is not None or bool(settings.master_key)
        self._tools: collections.deque[_Tools] = collections.deque()
        """Of threads that have ended their work; they are dear to make."""
        self._has_zstd = importlib.util.find_spec("zstandard") is not None
        self._keys: dict[bytes, bytes] = {}

    def cannot_decode(self, codecs: bytes) -> str:
        """Why a record with these codec numbers cannot be decoded here, in a short word; empty if it can."""
        if any(number not in (FP8, PLANES2, ZSTD, AES_GCM) for number in codecs) or list(codecs) != sorted(
            set(codecs)
        ):
            return "codec_unknown"
        if PLANES2 in codecs and ZSTD not in codecs:
            return "codec_unknown"
        if ZSTD in codecs and not self._has_zstd:
            return "codec_missing"
        if AES_GCM in codecs and not self.settings.master_key:
            return "no_key"
        return ""

    def staging_bytes(self, record_bytes: int) -> int:
        """Bytes that `encode` needs for the longest outcome of a record of this length."""
        slabs = -(-record_bytes // SLAB_BYTES)
        encoded_bytes = record_bytes + NONCE_BYTES + TAG_BYTES + _LENGTH.size + 4 * slabs
        return encoded_bytes + (fp8_room(record_bytes) if self.settings.fp8 else 0)

    @staticmethod
    def scratch_bytes(codecs: bytes, record_bytes: int) -> int:
        """Bytes that `decode` needs beside the stored record, for one that decodes to this length."""
        return fp8_room(record_bytes) if FP8 in codecs and ZSTD in codecs else 0

    # -- encoding ------------------------------------------------------------------------------------------

    def encode(
        self, source: memoryview, target: memoryview, kind_of: Callable[[bytes, bytes], PayloadKind | None]
    ) -> Encoded:
        """Encode the record `source` into `target`, which is `staging_bytes` long.

        Its length is 0 when it would not become shorter and need not be encrypted: store it as it is then.
        `kind_of(identity, slice digest)` says what the payload is made of, where that is known; only of payloads
        whose engine has opted in does it tell a shape, and only those are made fp8.
        """
        source_at, source_bytes = buffer_address(source), len(source)
        header = copying.record_header(source_at, source_bytes)
        start, n = header.header_bytes, header.payload_bytes
        payload = source[start : start + n]
        kind = kind_of(header.identity, header.slice_digest)
        zstd, encrypts = self.settings.zstd, bool(self.settings.master_key)
        body_at = start + (NONCE_BYTES if encrypts else 0)
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
        if not codecs and not encrypts:
            return Encoded(0, b"")
        at = buffer_address(target, writable=True)
        stored_bytes = body_bytes
        if encrypts:
            codecs += bytes([AES_GCM])
            stored_bytes += NONCE_BYTES + TAG_BYTES
            copying.write_encoded_header(
                at, len(target), source_at, source_bytes, codecs, stored_bytes, 0, section_crcs
            )
            self._encrypt(
                header.identity, payload, target[: start + stored_bytes], start, len(header.sections)
            )
        elif ZSTD not in codecs:
            copying.copy_at(at + start, buffer_address(payload), body_bytes, cached=True)
        stored_crc = copying.crc32c_at(at + start, stored_bytes)
        copying.write_encoded_header(
            at, len(target), source_at, source_bytes, codecs, stored_bytes, stored_crc, section_crcs
        )
        return Encoded(start + stored_bytes, codecs)

    def _to_fp8(
        self, fp8: tuple[int, ...], payload: memoryview, lengths: list[int], out: memoryview
    ) -> tuple[memoryview, list[int]] | None:
        """The fp8 codec's bytes of `payload` in `out`, and the CRCs of the sections that they decode to.

        None where the payload does not have that shape or a number is not finite.
        """
        dtype, shape = fp8[0], fp8[1:]
        n, scales = fp8_sizes(shape)
        if set(lengths) != {2 * n} or 2 * n > LARGEST_FP8_SECTION_BYTES:
            return None
        count = len(lengths)
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
        """The zstd codec's bytes of `payload` into `out`; returns how many."""
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
            if size < 0:  # not shorter
                out[at : at + len(slab)] = slab
                size = len(slab) | RAW_SLAB
            struct.pack_into("<I", out, table_at, size)
            table_at += 4
            at += size & ~RAW_SLAB
        self._tools.append(tools)
        return at

    def _encrypt(
        self, identity: bytes, plain: memoryview, record: memoryview, start: int, n_sections: int
    ) -> None:
        """Nonce, ciphertext and tag of `plain` (which may lie where its ciphertext goes) behind the header."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        nonce = os.urandom(NONCE_BYTES)
        cipher = Cipher(algorithms.AES(self._key_of(identity)), modes.GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(_associated_data(record, n_sections))
        record[start : start + NONCE_BYTES] = nonce
        # The tag's room behind it is what the library wants to have spare.
        cipher.update_into(plain, record[start + NONCE_BYTES :])
        cipher.finalize()
        record[len(record) - TAG_BYTES :] = cipher.tag

    def _key_of(self, identity: bytes) -> bytes:
        """The 256-bit key of one identity, and so of one tenant: HKDF-SHA-256 of the key file's text."""
        key = self._keys.get(identity)
        if key is None:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF

            derive = HKDF(SHA256(), 32, salt=None, info=b"kvstrata aes-gcm 1" + identity)
            key = derive.derive(self.settings.master_key)
            if len(self._keys) >= 4096:
                self._keys.clear()
            self._keys[identity] = key
        return key

    # -- decoding ------------------------------------------------------------------------------------------

    def decode(
        self, stored: memoryview, target: memoryview, key: bytes, scratch: memoryview = NOTHING
    ) -> None:
        """The record that was encoded into `stored` (whose bytes do not survive), into `target`, verified.

        `scratch` has `scratch_bytes`.  Raises BadRecord; CannotDecode, also when `target` has not the record's length.
        """
        stored_at = buffer_address(stored, writable=True)
        try:
            header = copying.record_header(stored_at, len(stored))
        except RecordError as error:
            raise BadRecord(str(error)) from None
        start, n = header.header_bytes, header.payload_bytes
        if start + header.stored_bytes != len(stored):
            raise BadRecord(f"{len(stored)} bytes instead of {start + header.stored_bytes}")
        if reason := self.cannot_decode(header.codecs):
            raise CannotDecode(reason, f"codecs {list(header.codecs)}")
        if len(target) != start + n:
            raise CannotDecode("length", f"{len(target)} bytes were reserved for {start + n}")
        body = stored[start:]
        if AES_GCM in header.codecs:
            body = self._decrypt(header.identity, stored, start, len(header.sections))
        if FP8 in header.codecs:
            if ZSTD in header.codecs:
                (fp8_bytes,) = _LENGTH.unpack_from(body, 0) if len(body) >= _LENGTH.size else (0,)
                if fp8_bytes > fp8_room(len(target)):
                    raise BadRecord("fp8: longer than the numbers")
                if fp8_bytes > len(scratch):
                    raise CannotDecode("length", "its length was not known before")
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
        copying.write_decoded_header(target_at, len(target), stored_at, len(stored))
        if copying.verify_record(target_at, len(target), key) != CopyOutcome.OK:
            why = copying.explain_record(target_at, len(target), key)
            _clear(target)
            raise BadRecord(f"decoded to something else: {why}")

    def _decrypt(self, identity: bytes, stored: memoryview, start: int, n_sections: int) -> memoryview:
        """Decrypts in place; the plain bytes."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        end = len(stored) - TAG_BYTES
        if end < start + NONCE_BYTES:
            raise BadRecord("too short for a nonce and a tag")
        nonce, tag = bytes(stored[start : start + NONCE_BYTES]), bytes(stored[end:])
        cipher = Cipher(algorithms.AES(self._key_of(identity)), modes.GCM(nonce, tag)).decryptor()
        cipher.authenticate_additional_data(_associated_data(stored, n_sections))
        body = stored[start + NONCE_BYTES : end]
        cipher.update_into(body, stored[start + NONCE_BYTES :])
        try:
            cipher.finalize()
        except InvalidTag:
            raise CannotDecode("wrong_key", "encrypted with another key") from None
        return body

    def _decompress(self, body: memoryview, out: memoryview, joins: bool) -> None:
        import zstandard

        n = len(out)
        slabs = -(-n // SLAB_BYTES)
        table_at, at = _LENGTH.size, _LENGTH.size + 4 * slabs
        if len(body) < at or _LENGTH.unpack_from(body, 0)[0] != n:
            raise BadRecord("zstd: the frame is of another length")
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
                        raise BadRecord("zstd: a slab is of another length")
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
    """More bytes than the fp8 codec makes of a record of this length: a code for 2 and a scale for 32 of them."""
    return record_bytes * 5 // 8 + PAGE_BYTES


def _frame_bytes(n: int) -> int:
    """The most that the zstd codec makes of n bytes."""
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
    """Leave no record's magic behind."""
    target[:8] = bytes(8)


def _fill(reader: Any, out: memoryview) -> int:
    """Bytes that the reader had for `out`; -1 when it has more than fit."""
    done = 0
    while done < len(out):
        count = reader.readinto(out[done:])
        if count == 0:
            return done
        done += count
    return -1 if reader.read(1) else done


def _associated_data(record: memoryview, n_sections: int) -> bytes:
    """Both headers and the section table, without the two fields that are computed after encrypting."""
    outer = bytearray(record[:_OUTER_CRC_AT])
    outer[_STORED_CRC] = bytes(4)
    return bytes(outer) + bytes(record[_INNER_AT : 2 * _INNER_AT + _ROW_BYTES * n_sections])
