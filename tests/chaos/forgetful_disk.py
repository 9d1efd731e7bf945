"""A block device that forgets at a power loss what was not flushed, with a real file system on it.

Always true:
  - what was written is read back, and counts as durable only once a flush that came after it was answered;
  - at a power loss a part of what was not flushed goes: whole writes, the end of a write, or any of its
    sectors of 512 bytes. The seed decides which part; everything may go, or nothing;
  - a device that has lost its power answers nothing but errors, for ever: who still holds it cannot reach
    what was restored after it.

A process of its own serves one file through /dev/fuse, and holds its bytes in memory. A loop device over that
file has the file system, and makes FSYNC requests of its flushes. The process is not the one that tests,
because a page fault may hold the interpreter for as long as it waits for an answer. It ends with whoever
holds its standard input, and takes its mounts with it.

It speaks the kernel's protocol itself: a dozen structures of a stable interface, where a package and the
system's library would be two more things to install. A network block device needs a module that many kernels
lack; the device mapper's `flakey` drops whole writes, and flushed ones too; its `log-writes` needs a second
device, and a program to replay it, and cannot tear a write.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import IO, Self

SECTOR_BYTES = 512
WRITE_BYTES_MAX = 2**20
# How many requests a power loss waits for a moment when enough is not flushed.
PATIENCE = 500

# ---- the device

Write = tuple[int, bytes, bytes]


class Memory:
    """The bytes of the device, and what of them was not flushed: each write with what was there before it."""

    def __init__(self, size: int) -> None:
        self.bytes = mmap.mmap(-1, size)
        self.unflushed: list[Write] = []
        self.flushes = 0

    def write(self, offset: int, data: bytes) -> None:
        self.unflushed.append((offset, self.bytes[offset : offset + len(data)], data))
        self.bytes[offset : offset + len(data)] = data

    def flush(self) -> None:
        self.unflushed.clear()
        self.flushes += 1

    def lose_power(self, seed: str) -> dict[str, int]:
        """Forget some of what was not flushed. Returns what was counted since the loss before."""
        for offset, before, _ in reversed(self.unflushed):
            self.bytes[offset : offset + len(before)] = before
        sectors = kept = torn = 0
        for offset, size, pieces in survivors(random.Random(seed), self.unflushed):
            sectors += size // SECTOR_BYTES
            kept_of_it = 0
            for start, data in pieces:
                self.bytes[offset + start : offset + start + len(data)] = data
                kept_of_it += len(data) // SECTOR_BYTES
            kept += kept_of_it
            torn += 0 < kept_of_it < size // SECTOR_BYTES
        found = {
            "flushes": self.flushes,
            "unflushed writes": len(self.unflushed),
            "torn writes": torn,
            "unflushed sectors": sectors,
            "forgotten sectors": sectors - kept,
        }
        self.unflushed.clear()
        self.flushes = 0
        return found


def survivors(rng: random.Random, writes: list[Write]) -> Iterator[tuple[int, int, list[tuple[int, bytes]]]]:
    """Of each write its offset, its size, and the pieces of it that are kept. Of two writes to one place the
    later one may be lost and the earlier one kept."""
    how = rng.choice(("nothing", "prefix", "writes", "writes", "sectors", "sectors", "ends"))
    chance = rng.choice((0.05, 0.5, 0.5, 0.95))
    prefix = rng.randrange(len(writes) + 1)
    for number, (offset, _, data) in enumerate(writes):
        count = len(data) // SECTOR_BYTES
        if how == "nothing":
            kept: list[range] = []
        elif how == "prefix":
            kept = [range(count if number < prefix else rng.randrange(count + 1) if number == prefix else 0)]
        elif how == "writes":
            kept = [range(count)] if rng.random() < chance else []
        elif how == "ends":
            kept = [range(rng.randrange(count + 1))]
        else:
            kept = [range(at, at + 1) for at in range(count) if rng.random() < chance]
        pieces = [(each.start, each.stop) for each in kept]
        yield (
            offset,
            len(data),
            [
                (first * SECTOR_BYTES, data[first * SECTOR_BYTES : end * SECTOR_BYTES])
                for first, end in pieces
            ],
        )


# ---- FUSE, as the kernel's include/uapi/linux/fuse.h has it

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 2, 3, 4, 14, 15, 16
RELEASE, FSYNC, INIT, INTERRUPT, BATCH_FORGET = 18, 20, 26, 36, 42
ROOT_ID, FILE_ID = 1, 2
NAME = b"disk.img"
VERSION = (7, 31)
FLAG_BIG_WRITES, FLAG_MAX_PAGES = 1 << 5, 1 << 22
OPEN_DIRECT_IO = 1
FOR_EVER_S = 10**6

IN_HEADER = Struct("<IIQQIIIHH")
OUT_HEADER = Struct("<IiQ")
INIT_IN = Struct("<IIII")
INIT_OUT = Struct("<IIIIHHIIHHI28x")
ATTRIBUTES = Struct("<QQQQQQIIIIIIIIII")
ENTRY_OUT = Struct("<QQQQII")
ATTRIBUTES_OUT = Struct("<QII")
OPEN_OUT = Struct("<QIi")
READ_WRITE_IN = Struct("<QQIIQII")
FSYNC_IN = Struct("<QII")
WRITE_OUT = Struct("<II")


class Server:
    """Answers the kernel, one request after the other."""

    def __init__(self, place: str, size: int) -> None:
        self.place = place
        self.memory = Memory(size)
        self.lock = threading.Lock()
        # Each opening of the file is a life of the device: its handle is the life's number.
        self.life = 0
        self.is_on = False
        # How many more writes and flushes are taken before the power goes, where that was ordered, and how
        # many writes should not be flushed then.
        self.left: int | None = None
        self.unflushed = 0
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self.fd},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0"
        if libc.mount(b"forgetful", place.encode(), b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mounting FUSE", place)

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.fd, WRITE_BYTES_MAX + 2**16)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return  # it was unmounted
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue  # a request that was interrupted
                raise
            _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            with self.lock:
                code, answer = self.answer(opcode, node, request[IN_HEADER.size :])
            try:
                os.write(self.fd, OUT_HEADER.pack(OUT_HEADER.size + len(answer), -code, unique) + answer)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise

    def answer(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        """An error's number, or 0, and what comes with it."""
        if opcode == INIT:
            _, _, readahead, _ = INIT_IN.unpack_from(body)
            flags = FLAG_BIG_WRITES | FLAG_MAX_PAGES
            pages = WRITE_BYTES_MAX // mmap.PAGESIZE
            return 0, INIT_OUT.pack(*VERSION, readahead, flags, 0, 0, WRITE_BYTES_MAX, 1, pages, 0, 0)
        if opcode == LOOKUP:
            if body.rstrip(b"\0") != NAME:
                return errno.ENOENT, b""
            return 0, ENTRY_OUT.pack(FILE_ID, 0, FOR_EVER_S, FOR_EVER_S, 0, 0) + self.attributes(FILE_ID)
        if opcode in (GETATTR, SETATTR):
            return 0, ATTRIBUTES_OUT.pack(FOR_EVER_S, 0, 0) + self.attributes(node)
        if opcode == OPEN:
            self.life += 1
            self.is_on = True
            self.left = None
            # Past the cache of the kernel, so that each write comes here when it is made.
            return 0, OPEN_OUT.pack(self.life, OPEN_DIRECT_IO, 0)
        if opcode == RELEASE:
            return 0, b""
        if opcode in (READ, WRITE):
            life, offset, size, *_ = READ_WRITE_IN.unpack_from(body)
            if life != self.life or not self.is_on:
                return errno.EIO, b""
            if opcode == READ:
                return 0, self.memory.bytes[offset : offset + size]
            # The one at which the power goes may be in part on the disk.
            self.memory.write(offset, body[READ_WRITE_IN.size : READ_WRITE_IN.size + size])
            return self.count(WRITE_OUT.pack(size, 0))
        if opcode == FSYNC:
            life, *_ = FSYNC_IN.unpack_from(body)
            if life != self.life or not self.is_on:
                return errno.EIO, b""
            code, answer = self.count(b"")
            if not code:
                self.memory.flush()
            return code, answer
        return errno.ENOSYS, b""

    def attributes(self, node: int) -> bytes:
        size = len(self.memory.bytes) if node == FILE_ID else 0
        mode = stat.S_IFREG | 0o600 if node == FILE_ID else stat.S_IFDIR | 0o700
        return ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def count(self, answer: bytes) -> tuple[int, bytes]:
        if self.left is not None:
            self.left -= 1
            enough = self.left < -PATIENCE or len(self.memory.unflushed) >= self.unflushed
            if self.left < 0 and enough:
                self.cut()
                return errno.EIO, b""
        return 0, answer

    # What the test's process asks for, a line each.

    def arm(self, requests: int, unflushed: int) -> None:
        self.left, self.unflushed = requests, unflushed

    def cut(self) -> None:
        if self.is_on:
            self.is_on = False
            self.left = None
            say({"lost": True})

    def forget(self, seed: str) -> None:
        """Say what has become of what was not flushed."""
        self.cut()
        say(self.memory.lose_power(seed))

    def obey(self) -> None:
        orders: dict[str, Callable[..., None]] = {"arm": self.arm, "cut": self.cut, "forget": self.forget}
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            with self.lock:
                orders[name](*arguments)
        # Nobody is there any more. What is mounted on the device may write back what it has, and fails.
        with self.lock:
            self.is_on = False
        for place in (f"{self.place}.mounted", self.place):
            subprocess.run(["umount", "-l", place], stderr=subprocess.DEVNULL, check=False)
        os._exit(0)


def say(answer: Mapping[str, object]) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


# ---- what tests use


def why_not_here() -> str | None:
    """Why this machine cannot have such a device."""
    if os.geteuid() != 0:
        return "it needs to run as root"
    for path in ("/dev/fuse", "/dev/loop-control"):
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError as error:
            return f"{path} does not open: {error.strerror}"
    for program in ("mkfs.ext4", "losetup", "mount"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    return None


# What makes a file system, and how large one has to be: XFS makes none below 300 MiB.
FILE_SYSTEMS = {
    "ext4": (["mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0"], 160 * 2**20),
    "xfs": (["mkfs.xfs", "-q", "-f", "-K"], 320 * 2**20),
}


class ForgetfulDisk:
    """The device, and the file system that is on it, mounted at `place`. The file's folder is `folder`."""

    def __init__(self, folder: Path, file_system: str = "ext4", options: str = "") -> None:
        self.folder = folder
        self.place = Path(f"{folder}.mounted")
        self.file_system = file_system
        self.options = options
        self.device = ""
        folder.mkdir()
        self.place.mkdir()
        _, size = FILE_SYSTEMS[file_system]
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # it cleans up where others are interrupted
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders: IO[bytes] = self.process.stdin
        self.answers: IO[bytes] = self.process.stdout
        try:
            assert self.answer() == {"mounted": True}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def order(self, *words: object) -> None:
        self.orders.write(json.dumps(words).encode() + b"\n")
        self.orders.flush()

    def answer(self) -> dict[str, int]:
        line = self.answers.readline()
        assert line, "the process that serves the device has ended"
        found: dict[str, int] = json.loads(line)
        return found

    def plug_in(self) -> str:
        """Make the loop device, which is the disk's next life."""
        command = ["losetup", "--find", "--show", str(self.folder / NAME.decode())]
        self.device = run(*command).strip()
        return self.device

    def make_file_system(self) -> None:
        command, _ = FILE_SYSTEMS[self.file_system]
        self.plug_in()
        run(*command, self.device)
        self.unplug()

    def unplug(self) -> None:
        run("losetup", "--detach", self.device)
        self.device = ""

    def mount(self) -> None:
        """Mount what is there, by its journal. The loop device goes with the mount, however that ends."""
        options = ",".join(["noatime", *filter(None, [self.options])])
        device = self.plug_in()
        try:
            run("mount", "-t", self.file_system, "-o", options, device, str(self.place))
        finally:
            self.unplug()

    def unmount(self) -> None:
        run("umount", str(self.place))

    def arm(self, requests: int, unflushed: int = 0) -> None:
        """Let the power go at the write or flush after so many more of them, once so many writes are not
        flushed, or that does not come about. `wait_for_loss` sees it."""
        self.order("arm", requests, unflushed)

    def cut(self) -> None:
        """Now, if it has not gone before."""
        self.order("cut")

    def wait_for_loss(self) -> None:
        assert self.answer() == {"lost": True}

    def forget(self, seed: str) -> dict[str, int]:
        """Decide what the power loss takes of what was not flushed. The power stays off until `plug_in`."""
        self.order("forget", seed)
        return self.answer()

    def close(self) -> None:
        try:
            self.orders.close()
        except BrokenPipeError:
            pass
        self.process.wait()
        self.answers.close()
        # Also where that process was killed.
        for path in (self.place, self.folder):
            while os.path.ismount(path):
                subprocess.run(["umount", "-l", path], check=True)
        if self.device:
            subprocess.run(["losetup", "--detach", self.device], stderr=subprocess.DEVNULL, check=False)


def run(*command: str) -> str:
    """A command's output. One that fails for what still holds a device a moment longer is tried again."""
    for wait_s in (0.02, 0.1, 0.5, 2.0, None):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        if wait_s is None or "busy" not in done.stderr:
            break
        time.sleep(wait_s)
    raise AssertionError(f"{' '.join(command)}: {done.stderr.strip()}")


def main(place: str, size: str) -> None:
    server = Server(place, int(size))
    threading.Thread(target=server.obey, daemon=True).start()
    say({"mounted": True})
    server.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
