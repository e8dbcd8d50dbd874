"""The life of a client: attach, serve, lose the daemon, attach again.  One small background thread does it.

    absent ──connect──► attached (namespaces registered, then published) ──EOF, stale epoch, unknown lease──► lost
       ▲                                                                                                        │
       └───────────── backoff 10 ms … 1 s, after the last copy of the old epoch has ended ◄────────────────────┘

The thread owns the attach connection and one `Channel`.  With them it
  * notices the daemon's end at once (`Attachment.end`, which wakes all who wait),
  * registers the namespaces again before anybody uses the new attachment,
  * gives back handles for those who must not wait: finalizers, stray replies (`give_back`),
  * pings a daemon that let a deadline expire (`Attachment.hung`, or `doubted` if the deadline was short), opens the
    breaker when a doubted one does not answer and closes it when a hung one does,
  * passes on the daemon's eventfd to one that stays the same across restarts.
It sleeps in poll without a timeout when there is nothing of this to do.

Callers read `attachment` without a lock: None means every data-path call is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable

import zmq

from kvkeep.ipc import messages as m
from kvkeep.ipc.arguments import seconds
from kvkeep.ipc.attach_frames import AttachRefused
from kvkeep.ipc.client_arena import Arena, ArenaError
from kvkeep.ipc.client_attach import Options, attach_path, open_attachment
from kvkeep.ipc.client_rpc import Answer, Attachment, Channel
from kvkeep.ipc.client_upkeep import UNANSWERED_S, Ping, Returns, clear, zmq_context
from kvkeep.ipc.namespace import Namespace

log = logging.getLogger("kvkeep.client")

BACKOFF_S = (0.01, 1.0)
RESTART_S = 15.0  # a daemon gone for less is probably being restarted: look for it more often, as it costs little
RESTART_BACKOFF_S = 0.1
REFUSED_BACKOFF_S = 10.0  # version, denied: nothing that passes by itself soon
REGISTER_S = 10.0  # in the background; the daemon's end cuts it short
SWEEP_S = 0.1
HURRY_S = 0.1  # a shorter deadline, when it expires, does not open the breaker
ATTACH_POLL_S = 0.001
CLOSE_S = 0.4
STABLE_S = 0.2  # an attachment that lived shorter does not reset the backoff

COUNTERS = (
    "attaches", "attach_failures", "late_calls", "refused", "breaker_opens", "stray_replies", "protocol_errors",
    "given_back",
)  # fmt: skip
_TRANSIENT = ("limit", "stopping", "internal")
MAX_TOLD = 64
_told: dict[tuple[str, str], object] = {}  # daemon and why there is no cache: one line a process, whatever its clients
_OVER = (m.ErrorCode.UNKNOWN_LEASE.value, m.ErrorCode.STALE_EPOCH.value)


class Session:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.pid = os.getpid()
        self._published: Attachment | None = None  # written by the thread only
        self.refused: AttachRefused | None = None
        self.last_error = "not tried yet"
        self.closing = False
        self.namespaces: dict[bytes, Namespace] = {}  # by digest
        self._unregistered = False  # one of them is not known to the daemon yet
        self._complained: set[str] = set()
        self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._publishing = threading.Lock()
        self._watcher: Callable[[Arena | None], None] | None = None
        self.returns = Returns(self._wake_fd, self.counters)
        self._channels: list[Channel] = []
        self._local = threading.local()
        self._thread = threading.Thread(target=self._run, name="kvkeep-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_attached(self, deadline_s: float) -> bool:
        """False: not attached within the deadline, or refused for good (`refused`)."""
        until = time.monotonic() + deadline_s
        while self.attachment is None and self.refused is None and time.monotonic() < until:
            time.sleep(ATTACH_POLL_S)  # a Condition may stay locked when a signal interrupts it
        return self.attachment is not None

    @property
    def attachment(self) -> Attachment | None:
        """None from the moment on that its end was noticed, whoever noticed it."""
        attachment = self._published
        return attachment if attachment is not None and attachment.alive else None

    @property
    def state(self) -> str:
        """One line for logs: attached, or why not."""
        attachment = self.attachment
        if self.closing:
            return "this client was closed; attach a new one"
        if attachment is None:
            return f"not attached to {self.where()}: {self.last_error}"
        return f"attached to {self.where()}, epoch {attachment.epoch}" + ", hung" * attachment.hung

    def adopt(self, fresh: Namespace) -> tuple[Namespace, Attachment | None]:
        """The one object for this identity, and the attachment that does not know it yet, if there is one."""
        with self._publishing:  # against the moment between registering all and publishing
            return self.namespaces.setdefault(fresh.digest, fresh), self.attachment

    def watch_arena(self, watcher: Callable[[Arena | None], None]) -> None:
        """See `Client.watch_arena`."""
        with self._publishing:
            self._watcher = watcher
            attachment = self.attachment
        self._tell_watcher(attachment.arena if attachment is not None else None)

    def _tell_watcher(self, arena: Arena | None) -> None:
        try:
            if self._watcher is not None:
                self._watcher(arena)
        except Exception:
            log.exception("what watches the arena failed")

    def register_later(self) -> None:
        self._unregistered = True
        self.wake()

    def refusal(self, error: m.Error) -> None:
        """A data-path request was refused: a miss for the caller, one line a kind for whoever looks for the reason."""
        self.counters["refused"] += 1
        if error.code not in self._complained:
            self._complained.add(error.code)
            log.warning("the daemon refused a request (%s): %s", error.code, error.message)

    def call(self, attachment: Attachment, request: m.AnyRequest, deadline_s: float) -> m.AnyReply | None:
        """One request, one reply; None = the daemon is gone, silent, restarted, or not to be understood.  Who asks for
        something that must be given back does it in an `Attachment.exchange`."""
        return self.ask(attachment, request, deadline_s).reply

    def ask(self, attachment: Attachment, request: m.AnyRequest, deadline_s: float) -> Answer:
        """The same for those who must know whether the request left us at all."""
        self.check_process()
        body, deadline_s = m.encode(request), seconds("deadline_s", deadline_s)
        if attachment.hung or not attachment.alive:
            return Answer()
        with attachment.exchange():
            channel = self.channel(attachment)
            answer = channel.call(body, deadline_s) if channel is not None else Answer()
            if answer.reply is None or self.examine(attachment, answer.reply) is not None:
                return answer
            return Answer(None, answer.sent)

    def settle(self, attachment: Attachment, request: m.AnyRequest, deadline_s: float) -> None:
        """Give something back and wait for the answer, so that it is given back when this returns.  If it cannot be
        sent now it is sent later; it is never sent twice, a second CONFIRM would be another reader's."""
        if not self.ask(attachment, request, deadline_s).sent:
            self.returns.give_back(attachment, request)

    def examine(self, attachment: Attachment, reply: m.AnyReply) -> m.AnyReply | None:
        """Notice a restart in a reply."""
        if reply.epoch != attachment.epoch:
            attachment.end(f"its epoch is now {reply.epoch}")
            return None
        if type(reply) is m.Error and reply.code in _OVER:
            attachment.end(reply.message)
            return None
        return reply

    def channel(self, attachment: Attachment) -> Channel | None:
        """This thread's; None = no socket can be had (too many open files)."""
        channel: Channel | None = getattr(self._local, "channel", None)
        if channel is None or channel.attachment is not attachment or channel.closed:
            if channel is not None:
                channel.close()
            self._local.channel = channel = None
            try:
                channel = self._open_channel(attachment)
            except zmq.ZMQError as error:
                self.last_error = f"cannot open a socket: {error}"
                return None
            self._local.channel = channel
            for other in list(self._channels):  # threads come and go
                if other.closed or (other.orphaned and other.close()):
                    with contextlib.suppress(ValueError):
                        self._channels.remove(other)
            self._channels.append(channel)
        return channel

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this kvkeep client was attached by process {self.pid} and cannot be used in its fork {os.getpid()}; "
                "attach a new one after the fork"
            )

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Detach.  Returns in half a second at most; a copy that still runs keeps the lease until it ends.  May be
        called again, as it must be if a signal interrupted it."""
        if os.getpid() != self.pid:
            return
        self.closing = self.returns.closed = True
        if (attachment := self._published) is not None:
            attachment.end("closed")
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        self._local = threading.local()

    def __del__(self) -> None:
        for fd in (getattr(self, "_wake_fd", -1), getattr(self, "eventfd", -1)):
            if fd >= 0:
                os.close(fd)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff, previous, complained, lost_at = BACKOFF_S[0], 0, "", 0.0
        while not self.closing:
            attachment: Attachment | None = None
            pause, for_good = backoff, False
            try:
                attachment = open_attachment(self.options, previous)
            except AttachRefused as error:
                self.last_error = str(error)
                if error.code not in _TRANSIENT:
                    pause, for_good = REFUSED_BACKOFF_S, True
                    self._tell_refused(error)
            except (OSError, ArenaError, ValueError) as error:
                self.last_error = str(error) or type(error).__name__
            except Exception as error:  # a bug: no cache, but the engine and this thread go on
                log.exception("attaching failed")
                self.last_error = repr(error)
            if attachment is None:
                self.counters["attach_failures"] += 1
                if not for_good and backoff >= BACKOFF_S[1] and complained != self.last_error:
                    complained = self.last_error
                    if self._is_news(complained):
                        log.warning("no KV cache: cannot attach to %s: %s", self.where(), complained)
            else:
                previous, complained, began = attachment.welcome.lease_id, "", time.monotonic()
                try:
                    self._serve(attachment)
                except Exception:
                    log.exception("serving an attachment failed; attaching again")
                self._retire(attachment)
                lost_at = time.monotonic()
                if time.monotonic() - began > STABLE_S:
                    backoff = pause = BACKOFF_S[0]
            if not self.closing:
                self._sleep(pause * random.uniform(0.7, 1.0))
                restarting = previous and time.monotonic() - lost_at < RESTART_S
                backoff = min(backoff * 2, RESTART_BACKOFF_S if restarting else BACKOFF_S[1])

    def where(self) -> str:
        try:
            return attach_path(self.options)
        except OSError:  # the working directory is gone, and the path is relative to it
            return str(self.options.run_dir)

    def _tell_refused(self, error: AttachRefused) -> None:
        known, self.refused = self.refused, error
        if (known is None or known.message != error.message) and self._is_news(error.message):
            log.error("no KV cache: the daemon at %s refused this client: %s", self.where(), error)

    def _is_news(self, why: str) -> bool:
        """No other client of this process has said so.  No lock: a fork might leave it locked."""
        if len(_told) >= MAX_TOLD:
            _told.clear()
        me = object()
        return _told.setdefault((self.where(), why), me) is me

    def _serve(self, attachment: Attachment) -> None:
        """Until the attachment ends or the client closes."""
        channel = self._open_channel(attachment)
        try:
            if not self._register_all(attachment, channel):
                return
            self._tell_watcher(attachment.arena)
            self.counters["attaches"] += 1
            log.info("attached to %s, epoch %d, lease %d", self.where(), attachment.epoch, attachment.welcome.lease_id)
            poller = zmq.Poller()
            for fd in (attachment.sock.fileno(), self._wake_fd, attachment.event_fd, attachment.down_fd):
                if fd >= 0:
                    poller.register(fd, zmq.POLLIN)
            poller.register(channel.socket, zmq.POLLIN)
            ping = Ping(channel, m.encode(m.Ping(attachment.lease, attachment.epoch)))
            while attachment.alive and not self.closing:
                ready = dict(poller.poll(self._timeout_ms(attachment, ping)))
                if attachment.sock.fileno() in ready:
                    self._read_connection(attachment)
                if self._wake_fd in ready:
                    clear(self._wake_fd)
                if attachment.event_fd in ready:
                    clear(attachment.event_fd)
                    os.eventfd_write(self.eventfd, 1)
                channel.drain()
                if channel.closed:
                    attachment.end("its RPC socket broke")
                elif ping.step():
                    self._open_breaker(attachment, "a ping", UNANSWERED_S)
                elif not attachment.hung:
                    if self._unregistered:
                        self._unregistered = False
                        self._register_all(attachment, channel)
                    self.returns.flush(attachment, channel)
                    for other in list(self._channels):
                        if other.expects_strays:
                            other.drain()
        finally:
            channel.close()

    def _timeout_ms(self, attachment: Attachment, ping: Ping) -> int | None:
        due = ping.due_in_ms()
        if attachment.hung or not (self.returns or any(c.expects_strays for c in self._channels)):
            return due
        return int(SWEEP_S * 1000) if due is None else min(due, int(SWEEP_S * 1000))

    def _read_connection(self, attachment: Attachment) -> None:
        """The daemon never speaks after the Welcome: anything but its end is thrown away."""
        try:
            if attachment.sock.recv(4096):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        attachment.end("it closed the connection")

    def _register_all(self, attachment: Attachment, channel: Channel) -> bool:
        """Every namespace, also those added meanwhile; then the attachment is there for all."""
        while not self.closing:
            with self._publishing:
                todo = [ns for ns in self.namespaces.values() if ns.binding(attachment) is None]
                if not todo and attachment.alive:
                    self._published = attachment
                    self.refused = None
                    _told.clear()  # what comes after this is news
                    return True
            if not attachment.alive:
                return False
            for namespace in todo:
                reply = channel.call(m.encode(namespace.request(attachment)), REGISTER_S).reply
                if reply is None or self.examine(attachment, reply) is None:
                    self._unregistered = True  # for an attachment in use: again when it answers
                    return False
                problem = namespace.bind(attachment, reply)
                if problem:
                    log.error("namespace %s is off: %s", namespace.digest.hex()[:16], problem)
        return False

    def _retire(self, attachment: Attachment) -> None:
        """End it for everybody and wait for the copies that run; only then may a new one be asked for."""
        attachment.end("closed" if self.closing else "could not serve")
        self._published = None
        log.info("detached: %s", attachment.why)
        self.last_error = f"the last attachment ended: {attachment.why}"
        os.eventfd_write(self.eventfd, 1)  # whoever waits for a lookup looks, and finds a miss
        for channel in list(self._channels):
            channel.close(0.02)  # whoever is waiting in it has been woken
        self._channels = [c for c in self._channels if c.attachment is not attachment]  # others end with their users
        self.returns.clear()
        if attachment.arena is not None:
            guard = attachment.arena.guard
            guard.revoke()
            if not guard.wait_idle(5.0):
                log.warning("a copy to or from the arena has been running for 5 s; attaching again waits for it")
                while not guard.wait_idle(60.0):
                    pass
            self._tell_watcher(None)
        attachment.arena = None  # who still needs the old mapping holds it; the last one ends the lock
        attachment.sock.close()

    def _open_channel(self, attachment: Attachment) -> Channel:
        return Channel(
            attachment, zmq_context(), stray=self.returns.give_back_reply, late=self.late, counters=self.counters
        )

    def late(self, attachment: Attachment, what: str, deadline_s: float) -> None:
        """A deadline expired.  One that was too short says little of the daemon: a ping will tell, so that a caller in
        a hurry does not open the breaker for all others."""
        self.counters["late_calls"] += 1
        if deadline_s < HURRY_S:
            attachment.doubted = True
        else:
            self._open_breaker(attachment, what, deadline_s)
        self.wake()  # also to take what comes late

    def _open_breaker(self, attachment: Attachment, what: str, seconds: float) -> None:
        """One line, for the first."""
        if attachment.hung or not attachment.alive:
            return
        attachment.hung = True
        self.counters["breaker_opens"] += 1
        log.warning(
            "the daemon at %s (lease %d) did not answer %s within %g s; no KV cache until it answers",
            attachment.endpoint, attachment.welcome.lease_id, what, seconds,
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self.closing and (left := until - time.monotonic()) > 0:
            if poller.poll(max(1, int(left * 1000))):
                clear(self._wake_fd)
