# SPDX-License-Identifier: Apache-2.0
"""What mpiexec starts in the place of a test's rank: hand its environment over to the helper, and end as the rank does.

What lives here: a program that imports nothing of the package, and so takes milliseconds. What does not: the fork that
is the rank, which has numpy and the test's module loaded (ranks.py, Note [mpi]).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(name: str, *command: str) -> int:
    """Have the helper fork a rank; return its exit code.

    Args:
        name: of the helper's socket, in Linux's abstract namespace.
        command: what else is a rank, where mpiexec is not MPICH's, whose ranks get their place in the job by a
            descriptor.
    """
    if "PMI_FD" not in os.environ:
        os.execv(command[0], command)
    pmi = int(os.environ["PMI_FD"])
    with socket.socket(socket.AF_UNIX) as helper:
        helper.connect("\0" + name)
        environ = json.dumps(dict(os.environ)).encode()
        socket.send_fds(helper, [len(environ).to_bytes(8, "little")], [1, 2, pmi])
        helper.sendall(environ)
        os.close(pmi)  # mpiexec takes the end of it for the end of the rank
        answer = helper.recv(100)  # while this waits, the helper ends the rank if this process is killed
    code = int(answer or 1)
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the one that Python handles
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
