"""The program that runs untrusted code: it gives up its rights first, for good.

Run as a script by `sandbox`, without any package. A seccomp filter (Linux, x86-64) leaves the
process the few system calls that computing needs: it may read files, but cannot write or remove
any, start processes or threads, open sockets, or send signals. What is refused fails with "not
permitted". Limits of memory and time are set before.

The filter is a list of what is allowed (source: the kernel's seccomp_filter.rst and
linux/filter.h), so that a call that is not known here is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

# Numbers of arch/x86/entry/syscalls/syscall_64.tbl.
ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23,
    "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "nanosleep": 35, "getpid": 39,
    "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98,
    "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
    "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262, "readlinkat": 267,
    "faccessat": 269, "pselect6": 270, "ppoll": 271, "getrandom": 318, "statx": 332, "rseq": 334,
    "faccessat2": 439,
}  # fmt: skip
_OPENAT = 257
# Flags with which `openat` only reads; O_RDONLY itself is 0.
_READING = os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | 0o100000
_X86_64 = 0xC000003E
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _NOT_PERMITTED = 0x7FFF0000, 0x00050001
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_RESULT = 1


def is_supported() -> bool:
    """Whether this system has the filter."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def filter_program() -> bytes:
    """The filter as the kernel takes it: instructions of 8 bytes."""
    refuse = (_RETURN, 0, 0, _NOT_PERMITTED)
    allow = (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _X86_64),
        refuse,
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in ALLOWED.values():
        program += [(_IF_EQUAL, 0, 1, number), allow]
    program += [
        (_IF_EQUAL, 1, 0, _OPENAT),
        refuse,
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_IF_ANY_BIT, 0, 1, 0xFFFFFFFF & ~_READING),
        refuse,
        allow,
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def confine(timeout_s: float, memory_bytes: int) -> None:
    """Give up all rights but to compute and to read.

    Raises:
        OSError: the kernel refuses the filter.
    """
    library = ctypes.CDLL(None, use_errno=True)
    # With the parent gone nobody would end what sleeps.
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    seconds = int(timeout_s) + 1
    for name, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (limit, limit))
    code = filter_program()
    program = _FilterProgram(len(code) // 8, code)
    refused = library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or library.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    )
    if refused:
        raise OSError(ctypes.get_errno(), "seccomp filters are not available")


def run(task: dict[str, Any]) -> bool:
    """Run the code, then its tests in the same module; whether both ended without an error."""
    module: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(task["code"], "<response>", "exec"), module)
        exec(compile(task["tests"], "<tests>", "exec"), module)
    except BaseException:  # noqa: BLE001 - whatever it raises, it has failed
        return False
    return True


def main() -> None:
    """Read a task from stdin, run it, and write its token to stdout if it passes."""
    result = os.dup(_RESULT)
    nowhere = os.open(os.devnull, os.O_RDWR)
    task = json.load(sys.stdin.buffer)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        confine(task["timeout_s"], task["memory_bytes"])
    except OSError as error:
        os.write(result, f"refused: {error}".encode())
        os._exit(1)
    token = task.pop("token").encode()
    if run(task):
        os.write(result, token)
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
