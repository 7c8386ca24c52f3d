"""Signals in the middle of a command: where they take effect, where they wait, and that an undo runs to its end."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from containerd_integration.interruption import Interrupted, Interruption


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture
def before():
    """The handlers are given back, whatever happens."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield found
    assert {number: signal.getsignal(number) for number in found} == found


def command(steps):
    """A command with these steps."""
    with Interruption() as interruption, interruption.undoing() as undo:
        steps(interruption, undo)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_undoes_what_was_begun(before, number):
    undone = []

    def steps(_, undo):
        undo.push(undone.append, "step")
        send(number)

    with pytest.raises(Interrupted) as raised:
        command(steps)
    assert undone == ["step"]
    assert raised.value.number == number
    assert str(raised.value) == number.name


def test_further_signals_do_not_tear_the_undo_apart(before):
    undone = []

    def slow():
        send(signal.SIGTERM, signal.SIGINT)
        undone.append("slow")

    def steps(_, undo):
        undo.push(undone.append, "first")
        undo.push(slow)
        message = "the cause"
        raise ValueError(message)

    with pytest.raises(ValueError, match="the cause"):
        command(steps)
    assert undone == ["slow", "first"]


def test_a_signal_waits_until_the_step_and_its_undo_are_noted(before):
    undone = []

    def steps(interruption, undo):
        with interruption.held():
            send(signal.SIGTERM)
            undo.push(undone.append, "step")
        undone.append("not reached")

    with pytest.raises(Interrupted):
        command(steps)
    assert undone == ["step"]


def test_from_the_commit_on_a_signal_changes_nothing(before):
    undone = []
    with Interruption() as interruption, interruption.undoing() as undo:
        undo.push(undone.append, "step")
        interruption.hold()
        send(signal.SIGINT, signal.SIGTERM)
        undo.keep()
    assert undone == []


def test_what_was_ignored_stays_ignored():
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption():
            send(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, was)


def test_another_thread_may_use_it(before):
    failed = []

    def work():
        try:
            with Interruption() as interruption, interruption.held():
                pass
        except ValueError as error:  # what Python says to signal.signal there
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=10)
    assert not failed
