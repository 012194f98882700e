"""Writing to a received tensor of a fan-out: the process ends as it did, and standard error says why."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from shmtensor import native
from shmtensor.channel import cleanup
from shmtensor.channel.names import socket_dir

from ..forkservers import preloaded, run_program

compiled = pytest.mark.skipif(native.module is None, reason="nothing was compiled: the fault says nothing by itself")

PROLOGUE = """
import ctypes, faulthandler, mmap, os, signal, sys, threading
import numpy as np
import shmtensor
from shmtensor import Publisher, Subscriber
channel = sys.argv[1]
def write(array):
    # as a function of a library does that looks at no flag
    ctypes.memset(array.ctypes.data, 0, 1)
"""
PAIR = """
pub, sub = Publisher(channel, slots=4), Subscriber(channel)
def take(value, **options):
    pub.send(value)
    return sub.recv(timeout=100, **options)
"""
SAID = re.compile(
    r'shmtensor: process (\d+) wrote to message (\d+) of channel "([^"]+)", which it has received: .*'
    r"msg\.copy\(\) or recv\(copy=True\).*segmentation fault\.\n"
)
INHERITED = re.compile(
    r'shmtensor: process (\d+) touched a message of channel "([^"]+)", which process (\d+) had received when it forked'
)


@pytest.fixture(scope="module")
def torch_server():
    with preloaded("torch", "numpy") as server:
        yield server


@pytest.fixture
def run(torch_server, channel, tmp_path):
    """Runs a program to its end, without a core file; what it leaves is swept, as the next join would."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        limit = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        if "torch" in code:  # importing it takes longer than all the rest
            done = run_program(torch_server, limit + "import torch\n" + PROLOGUE + code, channel, directory=tmp_path)
        else:
            command = [sys.executable, "-c", limit + PROLOGUE + code, channel]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        for name in cleanup.channels():
            if name.startswith(channel):
                cleanup.sweep_channel(name, socket_dir(), patience=10)
        return done

    return run


def ended_with_a_fault(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "done" not in done.stdout


WRITES = {
    "an element": "msg = take(torch.ones(8)); msg.value[3] = 1",
    "in place": "msg = take(torch.ones(8)); msg.value.add_(1)",
    "out=": "msg = take(torch.ones(8)); torch.add(msg.value, 1, out=msg.value)",
    "a view": "x = take(torch.ones(8, 8)).value[3:].T; x.zero_()",
    "by NumPy": "msg = take(torch.ones(8)); msg.value.numpy()[...] = 0",
    "its last byte": "msg = take(torch.ones(100_001, dtype=torch.uint8)); msg.value[-1] = 1",
    "a leaf": "msg = take({'id': 7, 'x': [torch.ones(3), torch.ones(5)]}, ); msg.value['x'][1].mul_(2)",
    "in a thread": "x = take(torch.ones(8)).value; t = threading.Thread(target=x.add_, args=(1,)); t.start(); t.join()",
    "by torch's threads": "torch.set_num_threads(4); msg = take(torch.ones(4096, 4096)); msg.value.div_(255)",
    "by threads": (
        "msg = take(torch.ones(16, 4096)); barrier = threading.Barrier(16)\n"
        "def write(n):\n    barrier.wait()\n    ctypes.memset(msg.value[n].data_ptr(), 0, 4096)\n"
        "ts = [threading.Thread(target=write, args=(n,)) for n in range(16)]\n"
        "for t in ts: t.start()\nfor t in ts: t.join()\n"
    ),
}


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("write", WRITES)
def test_it_says_which_message(run, channel, write):
    """The fourth message: the first ones by the Python code, the later by the compiled module."""
    code = f"{PAIR}\nfor _ in range(3): take(torch.ones(8)).release()\n{WRITES[write]}\nprint('done')"
    done = run(code)
    ended_with_a_fault(done)
    (found,) = SAID.findall(done.stderr)
    assert found[1:] == ("4", channel)


@pytest.mark.slow
@pytest.mark.parametrize("write", ["an element", "by NumPy"])
def test_pure_python_ends_as_before(run, channel, monkeypatch, write):
    monkeypatch.setenv("SHMTENSOR_PURE", "1")
    done = run(f"{PAIR}\n{WRITES[write]}\nprint('done')")
    ended_with_a_fault(done)
    assert "shmtensor:" not in done.stderr


@pytest.mark.slow
def test_copies_may_be_written(run, channel):
    code = f"""{PAIR}
take(torch.ones(8), copy=True).value.add_(1)
take(torch.ones(8)).copy().add_(1)
with shmtensor.Producer(channel + "-q") as tx, shmtensor.Consumer(channel + "-q") as rx:
    tx.send(torch.ones(8))
    rx.recv(timeout=100).value.add_(1)
try:
    take(np.ones(3)).value[0] = 1
except ValueError as error:
    print(error)
pub.close(); sub.close()
print("done")
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "assignment destination is read-only\ndone\n"


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("many", ["slots", "rings", "publishers"])
def test_the_message_is_found(run, channel, many):
    """A message of several slots, beside records of older ones; one of another ring; of another sender."""
    code = {
        "slots": """
pub, sub = Publisher(channel, slots=8, slot_bytes=4096), Subscriber(channel)
for n in range(13):
    pub.send(torch.ones(256)); sub.recv(timeout=100).release()
pub.send(torch.ones(5 * 1024))
msg = sub.recv(timeout=100)
assert msg.seq == 14
msg.value[int(sys.argv[0] == "") - 1] = 1
""",
        "rings": """
pub, sub = Publisher(channel, slots=2, full="grow"), Subscriber(channel)
kept = []
for n in range(14):
    pub.send(torch.ones(50 * (n + 1))); kept.append(sub.recv(timeout=100))
assert pub.statistics().rings > 2
kept[13].value[0] = 1
""",
        "publishers": """
pubs, sub = [Publisher(channel, slots=32) for _ in range(3)], Subscriber(channel)
kept = []
for n in range(14):
    for number, pub in enumerate(pubs):
        if number == 1 or n < 3:
            pub.send(torch.full((8,), float(number))); kept.append(sub.recv(timeout=100))
assert kept[-1].seq == 14
kept[-1].value[0] = 1
""",
    }[many]
    done = run(code)
    ended_with_a_fault(done)
    (found,) = SAID.findall(done.stderr)
    assert found[1] == "14"
    assert found[2].startswith(channel)


HANDLERS = {
    "none": "",
    "faulthandler": "faulthandler.enable()",
    "faulthandler of all threads": "faulthandler.enable(all_threads=True)",
    "torch's": "torch._C._set_worker_signal_handlers()",
    "both": "faulthandler.enable(); torch._C._set_worker_signal_handlers()",
    "ignored": "signal.signal(signal.SIGSEGV, signal.SIG_IGN)",
    "off again": "faulthandler.enable(); faulthandler.disable()",
}
TELLS = {
    "faulthandler": "Fatal Python error: Segmentation fault",
    "torch's": "segmentation fault encountered in worker",
}


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("handlers", HANDLERS)
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_beside_other_handlers(run, channel, handlers, when):
    """Each of them still has its say, and the process ends by the signal. What took it after us has it alone until the
    next ring is mapped."""
    setting = HANDLERS[handlers]
    parts = {
        "before": f"{setting}\n{PAIR}\nmsg = take(np.ones(8))",
        "between": f"{PAIR}\ntake(np.ones(8))\n{setting}\nother = Subscriber(channel)\n"
        "msg = take(np.ones(8)); other.recv(timeout=100)",
        "after": f"{PAIR}\nmsg = take(np.ones(8))\n{setting}",
    }
    done = run(f"{parts[when]}\nwrite(msg.value)\nprint('done')")
    ended_with_a_fault(done)
    said = SAID.findall(done.stderr)
    if when != "after" or handlers == "none":
        assert len(said) == 1
        assert said[0][2] == channel
    assert len(said) <= 1
    for name, text in TELLS.items():
        if name in handlers or (handlers == "both" and name == "torch's"):
            assert done.stderr.count(text) == 1
    if "faulthandler" in handlers:
        assert 'File "<string>"' in done.stderr  # the line that wrote


ELSEWHERE = {
    "null": "ctypes.memset(8, 1, 1)",
    "read-only": (
        "m = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)\nctypes.memset(np.frombuffer(m, 'u1').ctypes.data, 1, 1)"
    ),
    "sent": "os.kill(os.getpid(), signal.SIGSEGV); import time; time.sleep(10)",
    "raised": "signal.raise_signal(signal.SIGSEGV)",
    "unguarded": (
        "from shmtensor import native\nm = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)\n"
        "at = np.frombuffer(m, 'u1').ctypes.data\nrecords = ctypes.create_string_buffer(4096)\n"
        "number = native.module.guard(at, 4096, ctypes.addressof(records), 4, 1024, 'x')\n"
        "native.module.unguard(number)\nctypes.memset(at, 1, 1)"
    ),
}


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("fault", ELSEWHERE)
@pytest.mark.parametrize("handlers", ["none", "faulthandler", "torch's"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_other_faults_are_passed_on(run, channel, fault, handlers, when):
    setting, again = HANDLERS[handlers], "other = Subscriber(channel); take(np.ones(8)); other.recv(timeout=100)"
    first = f"{setting}\n{PAIR}\nmsg = take(np.ones(8))"
    if when == "between":
        first = f"{PAIR}\nmsg = take(np.ones(8))\n{setting}\n{again}"
    done = run(f"{first}\n{ELSEWHERE[fault]}\nprint('done')")
    ended_with_a_fault(done)
    assert "shmtensor:" not in done.stderr
    if (when, fault) != ("between", "raised"):  # of which none can tell whether faulthandler has passed it on
        for name, text in TELLS.items():
            assert done.stderr.count(text) == (name == handlers)


REPAIR = """
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_uint64 * 16), ("flags", ctypes.c_int),
                ("restorer", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
at = np.frombuffer(page, "u1").ctypes.data
seen = []
@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def repair(number, info, context):
    seen.append((number, ctypes.c_uint64.from_address(info + 16).value))
    libc.mprotect(ctypes.c_void_p(seen[-1][1] & -4096), ctypes.c_size_t(4096), 3)
action = Action(ctypes.cast(repair, ctypes.c_void_p), flags=4)
assert libc.sigaction(11, ctypes.byref(action), None) == 0
"""


@compiled
def test_a_handler_that_repairs_goes_on_doing_so(run, channel):
    """As those of other runtimes do: it sees the address, and the instruction runs again when it returns."""
    code = f"{REPAIR}\n{PAIR}\nmsg = take(np.ones(8))\nlibc.memset(ctypes.c_void_p(at + 100), 7, 1)\n"
    code += "assert (seen, page[100]) == ([(11, at + 100)], 7)\npub.close(); sub.close(); print('done')"
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_an_ignored_signal_that_is_sent_stays_ignored(run, channel):
    code = f"{HANDLERS['ignored']}\n{PAIR}\nmsg = take(np.ones(8))\n"
    code += "for _ in range(3): os.kill(os.getpid(), signal.SIGSEGV)\npub.close(); sub.close(); print('done')"
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@compiled
@pytest.mark.parametrize("what", ["inherited", "read", "its own"])
def test_in_a_forked_child(run, channel, what):
    """The child has no part in its parent's views, and a table of its own for what it receives itself."""
    code = f"""{PAIR}
msg = take(np.ones(8))
pid = os.fork()
if not pid:
    {{}}
    print("done")
    os._exit(0)
status = os.waitpid(pid, 0)[1]
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
print(pid, os.getpid(), flush=True)
write(msg.value)
"""
    own = "pub, sub = Publisher(channel + '-child'), Subscriber(channel + '-child'); write(take(np.ones(8)).value)"
    touched = {"inherited": "write(msg.value)", "read": "msg.value.sum()", "its own": own}[what]
    done = run(code.format(touched))
    ended_with_a_fault(done)
    child, parent = done.stdout.split()
    said = SAID.findall(done.stderr)
    assert said[-1] == (parent, "1", channel)
    if what != "its own":
        assert INHERITED.findall(done.stderr) == [(child, channel, parent)]
        assert len(said) == 1
    else:
        assert said[0] == (child, "1", f"{channel}-child")


@compiled
def test_rings_come_and_go(run, channel):
    """Places in the table are used again, and a mapping that is gone is not named."""
    code = """
pub = Publisher(channel, history=1)
pub.send(np.ones(8))
for n in range(50):
    with Subscriber(channel) as sub:
        value = sub.recv(timeout=100).value
    del value
subs = [Subscriber(channel) for _ in range(20)]
values = [sub.recv(timeout=100).value for sub in subs]
del subs[::2], values[::2]
write(values[7])
"""
    done = run(code)
    ended_with_a_fault(done)
    (found,) = SAID.findall(done.stderr)
    assert found[1:] == ("1", channel)


@compiled
@pytest.mark.parametrize("closed", [False, True])
def test_after_its_endpoints_are_gone(run, channel, closed):
    """The records are read as long as a view lives."""
    code = f"{PAIR}\nvalue = take(np.ones(8)).value\n"
    code += "pub.close(); sub.close()\n" if closed else "del pub, sub, take\nimport gc; gc.collect()\n"
    done = run(code + "write(value)")
    ended_with_a_fault(done)
    (found,) = SAID.findall(done.stderr)
    assert found[1:] == ("1", channel)


@compiled
def test_wrong_arguments():
    module = native.module
    for arguments in ((0, 1, 1, 1, 1, "x"), (1, 1, 1, 1, 0, "x"), (1, 1, 1, 1, 1, "x" * 65)):
        with pytest.raises(ValueError, match="no mapping"):
            module.guard(*arguments)
    module.unguard(12345)  # nothing of ours


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["np.ones(8)", "torch.ones(8)", "{'a': [np.ones(8), np.zeros(3)]}"])
@pytest.mark.parametrize("pattern", ["Publisher, Subscriber", "Producer, Consumer"])
@pytest.mark.parametrize("end", ["open", "closed"])
def test_a_forked_child_cannot_read_its_parents_views(run, channel, pattern, kind, end):
    """Nor the slots that are on loan to its parent: it has no lease, so that they may be another message's by then."""
    code = f"""
import shmtensor.errors
from shmtensor import Producer, Consumer
make, take = {pattern}
out, into = make(channel, slots=4), take(channel)
for n in range(4):
    out.send({kind})
    msg = into.recv(timeout=100)
    if n < 3:
        msg.release()
value = msg.value if {kind[0] != "{"} else msg.value["a"][0]
kept = msg.copy()
with out.loan(8, np.float32) as loan:
    lent = loan.array
    if {end == "closed"}:
        into.close()
    for view in (value, lent, kept if {kind[0] != "{"} else kept["a"][0]):
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            view.sum()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    assert value.sum() == 8
    lent[:] = 1
    del lent, view
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["-11", "-11", "7"]
