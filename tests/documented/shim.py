"""``agentkv`` and ``python`` of a page: asks the forge, and ends as what it started does. Needs nothing else."""

import json
import os
import signal
import socket
import sys

forge = socket.socket(socket.AF_UNIX)
forge.connect(os.environ["FORGE"])
argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]  # noqa: PTH119
asked = json.dumps({"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()  # noqa: PTH109
sent = socket.send_fds(forge, [asked], [0, 1, 2])
forge.sendall(asked[sent:])
forge.shutdown(socket.SHUT_WR)
answers = forge.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _frame: os.kill(pid, number))
status = answers.readline()
answers.read()  # until it has ended
sys.exit(int(status or 137))
