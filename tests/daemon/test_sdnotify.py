"""Talking to systemd: the right words, and never a reason to fail."""

from __future__ import annotations

import os
import socket

from kvkeep.daemon.sdnotify import Notifier


def listen(address: str) -> socket.socket:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    manager.settimeout(5)
    return manager


def test_ready_status_watchdog_reload_and_stop_arrive_as_systemd_wants_them(tmp_path):
    path = str(tmp_path / "notify")
    with listen(path) as manager:
        notifier = Notifier({"NOTIFY_SOCKET": path})
        assert notifier.ready("serving\n3 clients")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving 3 clients"
        assert notifier.status("busy")
        assert manager.recv(4096) == b"STATUS=busy"
        assert notifier.watchdog()
        assert manager.recv(4096) == b"WATCHDOG=1"
        assert notifier.reloading()
        assert manager.recv(4096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert notifier.stopping()
        assert manager.recv(4096) == b"STOPPING=1"
        notifier.close()


def test_an_abstract_socket_works():
    name = f"kvk-test-{os.getpid()}-notify"
    with listen("\0" + name) as manager:
        assert Notifier({"NOTIFY_SOCKET": "@" + name}).ready()
        assert manager.recv(4096) == b"READY=1"


def test_nobody_listening_is_no_error(tmp_path):
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}, {"NOTIFY_SOCKET": "vsock:1:2"}):
        notifier = Notifier(environ)
        assert not notifier.ready()
        assert not notifier.watchdog()
        notifier.close()
        assert not notifier.ready()


def test_a_manager_that_does_not_read_never_blocks_us(tmp_path):
    path = str(tmp_path / "full")
    with listen(path):
        notifier = Notifier({"NOTIFY_SOCKET": path})
        answers = [notifier.status("x" * 1000) for _ in range(5000)]
        assert answers[0]
        assert not answers[-1]


def test_the_watchdog_interval_is_half_of_what_systemd_allows():
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_interval() == 15.0
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_interval() == 15.0


def test_a_watchdog_for_another_process_or_none_at_all_is_not_ours():
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog_interval() is None
    for nonsense in ({}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}):
        assert Notifier(nonsense).watchdog_interval() is None
