"""What comes over tcp, told apart: strangers, the control connections of sessions, their data connections.

There are two networks. The public one listens where the configuration says and takes in strangers. The other is for
clients on this host that began a session on the Unix socket and want their rows over tcp; it is bound when the first
of them comes, and knows only tokens.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import zmq

from headrace import protocol
from headrace.errors import ProtocolError
from headrace.protocol import Attach, Attached, Cancel, Get, Hello, Leave, Ping, Pong, Refused, Report, Unknown
from headrace.server.connection import Connection, RemoteConnection
from headrace.server.keys import Gate, ServerKeys
from headrace.server.network import Network, Timings
from headrace.server.transport import Tcp
from headrace.workers.loop import Loop

log = logging.getLogger(__name__)

#: Sessions that may have begun over tcp: each makes the shares of all others smaller.
MOST_SESSIONS = 1024


class Sessions(Protocol):
    """What the service does about it."""

    def find(self, token: bytes) -> Connection | None:
        """Whose session that is."""

    def come(self, connection: Connection) -> None:
        """A client is there."""

    def greeted(self, connection: Connection, hello: Hello) -> None: ...
    def pong(self, *, detail: bool) -> Pong: ...
    def requested(self, connection: Connection, message: Get | Cancel) -> None: ...
    def expel(self, connection: Connection, reason: str, message: protocol.Message | None = None) -> None: ...
    def end(self, connection: Connection) -> None: ...


class Remote:
    """
    Args:
        context: of ZeroMQ.
        loop: calls back for what arrives.
        sessions: is told what arrives.
        most: connections over tcp, whoever has them.
        threads: of ZeroMQ, that copy into the kernel what goes over tcp.
        keys: that strangers are asked for; None: none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: Loop,
        sessions: Sessions,
        most: int,
        *,
        threads: range,
        timings: Timings,
        keys: ServerKeys | None = None,
    ) -> None:
        self._context = context
        self._loop = loop
        self._sessions = sessions
        # More than all sessions may have would be strangers, each of whom has to be looked after.
        self._most = min(most, MOST_SESSIONS * (1 + protocol.MAX_LANES))
        self._threads = threads
        self._timings = timings
        self._members: dict[tuple[Network, bytes], Connection] = {}
        self._begun: set[Connection] = set()
        # Before there is anybody whom it could be asked about.
        self._gate = None if keys is None else Gate(context, loop, keys)
        self._public: Network | None = None
        self._private: Network | None = None
        self._private_endpoint = ""
        self._probed = time.monotonic()

    # -- connections --------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Over tcp, whoever has them."""
        return sum(network.connections for network in self._networks())

    def listen(self, endpoint: str) -> str:
        """Take in strangers at `tcp://ADDRESS:PORT`; returns it with the real port.

        Raises:
            ConfigError: it cannot be had.
        """
        if self._public is None:
            self._public = self._network(public=True)
        return self._public.bind(endpoint)

    def offer(self) -> Tcp:
        """For a client that said Hello elsewhere on this host.

        Raises:
            ConfigError: no port can be had.
        """
        if self._private is None:
            private = self._network(public=False)
            try:
                self._private_endpoint = private.bind("tcp://127.0.0.1:*")
            except BaseException:
                private.close()
                raise
            self._private = private
        return Tcp(self._private, self._private_endpoint, self._timings)

    def forget(self, connection: Connection) -> None:
        """Its session is over: hear nothing more of its connections."""
        self._begun.discard(connection)
        for network, identity in connection.members:
            self._members.pop((network, identity), None)
            network.mute(identity)

    @property
    def patience(self) -> float:
        """Seconds after which to sweep again."""
        return min((network.patience for network in self._networks()), default=1.0)

    def sweep(self) -> None:
        """End the leases of rows that have left."""
        for network in self._networks():
            network.sweep()

    def tick(self) -> int:
        """Look after what only time brings; returns how many messages were none."""
        now, nonsense = time.monotonic(), 0
        probe = now - self._probed > self._timings.probe
        for network in self._networks():
            nonsense += network.nonsense
            network.nonsense = 0
            if probe:
                self._probed = now
                network.forget_the_gone()
        if self._gate is not None:
            self._gate.tick()
        return nonsense

    def close(self) -> None:
        """End all connections."""
        for network in self._networks():
            network.close()
        if self._gate is not None:
            self._gate.close()

    def _networks(self) -> list[Network]:
        return [network for network in (self._public, self._private) if network is not None]

    def _network(self, *, public: bool) -> Network:
        return Network(
            self._context,
            self._loop,
            self._heard,
            public=public,
            crowded=lambda: self.connections > self._most,
            known=lambda network, identity: (network, identity) in self._members,
            gate=self._gate if public else None,
            threads=self._threads,
            timings=self._timings,
        )

    # -- messages -----------------------------------------------------------------------------------------------

    def _heard(self, network: Network, identity: bytes, frame: zmq.Frame) -> None:
        member = self._members.get((network, identity))
        try:
            message = protocol.decode_remote(frame.buffer)
            if isinstance(message, Get | Cancel | Leave | Report):
                self._of_a_session(network, identity, message)
            elif isinstance(message, Attach):
                self._attach(network, identity, message, member)
            elif not network.public:
                raise ProtocolError("this port is for sessions that begin on the daemon's Unix socket")
            elif isinstance(message, Ping):
                detail = message.detail
                network.send_one(identity, lambda: self._sessions.pong(detail=detail))
            else:
                peer = str(frame.get("Peer-Address"))
                if network.gate is not None:
                    peer += f" with the key {frame.get('User-Id')}"
                self._hello(network, identity, peer, message, member)
        except ProtocolError as error:
            refused = Refused(kind="ProtocolError", text=str(error))
            if member is not None:
                self._sessions.expel(member, str(error), refused)
            else:
                network.nonsense += 1
                network.send(identity, refused)
                network.mute(identity)
        except Exception as error:  # one client's trouble, whatever it is, is not the others'
            log.exception("a client over tcp")
            if member is not None:
                text = f"the daemon failed: {error}"
                self._sessions.expel(member, str(error), Refused(kind="HeadraceError", text=text))

    def _hello(self, network: Network, identity: bytes, peer: str, hello: Hello, member: Connection | None) -> None:
        if member is not None:
            raise ProtocolError("a Hello on a connection that has a session already")
        if len(self._begun) >= MOST_SESSIONS:
            text = f"the daemon has {MOST_SESSIONS} sessions over tcp, which is the most"
            network.send(identity, Refused(kind="HeadraceError", text=text))
            network.mute(identity)
            return
        connection = RemoteConnection(
            network, identity, peer, {"tcp": lambda: Tcp(network, "", self._timings, control=identity)}
        )
        self._members[network, identity] = connection
        self._begun.add(connection)
        self._sessions.come(connection)
        self._sessions.greeted(connection, hello)

    def _attach(self, network: Network, identity: bytes, attach: Attach, member: Connection | None) -> None:
        if member is not None:
            raise ProtocolError("an Attach on a connection that belongs to a session already")
        connection = self._sessions.find(attach.token)
        transport = connection.transport if connection is not None else None
        if connection is None or not isinstance(transport, Tcp) or transport.network is not network:
            network.send(identity, Unknown(token=attach.token))
            return
        if (why := transport.attach(attach.lane, identity)) is not None:
            raise ProtocolError(why)  # by somebody else, or by mistake: the session goes on
        self._members[network, identity] = connection
        connection.members.add((network, identity))
        if not network.send(identity, Attached(lane=attach.lane)):
            self._sessions.expel(connection, f"lane {attach.lane} ended while it was attached")

    def _of_a_session(self, network: Network, identity: bytes, message: Get | Cancel | Leave | Report) -> None:
        connection = self._sessions.find(message.token)
        transport = connection.transport if connection is not None else None
        if connection is None or transport is None or not transport.hears(network, identity):
            network.send(identity, Unknown(token=message.token))
        elif isinstance(message, Leave):
            self._sessions.end(connection)
        elif isinstance(message, Report):
            connection.reported(message)
        elif isinstance(message, Get) and not transport.attached:
            raise ProtocolError("a Get before a data connection was attached")
        else:
            self._sessions.requested(connection, message)
