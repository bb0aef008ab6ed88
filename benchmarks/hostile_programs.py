"""Programs that try to pass tests, or to do harm, without solving a task.

Each would have to define `f(x)` that returns x + 1. `{secret!r}`, `{port}` and
`{sleep_s}` stand for a file, a port and a time of whoever runs them.
"""

TESTS = "assert f(1) == 2 and f(5) == 6"
PROGRAMS = {
  "endless loop": "def f(x):\n  while True: pass",
  "endless loop while loading": "while True: pass",
  "fork bomb": """
import os
def f(x):
  while True:
    try: os.fork()
    except OSError: pass
""",
  "threads": """
import threading, time
def f(x):
  while True:
    threading.Thread(target=time.sleep, args=(100,)).start()
""",
  "memory at once": "def f(x):\n  return len('a' * 10**10)",
  "memory by and by": """
def f(x):
  held = []
  while True: held.append(bytearray(10**6))
""",
  "output": """
import sys
def f(x):
  while True: sys.stdout.write('x' * 10**6); sys.stderr.write('x' * 10**6)
""",
  "a long answer": "def f(x):\n  return 'x' * 10**8",
  "a large file": """
def f(x):
  with open('large', 'wb') as file:
    for _ in range(1000): file.write(b'x' * 10**6)
  return x + 1
""",
  "many files": """
def f(x):
  for i in range(1000):
    with open(f'{i}', 'wb') as file: file.write(b'x' * 10**6)
  return x + 1
""",
  "another's file": "def f(x):\n  open({secret!r}).read()\n  return x + 1",
  "the environment": """
import os
def f(x):
  os.environ['JAXRL_TEST_SECRET']
  return x + 1
""",
  "proc": "def f(x):\n  open('/proc/self/environ').read()\n  return x + 1",
  "writing to the system": "def f(x):\n  open('/usr/x', 'w')\n  return x + 1",
  "writing to the root": "def f(x):\n  open('/x', 'w')\n  return x + 1",
  "the network of this machine": """
import socket
def f(x):
  socket.create_connection(('127.0.0.1', {port}), 1.0)
  return x + 1
""",
  "the network": """
import socket
def f(x):
  socket.create_connection(('192.0.2.1', 53), 1.0)
  return x + 1
""",
  "killing the parent": """
import os
def f(x):
  for pid in (os.getppid(), 1, -1):
    try: os.kill(pid, 9)
    except OSError: pass
  return 0
""",
  "stopping the parent": """
import os, signal
def f(x):
  os.kill(1, signal.SIGSTOP)
  return 0
""",
  "tracing the parent": """
import ctypes
def f(x):
  return x + 1 if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else 0
""",
  "mounting": """
import ctypes
def f(x):
  done = ctypes.CDLL(None).mount(b'none', b'/usr', b'tmpfs', 0, None)
  return x + 1 if done == 0 else 0
""",
  "a verdict of its own": """
import os
for fd in range(64):
  try: os.write(fd, b'{"failures": [""]}\\n')
  except OSError: pass
os._exit(0)
""",
  "answers before it was asked": """
import os
for fd in range(64):
  for value in (b'null', b'2', b'6'):
    try: os.write(fd, b'{"number": 0, "value": ' + value + b'}\\n')
    except OSError: pass
os._exit(0)
""",
  "exit with success": "import os\nos._exit(0)",
  "exit with success when called": "import os\ndef f(x): os._exit(0)",
  "SystemExit": "raise SystemExit(0)",
  "equal to everything": """
class Equal:
  def __eq__(self, other): return True
def f(x): return Equal()
""",
  "an integer equal to everything": """
class Equal(int):
  def __eq__(self, other): return True
  __hash__ = int.__hash__
def f(x): return Equal(3)
""",
  "changing the checker": """
import builtins, json
builtins.AssertionError = KeyError
json.dumps = lambda *args: '{"value": true}'
def f(x): return 0
""",
  "a daemon": """
import os, time
def f(x):
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep({sleep_s})
    os._exit(0)
  return 0
""",
  "a deep list": """
def f(x):
  deep = []
  for _ in range(100_000): deep = [deep]
  return deep
""",
  "a huge integer": "def f(x): return 10**(10**6)",
  "a lone surrogate": "def f(x): return '\\ud800'",
  "a lone surrogate in the source": "def f(x): return '\ud800'",
  "no Python": "def f(x",
  "a null byte": "def f(x): return 1\0",
}


def filled(name: str, *, secret: str, port: int, sleep_s: float) -> str:
  """Return a program with what its owner puts in."""
  program = PROGRAMS[name]
  for field, value in (
    ("{secret!r}", repr(secret)),
    ("{port}", str(port)),
    ("{sleep_s}", str(sleep_s)),
  ):
    program = program.replace(field, value)
  return program
