"""Units and pins in the form in which ``latentkv units`` shows them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.pins import Pin
from kvstore.survey import UnitSurvey
from kvstore.units import UnitKind

CLIP = 256  # characters of a name in a list


@dataclass(frozen=True, slots=True)
class PinHeld:
    """One pin. ``unit`` in hex; times in unix seconds."""

    handle: str
    unit: str
    created: float
    expires: float


@dataclass(frozen=True, slots=True)
class UnitHeld:
    """One unit. ``nbytes`` of its whole prefix, which it may share; times in unix seconds."""

    unit: str
    tenant: str
    model: str
    revision: str
    adapter: str
    kinds: list[str]
    tokens: int
    nbytes: int
    hits: int
    created: float
    used: float
    pins: list[PinHeld]


def pin_held(pin: Pin) -> PinHeld:
    """A pin in its JSON form."""
    return PinHeld(pin.handle, pin.unit.hex(), pin.created, pin.expires)


def holdings(units: Sequence[UnitSurvey], pins: Sequence[Pin], *, clipped: bool = False) -> list[UnitHeld]:
    """Units with their pins. ``clipped`` shortens what may be long, for an answer with many of them."""
    text = clip if clipped else str
    of: defaultdict[bytes, list[PinHeld]] = defaultdict(list)
    for pin in pins:
        of[pin.unit].append(pin_held(pin))
    return [
        UnitHeld(
            unit=unit.hash.hex(),
            tenant=text(unit.namespace.tenant),
            model=text(unit.namespace.model),
            revision=text(unit.namespace.revision),
            adapter=text(unit.namespace.adapter),
            kinds=kinds_of(unit.kinds),
            tokens=unit.tokens,
            nbytes=unit.nbytes,
            hits=unit.hits,
            created=unit.created,
            used=unit.used,
            pins=of[unit.hash],
        )
        for unit in units
    ]


def clip(text: str) -> str:
    """A text as lists show it: what is longer than ``CLIP`` characters ends in an ellipsis."""
    return text if len(text) <= CLIP else text[: CLIP - 1] + "…"


def kinds_of(kinds: int) -> list[str]:
    """Why a unit exists."""
    return [str(kind.name).lower() for kind in UnitKind(kinds)]
