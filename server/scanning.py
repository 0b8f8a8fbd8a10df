"""What a message would become, counted before it becomes that.

A few bytes on the wire can become an object of many: two bytes are an empty ``UnitMark``. So
the fields are counted where they lie, and a message with more than a call needs is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvstore import wire
from kvstore.errors import InvalidArgument

SMALL_BYTES = 1 << 16  # a message that cannot become much
MAX_FIELDS = 1 << 16  # in a larger one, with those of its parts: units for four million tokens at the least
MAX_PACKED_BYTES = 5 * wire.MAX_HASHES  # of numbers side by side, each at its longest
MAX_UNKNOWN = 64  # fields of a newer proto
_PART_BYTES = 64  # a shorter part of a message is not looked into
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class _Field:
    """What is known of a field of a message."""

    slot: str  # a oneof's name, or the field's own
    repeated: bool
    part: Descriptor | None  # the message that it is
    packed: bool  # numbers that may lie side by side


@lru_cache(256)
def _fields_of(message: Descriptor) -> dict[int, _Field]:
    return {
        each.number: _Field(
            slot=each.containing_oneof.name if each.containing_oneof else each.name,
            repeated=each.is_repeated,
            part=each.message_type,
            packed=each.is_repeated
            and each.type
            not in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES),
        )
        for each in message.fields
    }


def require_modest(data: bytes, message: Descriptor) -> None:
    """Raises ``InvalidArgument`` for bytes that would become more objects than a call needs.

    Bytes that are no message at all may pass: the parser refuses them.
    """
    if len(data) > SMALL_BYTES:
        _Scan(data, message.name).message(0, len(data), message)


@dataclass(slots=True)
class _Scan:
    """One walk over the fields of a message. Bytes that end too early end it."""

    data: bytes
    name: str
    fields: int = 0
    unknown: int = 0

    def message(self, at: int, end: int, message: Descriptor) -> None:
        """Walk the fields of a message, or of a part of it, that lies in ``[at, end)``."""
        known, seen = _fields_of(message), set[str]()
        while at < end:
            tag, at = self._varint(at, end)
            found = known.get(tag >> 3)
            self._count(found, seen)
            start, at = self._value(tag & 7, at, end)
            if found is None or tag & 7 != _LENGTH or at > end:
                continue
            if found.packed and at - start > MAX_PACKED_BYTES:
                raise self._refusal(f"{at - start} bytes of numbers in one field")
            if found.part is not None and at - start > _PART_BYTES:
                self.message(start, at, found.part)

    def _count(self, found: _Field | None, seen: set[str]) -> None:
        self.fields += 1
        if self.fields > MAX_FIELDS:
            raise self._refusal(f"more than {MAX_FIELDS} fields")
        if found is None:
            self.unknown += 1
            if self.unknown > MAX_UNKNOWN:
                raise self._refusal(f"more than {MAX_UNKNOWN} fields that are not known here")
        elif not found.repeated:
            if found.slot in seen:
                raise self._refusal(f"`{found.slot}` more than once")
            seen.add(found.slot)

    def _value(self, kind: int, at: int, end: int) -> tuple[int, int]:
        """Where a value begins and ends."""
        if kind == _LENGTH:
            length, at = self._varint(at, end)
            return at, at + length
        if kind == _VARINT:
            return at, self._varint(at, end)[1]
        if kind in (_FIXED64, _FIXED32):
            return at, at + (8 if kind == _FIXED64 else 4)
        raise self._refusal(f"a field of the wire type {kind}")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise self._refusal("a number that does not end")

    def _refusal(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"a {self.name} with {what}; send a message as the published proto has it")
