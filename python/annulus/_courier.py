"""Courier: moves packed messages between the ranks of a torch.distributed group, by batch_isend_irecv, on the CPU.

The library posts an exchange and computes; a thread of the courier's sends, receives and checks meanwhile, and the
library waits for it when it needs the rows. Every message goes behind a frame of fixed size that says what it is, so
ranks that do not run the same thing get an error instead of each other's bytes.

A rank that gives up says why in a note to every other. Each rank has had a receive open for such notes since the
beginning. A gloo receive can only be waited for, and a wait that times out closes all connections of the group, so it
is never waited for: the last byte of a note is not 0, and seeing it means that all of it is there.

A killed rank's connections close, which is noticed at once. One that is stopped is noticed when the timeout of the
process group has passed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import queue
import struct
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from . import _library as c

FRAME_TAG, PAYLOAD_TAG, NOTE_TAG = 0x0A770001, 0x0A770002, 0x0A770003
FRAME = struct.Struct("<Qqq")  # plan, step, bytes
NOTE_BYTES = 1024
LOOK_SECONDS = 0.05  # how often a waiting rank looks for notes
LAST_SECONDS = 1  # for the thread to end, which after a failure may still wait in gloo
FAREWELL_SECONDS = 0.25  # for a note to get out, as the process may end now; and for one to come in


def _bytes(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _memory(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=torch.uint8)


class _Job:
    """One exchange. What is sent is a copy: after an error nobody reads the library's memory."""

    def __init__(self, exchange: c.Exchange):
        self.plan, self.step = exchange.plan, exchange.step
        sends = [exchange.sends[i] for i in range(exchange.send_count)]
        self.sends = [(each.peer, _memory(each.data, each.bytes).clone()) for each in sends]
        receives = [exchange.receives[i] for i in range(exchange.receive_count)]
        self.receives = [(each.peer, each.data, each.bytes) for each in receives]
        self.arrived: list[torch.Tensor] = []
        self.waits_for: int | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def deliver(self) -> None:
        for (_, address, count), tensor in zip(self.receives, self.arrived, strict=True):
            ctypes.memmove(address, tensor.data_ptr(), count)


class Courier:
    """Does not keep the group: threads of gloo's that outlive it, to the end of Python, may take the process down."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = _timeout_of(group)
        self.failure: BaseException | None = None
        self._job: _Job | None = None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._told = threading.Lock()
        self._arrived = ctypes.c_int32(0)  # for the library to look at, without taking the interpreter's lock
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._notes = [torch.zeros(NOTE_BYTES, dtype=torch.uint8) for _ in others]
        self._last_words: list[Any] = []
        self._said = ""  # why this rank gave up
        listening = [self._operation(dist.irecv, *each, NOTE_TAG) for each in zip(self._notes, others, strict=True)]
        self._listening = dist.batch_isend_irecv(listening) if listening else []
        self.callbacks = c.TransportCallbacks(
            rank=self.rank,
            size=self.size,
            post=c.Post(lambda _, exchange, *message: self._guard(message, lambda: self.post(exchange.contents))),
            wait=c.Progress(lambda _, *message: self._guard(message, self.wait)),
            abort=c.Abort(lambda _, text: self.tell(text.decode(errors="replace"))),
            arrived=ctypes.pointer(self._arrived),
        )

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise c.TransportError("the process group is destroyed: make another, and give that one to the call")
        return group

    def end(self) -> None:
        """Nothing is posted any more. The thread is waited for: one that lets go of gloo's works while Python ends would
        take the process down."""
        self._jobs.put(None)
        atexit.unregister(self._set_free)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LAST_SECONDS)
        self._listening.clear()

    # ---- What the library calls

    def post(self, exchange: c.Exchange) -> None:
        if self._said:  # to a transport of another device, over this courier
            raise c.TransportError(self._said)
        self._hear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="annulus-courier", daemon=True)
            self._thread.start()
            atexit.register(self._set_free)
        self._arrived.value = 0
        self._job = _Job(exchange)
        self._jobs.put(self._job)

    def wait(self) -> None:
        job = self._job
        assert job is not None, "the library waits for an exchange that it has not posted"
        begin = time.monotonic()
        while not job.done.wait(LOOK_SECONDS):
            self._hear()
            if self.timeout_s is not None and time.monotonic() - begin > self.timeout_s:
                raise c.TransportError(
                    f"rank {job.waits_for} is lost, or waits for one that is: rank {self.rank} has waited for it for "
                    f"{self.timeout_s:.3g} s at step {job.step}; see what it printed, or give the process group a "
                    "longer timeout if it is only slow"
                )
        if job.error is not None:
            time.sleep(FAREWELL_SECONDS)  # another rank may be about to say what is behind it
            self._hear()
            raise job.error
        job.deliver()
        self._job = None

    def _hear(self) -> None:
        for note in self._notes:
            if note[-1]:
                body = ctypes.string_at(note.data_ptr(), NOTE_BYTES - 1)
                raise c.TransportError(body.rstrip(b"\0").decode(errors="replace"))

    def tell(self, text: str) -> None:
        """Tells all ranks that the group has failed, and why; once."""
        if not self._told.acquire(blocking=False):
            return
        self._said = text
        note = _bytes(text.encode(errors="replace")[: NOTE_BYTES - 1].ljust(NOTE_BYTES - 1, b"\0") + b"\1")
        self._last_words.append(note)  # kept: it may still be on its way
        for peer in range(self.size):
            if peer == self.rank:
                continue
            with contextlib.suppress(RuntimeError):  # that rank cannot be reached any more
                self._last_words += dist.batch_isend_irecv([self._operation(dist.isend, note, peer, NOTE_TAG)])
        time.sleep(FAREWELL_SECONDS)

    def _guard(self, message: tuple[int, int], call) -> int:
        """An exception in a callback becomes the library's transport error, with its text, on every rank."""
        try:
            call()
            return 0
        except BaseException as error:
            self.failure = error
            text = str(error) if isinstance(error, c.TransportError) else f"rank {self.rank} gave up: {error!r}"
            buffer, capacity = message
            encoded = text.encode(errors="replace")[: capacity - 1] + b"\0"
            ctypes.memmove(buffer, encoded, len(encoded))
            self.tell(text)
            return 1

    # ---- The thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._move(job)
            except BaseException as error:
                job.error = error
            self._arrived.value = 1
            job.done.set()

    def _set_free(self) -> None:
        """A thread that still waits in gloo when Python ends would take the process down with it. After a failure one
        may: closing the connections, by a wait that times out, sets it free."""
        job, group = self._job, self._group()
        if job is None or job.done.is_set() or group is None:
            return
        with contextlib.suppress(RuntimeError):
            other = (self.rank + 1) % self.size
            group.recv([torch.empty(1)], other, NOTE_TAG + 1).wait(datetime.timedelta(milliseconds=1))
        job.done.wait(1)

    def _move(self, job: _Job) -> None:
        frames = [torch.empty(FRAME.size, dtype=torch.uint8) for _ in job.receives]
        operations = [
            self._operation(dist.irecv, frame, peer, FRAME_TAG)
            for frame, (peer, _, _) in zip(frames, job.receives, strict=True)
        ]
        for peer, payload in job.sends:
            frame = _bytes(FRAME.pack(job.plan, job.step, payload.numel()))
            operations.append(self._operation(dist.isend, frame, peer, FRAME_TAG))
            operations.append(self._operation(dist.isend, payload, peer, PAYLOAD_TAG))
        works = self._begin(job, operations)
        arriving = []
        for i, (peer, _, count) in enumerate(job.receives):
            self._finish(job, peer, works[i])
            self._check(job, peer, count, frames[i])
            job.arrived.append(torch.empty(count, dtype=torch.uint8))
            receive = self._operation(dist.irecv, job.arrived[-1], peer, PAYLOAD_TAG)
            arriving.append((peer, self._begin(job, [receive])[0]))
        for peer, work in arriving:
            self._finish(job, peer, work)
        outgoing = works[len(frames) :]
        for i, (peer, _) in enumerate(job.sends):
            for work in outgoing[2 * i : 2 * i + 2]:
                self._finish(job, peer, work)

    def _operation(self, kind, tensor: torch.Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, peer), self.group, tag)

    def _begin(self, job: _Job, operations: list[dist.P2POp]) -> list[Any]:
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            peers = sorted({dist.get_group_rank(self.group, each.peer) for each in operations})
            names = " or ".join(f"rank {peer}" for peer in peers)
            raise self._lost(names, job, error) from error

    def _finish(self, job: _Job, peer: int, work: Any) -> None:
        job.waits_for = peer
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(f"rank {peer}", job, error) from error

    def _lost(self, who: str, job: _Job, error: BaseException) -> c.TransportError:
        reason = str(error).strip().partition(". ")[0]
        return c.TransportError(
            f"{who} is lost, and rank {self.rank} waits for it at step {job.step}; see what it printed ({reason})"
        )

    def _check(self, job: _Job, peer: int, count: int, frame: torch.Tensor) -> None:
        plan, step, sent = FRAME.unpack(ctypes.string_at(frame.data_ptr(), FRAME.size))
        if (plan, step, sent) != (job.plan, job.step, count):
            raise c.TransportError(
                f"rank {peer} and rank {self.rank} disagree: rank {peer} sends {sent} bytes at step {step} of plan "
                f"{plan:016x}, rank {self.rank} expects {count} bytes at step {job.step} of plan {job.plan:016x}; all "
                "ranks must make the same calls in the same order"
            )


def _timeout_of(group: dist.ProcessGroup) -> float | None:
    """Nine tenths of the group's own timeout: this rank must speak up before the group's connections are given up."""
    timeout = timeout_on(group, "cpu")
    return None if timeout is None else 0.9 * timeout.total_seconds()


def timeout_on(group: dist.ProcessGroup, device: str) -> datetime.timedelta | None:
    try:
        timeout = group._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):  # another backend, or another version of torch: its own timeout is all
        return None
    return timeout if isinstance(timeout, datetime.timedelta) else None
