"""The pieces of hivemind that the node uses, imported when the transport starts and quiet on the terminal."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tscale.protocol.errors import StopNode


@dataclass(frozen=True)
class HivemindParts:
    """Classes, functions and protobuf modules of hivemind 1.1.12, and the path of its p2pd."""

    p2p: Any
    peer_id: Any
    multiaddr: Any
    dht_node: Any
    dht_id: Any
    dictionary: Any
    with_expiration: Any
    messages: Any
    read_message: Any
    write_message: Any
    p2pd_path: str


def load_hivemind() -> HivemindParts:
    """Import hivemind (about two seconds and 200 MB, most of it torch). Raises StopNode where it isn't installed."""
    try:
        import hivemind.utils.logging as hivemind_logging
        from hivemind.dht.node import DHTNode
        from hivemind.dht.routing import DHTID
        from hivemind.dht.storage import DictionaryDHTValue
        from hivemind.p2p import P2P, PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2
        from hivemind.utils.multiaddr import Multiaddr
        from hivemind.utils.timed_storage import ValueWithExpiration
    except ImportError as error:
        raise StopNode(f"hivemind can't be imported ({error}): install tscale-node on Linux or macOS") from error
    _quieten(hivemind_logging)
    return HivemindParts(
        p2p=P2P,
        peer_id=PeerID,
        multiaddr=Multiaddr,
        dht_node=DHTNode,
        dht_id=DHTID,
        dictionary=DictionaryDHTValue,
        with_expiration=ValueWithExpiration,
        messages=p2pd_pb2,
        read_message=read_pbmsg_safe,
        write_message=write_pbmsg,
        p2pd_path=_p2pd_path(),
    )


def _p2pd_path() -> str:
    from importlib.resources import files

    return str(files("hivemind.hivemind_cli") / "p2pd")


def _quieten(hivemind_logging: Any) -> None:
    # hivemind writes to the terminal with its own handler and renames a level of everybody's logging
    hivemind_logging.use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.WARNING)
    logging.addLevelName(logging.WARNING, "WARNING")
