"""No process of a job outlives another: who fails says why to all, who vanishes is missed by all.

Each process keeps a connection to process 0, which passes news on. Nothing is sent while all is
well: the operating system closes the connection of a process that dies, however it dies, and its
keep-alive probes find out when a machine or the network between is gone. So a process that is only
slow, or busy in one long call, is never taken for dead.
"""

import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import weakref
from dataclasses import dataclass, field

import torch.distributed as dist

from moco_d2.errors import UserError

logger = logging.getLogger(__name__)

# Exit code of a process that ends because another one failed.
FOLLOWER_EXIT = 71
# A machine that does not answer for so long is gone.
SILENCE_SECONDS = 20
# What a collective raises when a peer dies can come before the news of who it was.
_NEWS_SECONDS = 5
_PROBES = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPALIVE": 5,  # macOS's name for the first
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": SILENCE_SECONDS // 5 - 1,
    "TCP_USER_TIMEOUT": SILENCE_SECONDS * 1000,
}
_KEY = "moco_d2/guard"

_sockets: weakref.WeakSet = weakref.WeakSet()


def _close_inherited() -> None:
    # A connection is closed when the last process that has it dies, loader workers included.
    for s in list(_sockets):
        s.close()


os.register_at_fork(after_in_child=_close_inherited)


@dataclass
class _Peer:
    """The other end of a connection; `rank` is known once it has introduced itself."""

    socket: socket.socket
    rank: int | None = None
    name: str = ""
    unread: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, **message) -> None:
        with self.lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """Messages that have arrived; None: the connection was closed."""
        data = self.socket.recv(1 << 16)
        if not data:
            return None
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Guard:
    """Ends this process, with the reason, when another one of the job fails or vanishes."""

    def __init__(self, store: dist.Store, host: str, rank: int, world_size: int):
        """A collective.

        Args:
            store: common to all processes.
            host: the machine of process 0, as seen from here.
        """
        self._rank = rank
        self._world_size = world_size
        self._name = f"process {rank} of {world_size} (on {socket.gethostname()}, {os.getpid()})"
        self._ended = threading.Event()  # all others are done
        self._ending = threading.Lock()  # whoever takes it says why this process ends
        self._done = False
        self._peers: list[_Peer] = []
        if rank == 0:
            self._server = _listening_socket()
            self._token = secrets.token_hex(8)
            store.set(_KEY, f"{self._server.getsockname()[1]} {self._token}")
            target = self._serve
        else:
            port, token = store.get(_KEY).decode().split()
            hub = _Peer(_connect(host, int(port)), 0, f"process 0 of {world_size} (at {host})")
            self._peers.append(hub)
            hub.send(token=token, rank=rank, name=self._name)
            target = self._listen
        threading.Thread(target=target, name="guard", daemon=True).start()

    def fail(self, reason: str, perhaps_second_hand: bool = False) -> None:
        """Tell all other processes why this one ends.

        Args:
            perhaps_second_hand: the reason may be the death of another process, as with any error
                of a collective. Then the news of that death, if it comes, goes first.
        """
        if perhaps_second_hand:
            self._ended.wait(_NEWS_SECONDS)
        if self._ending.acquire(blocking=False):
            self._tell_peers(f"{self._name} failed: {reason}")

    def close(self) -> None:
        """This process is done. Process 0 waits for all others."""
        if self._rank == 0:
            self._ended.wait()
        else:
            self._done = True
            _try_to_send(self._peers[0], done=True)

    def _serve(self) -> None:
        """Process 0: accept the others, and pass on what any of them says."""
        selector = selectors.DefaultSelector()
        selector.register(self._server, selectors.EVENT_READ)
        missing = self._world_size - 1
        while missing:
            for key, _ in selector.select():
                if key.fileobj is self._server:
                    peer = _Peer(_watched(self._server.accept()[0]))
                    selector.register(peer.socket, selectors.EVENT_READ, peer)
                elif not self._hear(key.data):
                    selector.unregister(key.data.socket)
                    key.data.socket.close()
                    missing -= key.data.rank is not None
        self._ended.set()

    def _listen(self) -> None:
        """The others: hear what process 0 passes on."""
        while self._hear(self._peers[0]):
            pass

    def _hear(self, peer: _Peer) -> bool:
        """Read from a peer; False when there will be no more."""
        messages, end = None, "ended without a word: killed, perhaps because memory ran out"
        try:
            messages = peer.receive()
        except (ConnectionError, ValueError):  # closed; or no member of the job, by its words
            pass
        except OSError as error:
            end = (
                f"has not answered for {SILENCE_SECONDS} s ({error.strerror}): its machine or the "
                "network between is gone"
            )
        if messages is None:
            if peer.rank is not None and not self._done:
                self._follow(f"{peer.name} {end}", peer)
            return False
        for message in messages:
            if peer.rank is None:
                if message.get("token") != self._token:
                    return False
                peer.rank, peer.name = message["rank"], message["name"]
                self._peers.append(peer)
            elif "failed" in message:
                self._follow(message["failed"], peer)
            elif "done" in message:
                return False
        return True

    def _follow(self, reason: str, source: _Peer) -> None:
        """End this process because of another one, and let the rest know."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the main thread is ending this process already
        self._tell_peers(reason, source)
        logger.error(f"{reason}\nTherefore {self._name} ends, too.")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FOLLOWER_EXIT)

    def _tell_peers(self, reason: str, source: _Peer | None = None) -> None:
        for peer in self._peers:
            if peer is not source:
                _try_to_send(peer, failed=reason)


def _try_to_send(peer: _Peer, **message) -> None:
    try:
        peer.send(**message)
    except OSError:
        logger.debug(f"{peer.name} is gone already")


def _connect(host: str, port: int) -> socket.socket:
    try:
        return _watched(socket.create_connection((host, port)))
    except OSError as error:
        raise UserError(
            f"the machine of process 0 does not answer at {host}:{port} ({error.strerror}); "
            "machines of a job must reach each other at any port"
        ) from error


def _listening_socket() -> socket.socket:
    try:
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # no IPv6 here
        server = socket.create_server(("", 0))
    _sockets.add(server)
    return server


def _watched(s: socket.socket) -> socket.socket:
    """Let the operating system find out when the other end's machine is gone."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _sockets.add(s)
    return s
