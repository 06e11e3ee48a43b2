"""Notes what a process opens, imports and starts: a line for each in the file PIGOU_AUDIT/PID.

Python imports this module at its start, where its folder is in `PYTHONPATH`.
"""

import os
import sys

EVENTS = ("open", "import", "subprocess.Popen")


def begin(folder: str) -> None:
    """Note from now on; the file is open already, so that noting opens nothing."""
    file = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"argv {' '.join(sys.orig_argv)}\n".encode())

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS:
            what = arguments[0]
            if isinstance(what, str | bytes | int):
                os.write(file, f"{event} {what!r}\n".encode(errors="replace"))

    sys.addaudithook(hook)


if "PIGOU_AUDIT" in os.environ:
    begin(os.environ["PIGOU_AUDIT"])
