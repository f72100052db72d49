"""A MessagePack message scanned by plain recursion: the twin of `ext/core/src/message/scan.cpp`."""

from __future__ import annotations

from typing import NamedTuple

NIL, NUMBER, TEXT, BINARY, ARRAY, MAP = "nil", "number", "text", "binary", "array", "map"


class Fault(Exception):
    """The scan ends here."""


class Value(NamedTuple):
    kind: str
    value: int | bytes


class Scanned:
    """Reads one message; `head` holds the kinds and values of the outermost array, as far as it was read."""

    def __init__(self, data: bytes, depth: int, elements: int, text_bytes: int, binary_bytes: int) -> None:
        self._data = data
        self._at = 0
        self._depth, self._left = depth, elements
        self._text_bytes, self._binary_bytes = text_bytes, binary_bytes
        self.values: list[Value] = []
        self.fault = ""
        try:
            self._value(0, False)
            if self._at != len(data):
                raise Fault("broken")
        except Fault as fault:
            self.fault = str(fault)

    def result(self) -> tuple[bytes, bytes, int, str]:
        """What `Scan` returns."""
        op, session, seq = (self.values[n] if n < len(self.values) else None for n in range(3))
        return (
            op.value if op and op.kind == TEXT else b"",  # type: ignore[return-value]
            session.value if session and session.kind == BINARY and len(session.value) == 16 else b"",  # type: ignore[arg-type,return-value]
            seq.value if seq and seq.kind == NUMBER and seq.value < 1 << 63 else 0,  # type: ignore[operator,return-value]
            self.fault,
        )

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise Fault("broken")
        self._at += count
        return taken

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _value(self, depth: int, of_outermost: bool) -> None:
        if self._left == 0:
            raise Fault("too many values")
        self._left -= 1
        found = self._read(depth)
        if of_outermost:
            self.values.append(found)

    def _read(self, depth: int) -> Value:
        first = self._number(1)
        if first < 0x80:
            return Value(NUMBER, first)
        if first < 0x90:
            return self._inside(MAP, 2 * (first & 15), depth)
        if first < 0xA0:
            return self._inside(ARRAY, first & 15, depth)
        if first < 0xC0:
            return self._bytes(TEXT, first & 31)
        if first == 0xC1:
            raise Fault("broken")
        if 0xC4 <= first <= 0xC6:
            return self._bytes(BINARY, self._number(1 << (first - 0xC4)))
        if 0xC7 <= first <= 0xC9:
            self._bytes(BINARY, self._number(1 << (first - 0xC7)) + 1)
        elif first in (0xCA, 0xCB):
            self._take(4 if first == 0xCA else 8)
        elif 0xCC <= first <= 0xCF:
            return Value(NUMBER, self._number(1 << (first - 0xCC)))
        elif 0xD0 <= first <= 0xD3:
            width = 1 << (first - 0xD0)
            number = int.from_bytes(self._take(width), "big", signed=True)
            return Value(NUMBER, number) if number >= 0 else Value(NIL, 0)
        elif 0xD4 <= first <= 0xD8:
            self._bytes(BINARY, (1 << (first - 0xD4)) + 1)
        elif 0xD9 <= first <= 0xDB:
            return self._bytes(TEXT, self._number(1 << (first - 0xD9)))
        elif first in (0xDC, 0xDD):
            return self._inside(ARRAY, self._number(2 if first == 0xDC else 4), depth)
        elif first in (0xDE, 0xDF):
            return self._inside(MAP, 2 * self._number(2 if first == 0xDE else 4), depth)
        return Value(NIL, 0)

    def _bytes(self, kind: str, length: int) -> Value:
        if kind == TEXT and length > self._text_bytes:
            raise Fault("too long a text")
        if kind == BINARY and length > self._binary_bytes:
            raise Fault("too long a byte string")
        return Value(kind, self._take(length))

    def _inside(self, kind: str, values: int, depth: int) -> Value:
        if values > self._left:
            raise Fault("too many values")
        if depth == self._depth:
            raise Fault("too deep")
        for _ in range(values):
            self._value(depth + 1, depth == 0 and kind == ARRAY)
        return Value(kind, 0)
