"""One file descriptor, for all processes of a machine: the kernel hands it over through a socket (SCM_RIGHTS)."""
from __future__ import annotations

import os
import secrets
import socket
import struct

from ..base.errors import MegatrainError
from .ranks import Ranks

_PATIENCE = 25.0             # seconds until a process that does not come is an error: all were here just now


def shared(ranks: Ranks, own: int) -> int:
    """The descriptor that the machine's first rank gives as `own`; a new one in the others, who close it. Called by all
    ranks of the group.

    Raises:
        MegatrainError: another process did not come, or belongs to somebody else.
    """
    first = ranks.rank == ranks.mates[0]
    listener, name = _listener() if first else (None, "")
    names = ranks.gather(name)
    if not first:
        return _receive(names[ranks.mates[0]])
    with listener:
        for _ in ranks.mates[1:]:
            _send(listener, own)
    return own


def _listener() -> tuple[socket.socket, str]:
    """A socket without a file, by a name that nobody guesses."""
    made, name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"megatrain-{secrets.token_hex(16)}"
    made.bind(f"\0{name}")
    made.listen()
    made.settimeout(_PATIENCE)
    return made, name


def _send(listener: socket.socket, fd: int) -> None:
    try:
        other, _ = listener.accept()
    except TimeoutError:
        raise MegatrainError(f"a process of this machine did not ask for the store within {_PATIENCE:.0f} s") from None
    with other:
        _, uid, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.getuid():
            raise MegatrainError(f"a process of user {uid} asked for the store, which is user {os.getuid()}'s")
        socket.send_fds(other, [b"1"], [fd])


def _receive(name: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.settimeout(_PATIENCE)
        made.connect(f"\0{name}")
        _, fds, _, _ = socket.recv_fds(made, 1, 1)
    if not fds:
        raise MegatrainError("the machine's first process gave no store: it ended")
    return fds[0]
