"""The frames between the node and its worker: every message survives, everything else is refused."""

import dataclasses
import struct
import subprocess
import sys
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tscale.node.worker import messages as m

_BY_HINT: dict[object, st.SearchStrategy[object]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=40),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    type(None): st.none(),
}


def _values(hint: object) -> st.SearchStrategy[object]:
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return st.lists(_values(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(_values, args))
    return st.one_of(*map(_values, args)) if args else _BY_HINT[hint]


def _messages() -> st.SearchStrategy[object]:
    def build(kind: type) -> st.SearchStrategy[object]:
        return st.builds(kind, **{name: _values(hint) for name, hint in typing.get_type_hints(kind).items()})

    return st.one_of(*map(build, typing.get_args(m.Message)))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.integers(0, 2**40), _messages())
def test_messages_survive_the_wire(call_id: int, message: object) -> None:
    frame = m.encode_frame(call_id, message)
    assert m.frame_length(frame[:4]) == len(frame) - 4
    assert m.decode_body(frame[4:]) == (call_id, message)


def test_shares_and_gains_keep_every_bit() -> None:
    share = 0.1 + 0.2
    fold = m.Fold(b"m", b"p", (("a", share, 2.0), ("b", 1.0, 5e-324)), 7, 3)
    _, back = m.decode_body(m.encode_frame(1, fold)[4:])
    assert [struct.pack(">dd", *numbers) for _, *numbers in back.parts] == [
        struct.pack(">dd", *numbers) for _, *numbers in fold.parts
    ]


@settings(derandomize=True, max_examples=2000, deadline=None)
@given(st.data())
def test_mutated_bodies_end_in_a_clean_refusal(data: st.DataObject) -> None:
    body = bytearray(m.encode_frame(3, m.Fold(b"m" * 32, b"p" * 32, (("path", 0.5, 2.0),), 9, 1))[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))]
    try:
        _, message = m.decode_body(bytes(body))
    except m.BadMessage:
        return
    assert type(message) in typing.get_args(m.Message)


@pytest.mark.parametrize(
    "body",
    [
        ["x", "Save", {}],
        [1, "Nothing", {}],
        [1, "Save", {"more": 1}],
        [1, "Close", {"round": 1, "base": b"b"}],
        [1, "Close", {"round": True, "base": b"b", "rung": 0}],
        [1, "Close", {"round": "1", "base": b"b", "rung": 0}],
        [1, "Fold", {"manifest": b"", "parent": b"", "parts": [["a", 1.0, "2"]], "total_tokens": 1, "round": 1}],
        [1, ["Save"], {}],
        {"1": 2},
        7,
    ],
)
def test_wrong_shapes_are_refused(body: object) -> None:
    with pytest.raises(m.BadMessage):
        m.decode_body(msgpack.packb(body))


def test_too_long_frames_are_refused_before_they_are_read_or_written() -> None:
    with pytest.raises(m.BadMessage):
        m.frame_length(struct.pack(">I", m.MAX_FRAME_BYTES + 1))
    with pytest.raises(m.BadMessage):
        m.encode_frame(1, m.Generated("x" * (m.MAX_FRAME_BYTES + 1)))


def test_every_command_names_its_answer() -> None:
    assert m.ANSWERS[m.Close] is m.Closed
    assert set(m.ANSWERS) == set(typing.get_args(m.AnyCommand))
    assert set(m.ANSWERS.values()) | {m.Failed} == set(typing.get_args(m.AnyResult))


def test_messages_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.Save().x = 1  # type: ignore[attr-defined]


def test_the_node_side_imports_no_torch() -> None:
    code = (
        "import sys, tscale.node.worker.supervisor, tscale.node.worker.messages\n"
        "print(sorted({'torch', 'numpy', 'numba', 'hivemind'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
