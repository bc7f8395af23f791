"""Frozen dataclass trees to plain values and back, strictly: no missing field, no unknown one, no converted type."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from tscale.protocol.errors import RefuseFrame

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form:
    """How the plain values are written.

    `hex_bytes`: byte strings as hex text (JSON has none). `whole_floats`: an int is taken where a float is declared
    (JSON has one kind of number). `max_items`: the cap of every list.
    """

    hex_bytes: bool
    whole_floats: bool
    max_items: int


WIRE = Form(hex_bytes=False, whole_floats=False, max_items=1024)
JSON = Form(hex_bytes=True, whole_floats=True, max_items=4096)


def to_plain(value: Any, form: Form) -> Any:
    """Dataclasses become maps by field name, tuples stay tuples. The types are checked by `from_plain`, not here."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name), form) for item in fields(value)}
    if isinstance(value, tuple):
        return tuple(to_plain(item, form) for item in value)
    if isinstance(value, bytes) and form.hex_bytes:
        return value.hex()
    return value


def from_plain(kind: type[T], plain: Any, form: Form, where: str = "") -> T:
    """Build a `kind` from plain values. Raises RefuseFrame that names the field which does not fit."""
    place = where or kind.__name__
    if type(plain) is not dict:
        raise RefuseFrame(f"{place} must be a map")
    hints = _hints(cast(Any, kind))
    if plain.keys() != hints.keys():
        missing, unknown = hints.keys() - plain.keys(), plain.keys() - hints.keys()
        problem = f"lacks {sorted(missing)[0]!r}" if missing else f"has the unknown field {sorted(unknown)[0][:40]!r}"
        raise RefuseFrame(f"{place} {problem}")
    prefix = where + "." if where else ""
    return kind(**{name: _value(hint, plain[name], form, prefix + name) for name, hint in hints.items()})


@lru_cache(maxsize=64)
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any, form: Form, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (item for item in get_args(hint) if item is not type(None))
        return None if value is None else _value(inner, value, form, where)
    if origin is tuple:
        if not isinstance(value, (tuple, list)) or len(value) > form.max_items:
            raise RefuseFrame(f"{where} must be a list of at most {form.max_items} items")
        return tuple(_value(get_args(hint)[0], item, form, where) for item in value)
    if is_dataclass(hint):
        return from_plain(cast(type[Any], hint), value, form, where)
    return _scalar(hint, value, form, where)


def _scalar(hint: Any, value: Any, form: Form, where: str) -> Any:
    if hint is bytes and form.hex_bytes and type(value) is str:
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise RefuseFrame(f"{where} must be hex") from None
    if hint is float and form.whole_floats and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    if type(value) is not hint:
        raise RefuseFrame(f"{where} must be of type {hint.__name__}")
    if hint is float and not math.isfinite(value):
        raise RefuseFrame(f"{where} must be finite")
    if hint is int and not -(1 << 63) <= value < 1 << 64:
        raise RefuseFrame(f"{where} must fit into 64 bits")
    if hint is str and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise RefuseFrame(f"{where} must be text without lone surrogates")
    return value
