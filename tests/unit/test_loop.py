"""The poll loop."""

from __future__ import annotations

import os

import zmq

from headrace.workers.loop import Loop


def test_descriptors_and_zeromq_sockets_are_called_back_while_there_is_something_to_read() -> None:
    loop, heard = Loop(), []
    reader, writer = os.pipe()
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        port = a.bind_to_random_port("tcp://127.0.0.1")
        b.connect(f"tcp://127.0.0.1:{port}")
        loop.watch(reader, lambda: heard.append("pipe"))
        loop.watch(a, lambda: heard.append("zmq"))
        os.write(writer, b"x")
        b.send(b"x")
        assert a.poll(5000)
        loop.run_once(5)
        loop.run_once(5)
        assert sorted(heard) == ["pipe", "pipe", "zmq", "zmq"]
        loop.unwatch(a)
        loop.unwatch(a)
    os.read(reader, 1)
    loop.run_once(0.01)
    assert len(heard) == 4
    os.close(reader), os.close(writer)


def test_what_a_callback_unwatches_is_not_called_any_more_in_the_same_turn() -> None:
    loop, heard = Loop(), []
    pipes = [os.pipe() for _ in range(2)]

    def called(i: int) -> None:
        heard.append(i)
        loop.unwatch(pipes[1 - i][0])

    for i, (reader, writer) in enumerate(pipes):
        loop.watch(reader, lambda i=i: called(i))  # type: ignore[misc]
        os.write(writer, b"x")
    loop.run_once(5)
    assert len(heard) == 1
    for pair in pipes:
        os.close(pair[0]), os.close(pair[1])


def test_writing_is_waited_for_only_when_asked() -> None:
    loop, heard = Loop(), []
    reader, writer = os.pipe()
    loop.watch(writer, lambda: heard.append("w"))
    loop.run_once(0.01)
    assert heard == []
    loop.watch(writer, lambda: heard.append("w"), write=True)
    loop.run_once(5)
    assert heard == ["w"]
    os.close(reader), os.close(writer)
