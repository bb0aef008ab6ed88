"""Programs that try to pass tests, or to do harm, without solving a task.

Each would have to define `f(x)` that returns x + 1. `{secret!r}`, `{port}` and
`{sleep_s}` stand for a file, a port and a time of whoever runs them.

`of_cases` makes them programs that read a number and write another one.
`COUNTERS` are programs of that kind that count how often they have run.
"""

TESTS = "assert f(1) == 2 and f(5) == 6"
CASES = ({"stdin": "1", "stdout": "2"}, {"stdin": "5", "stdout": "6"})
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
  # What follows does harm to the judge, or to what it touches afterwards.
  "a file in place of its directory": """
import os, shutil
def f(x):
  home = os.environ['HOME']
  os.chdir('/')
  shutil.rmtree(home, ignore_errors=True)
  open(home, 'w').close()
  return 0
""",
  "a link in place of its directory": """
import os, shutil
def f(x):
  home = os.environ['HOME']
  os.chdir('/')
  shutil.rmtree(home, ignore_errors=True)
  os.symlink('/usr', home)
  return 0
""",
  "nested directories": """
import os
def f(x):
  for _ in range(1200):
    os.mkdir('d')
    os.chdir('d')
  return 0
""",
  "directories without permissions": """
import os
def f(x):
  os.makedirs('a/b', exist_ok=True)
  os.chmod('a', 0)
  os.chmod(os.environ['HOME'], 0)
  return 0
""",
  "pipes in place of files": """
import os
def f(x):
  for name in ('program.py', 'stdin', 'left'):
    if os.path.exists(name): os.remove(name)
    os.mkfifo(name)
  return 0
""",
  "interrupting the parent": """
import os, time
def f(x):
  for pid in (os.getppid(), 1):
    try: os.kill(pid, 2)
    except OSError: pass
  time.sleep(0.1)
  return 0
""",
  "every signal to the parent": """
import os, time
def f(x):
  for number in range(1, 65):
    try: os.kill(os.getppid(), number)
    except OSError: pass
  time.sleep(0.1)
  return 0
""",
  "no limits left to the parent": """
import os, resource
def f(x):
  for what in range(16):
    try: resource.prlimit(os.getppid(), what, (0, 0))
    except OSError: pass
  return 0
""",
  "a parent that runs last": """
import os
def f(x):
  os.sched_setaffinity(os.getppid(), {min(os.sched_getaffinity(0))})
  os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))
  while True: pass
""",
  "stopping itself": """
import os, signal
def f(x):
  os.kill(os.getpid(), signal.SIGSTOP)
  return x + 1
""",
  "another program in its place": """
import os
def f(x):
  os.execv('/bin/sleep', ['sleep', '{sleep_s}'])
""",
  "a child that holds its output": """
import os, time
def f(x):
  if os.fork() == 0: time.sleep({sleep_s})
  return 0
""",
  "closing all files": """
import os
def f(x):
  os.closerange(0, 64)
  return x + 1
""",
  "no text": """
import os
def f(x):
  os.write(1, bytes(range(128, 256)))
  return 0
""",
  "an answer that takes long to read": """
import os, sys
def f(x):
  request = sys._getframe(2).f_locals.get('request', {})
  answer = '{"number": %d, "value": %s}\\n' % (request['number'], '9' * 10**6)
  for fd in range(3, 64):
    try: os.write(fd, answer.encode())
    except OSError: pass
""",
  "an error without a name": """
class Error(BaseException):
  def __str__(self): raise self
Error.__name__ = ''
def f(x): raise Error
""",
  "changing the devices": """
import os
def f(x):
  os.chmod('/dev/null', os.stat('/dev/null').st_mode)
  return x + 1
""",
}

PROGRAMS |= {
  "tracing its caller": """
import sys
def trace(frame, event, value):
  for name in ('job', 'tests', 'expected', 'message'):
    if name in frame.f_locals: frame.f_locals[name] = None
  return trace
sys.settrace(trace)
sys.setprofile(trace)
def f(x): return 0
""",
  "success at its exit": """
import atexit, os
atexit.register(os._exit, 0)
def f(x): raise SystemExit(0)
""",
  "a thread that keeps running": """
import threading, time
threading.Thread(target=time.sleep, args=({sleep_s},)).start()
def f(x): return 0
""",
  "a thread that ends everything": """
import os, threading
threading.Timer(0.2, os._exit, (0,)).start()
def f(x):
  while True: pass
""",
  "reading beyond the end": """
import sys
sys.stdin.read()
def f(x): return input('2') or sys.stdin.readline() or input()
""",
  "waiting for input": """
import os, select
def f(x):
  while not os.read(0, 1): pass
""",
  "closing its output": """
import os, sys
os.close(1)
os.close(2)
def f(x): return 0
""",
  "a comparator of the tests": """
import builtins
builtins.abs = builtins.all = builtins.int = lambda *_: True
def isclose(*_): return True
class Any(int):
  __eq__ = __lt__ = __le__ = lambda *_: True
  __sub__ = __rsub__ = lambda *_: Any()
  __hash__ = int.__hash__
def f(x): return Any()
""",
  "a list that disagrees with itself": """
class Any(list):
  def __len__(self): return 2
  def __iter__(self): return iter(())
  def __getitem__(self, i): return 2
  def __eq__(self, other): return True
def f(x): return Any()
""",
}

# What attacks the wire between the tests and the program.
_WIRE = """
import sys
wire = sys.modules['jaxrl_async.rewards.sandbox_wire']
main = sys.modules['__main__']
def f(x): return -1
"""
PROGRAMS |= {
  f"an answer that is {what}": f"""{_WIRE}
real = wire.Wire.encode
wire.Wire.encode = lambda *args: {value} if args[1] == -1 else real(*args)
"""
  for what, value in {
    "a module of the judge": "['named in Python', 'operator', 'add']",
    "a member of a class of the judge": "['member', 'Program', 'ask']",
    "a thing of the judge": "['yours', 0]",
    "a thing that was never given": "['held', 0]",
    "a promise": "['awaitable', 2]",
    "an object that is equal to everything": (
      "['number', 7, {'name': 'int', 'methods': ['__eq__', '__call__']}]"
    ),
    "an object with other methods": (
      "['number', 7, {'name': 'int', 'methods': ['__class__', '__eq__']}]"
    ),
    "an exception": (
      "['number', 7, {'name': 'E', 'methods': [], 'error':"
      " ['SkipTest', 'AssertionError', 'Exception']}]"
    ),
    "a tuple with odd fields": "['named', 'x', ['__eq__', 'a b'], [1, 2]]",
    "no list": "{'list': [2]}",
  }.items()
}
PROGRAMS |= {
  f"an answer with {what}": f"""{_WIRE}
real = wire.Wire.pack
def pack(self, value, *args):
  if value != -1: return real(self, value, *args)
  return {{'value': ['held', 0], 'new': {new}, 'contents': {contents}}}
wire.Wire.pack = pack
"""
  for what, new, contents in (
    ("a command", "[['subprocess.Popen', None]]", "[[0, ['true']]]"),
    ("a class of the judge", "[['builtins.object', None]]", "[]"),
    ("a record of the judge", "[['record', 'Any']]", "[[0, ['x', 2]]]"),
    ("a container that there is not", "[]", "[[0, [2]]]"),
    ("the last container", "[['builtins.list', None]]", "[[-1, [2]]]"),
    (
      "a container in itself",
      "[['builtins.list', None]]",
      "[[0, [['held', 0]]]]",
    ),
  )
}
PROGRAMS |= {
  f"raising {error}": f"{_WIRE}import unittest\ndef f(x): raise {error}\n"
  for error in (
    "NameError('name \\'f\\' is not defined', name='f')",
    "NameError('no such name', name='other')",
    "ImportError('no such module', name='numpy')",
    "type('_NoTests', (Exception,), {})('they do not call the program')",
    "type('NotPlain', (Exception,), {})('it is not plain')",
    "unittest.SkipTest('not today')",
    "SystemExit(0)",
    "GeneratorExit",
    "StopAsyncIteration",
  )
}
PROGRAMS |= {
  "an error that is not sent as asked": f"""{_WIRE}
wire.Wire._failure = lambda *_: {{'error': [[]], 'message': 2, 'value': [2]}}
def f(x): raise ValueError
""",
  "asking the judge to call nothing": f"""{_WIRE}
program = sys._getframe(2).f_locals['self']
def f(x): return program.ask('call', 0, (x,), {{}})
""",
  "asking the judge to do something else": f"""{_WIRE}
program = sys._getframe(2).f_locals['self']
def f(x): return program.ask('get', 0, 'num_calls', {{}})
""",
  "asking the judge for its input": f"""{_WIRE}
program = sys._getframe(2).f_locals['self']
def f(x): return program.ask('read', 'read', [-1]) or x
""",
  "asking the judge to read something else": f"""{_WIRE}
program = sys._getframe(2).f_locals['self']
def f(x): return program.ask('read', '__class__', [])
""",
  "asking the judge without end": f"""{_WIRE}
program = sys._getframe(2).f_locals['self']
def f(x):
  while True:
    try: program.ask('call', 0, (x,), {{}})
    except Exception: pass
""",
  "names of Python and of the tests": """
def check(*_): pass
test_f = check
class AssertionError(Exception): pass
all = any = bool = isinstance = lambda *_: True
__builtins__ = {}
__debug = False
def __getattr__(name): return lambda *_: True
""",
  "an object that agrees": """
class Agrees:
  def __getattr__(self, name): return lambda *_: True
  def __eq__(self, other): return True
  def __ne__(self, other): return False
  __bool__ = __contains__ = __lt__ = __gt__ = __eq__
  __sub__ = __rsub__ = __add__ = __radd__ = lambda self, other: other
def f(x): return Agrees()
""",
  "a class that agrees": """
class Any(type):
  def __eq__(self, other): return True
  def __call__(self, x): return self
class f(metaclass=Any): pass
""",
  "a number and not a function": "f = 2",
  "an object and not a function": "f = object()",
}

# Places where a count could live on, each as the body of `n = ...`.
_SYSTEM = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
"""
COUNTERS = {
  name: f"{_SYSTEM}{source}print(n)\n"
  for name, source in {
    **{
      f"a file in {place}": f"""
import pathlib
file = pathlib.Path({place!r}).expanduser() / 'count'
n = 1
try:
  if file.exists(): n += int(file.read_text())
  file.write_text(str(n))
except OSError: pass
"""
      for place in ("~", "/tmp", "/dev/shm", "/dev", "/var/tmp")
    },
    "shared memory": """
known = libc.shmget(0x77, 1 << 12, 0o1666)
place = ctypes.cast(libc.shmat(known, None, 0), ctypes.POINTER(ctypes.c_int))
n = place[0] = place[0] + 1
""",
    "a queue": """
queue = libc.msgget(0x77, 0o1666)
size = 1 + max(libc.msgrcv(queue, ctypes.create_string_buffer(99), 80, 0,
                           0o4000), 0)
message = (ctypes.c_long * 12)(1)
libc.msgsnd(queue, message, size, 0)
n = size
""",
    **{
      f"the keyring {ring}": f"""
number = {{'x86_64': 248, 'aarch64': 217}}[os.uname().machine]
n = 1
while libc.syscall(number + 1, b'user', b'%d' % n, None, {ring}) >= 0: n += 1
libc.syscall(number, b'user', b'%d' % n, b'.', 1, {ring})
"""
      for ring in (-3, -4, -5)  # of the session, the user, the user's session
    },
    "a process": """
import socket, time
n = 1
address = '\\0count'
with socket.socket(socket.AF_UNIX) as other:
  try: other.connect(address)
  except OSError: pass
  else: n = 2
if os.fork() == 0:
  os.setsid()
  server = socket.socket(socket.AF_UNIX)
  server.bind(address)
  server.listen()
  os.closerange(0, 3)
  time.sleep(1000)
time.sleep(0.1)
""",
  }.items()
}


def of_cases(program: str) -> str:
  """Return a program that reads a number and writes what `f` makes of it."""
  return f"{program}\nprint(f(int(input())))\n"


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
