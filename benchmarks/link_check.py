# SPDX-License-Identifier: Apache-2.0
"""The emulated link (`singa-lite run --link`) beside a real one: MPI between two network namespaces with a shaped veth.

    python benchmarks/link_check.py           all three checks
    python benchmarks/link_check.py traffic   one of them: rate, traffic, baseline

It needs Linux, root, iproute2 with tbf, and MPICH with mpi4py beside this Python, else it says what is missing and
exits with 77. Each namespace plays a host of one rank; a launch agent in place of ssh starts the rank there, and UCX
is told to use TCP over the veth alone.

rate: an all-reduce of the CNN's 1,724,320 B at 100 Mbit/s, over MPI, divided by the same over shm with an emulated link
of 95.6 Mbit/s, which is what TCP/IP and Ethernet headers leave of 100. Wanted: 0.9 to 1.1.
traffic: what the interface has sent in steps 10 to 60 of training the CNN, divided by what the communicator says it
has sent. Wanted: 1.00 to 1.10.
baseline: an all-reduce of 16 MB at 1 Gbit/s, divided by MPICH's own Allreduce in the same run. Wanted: at most 1.15.
Times are medians, each as long as on its slower rank; baseline is the median of the ratios of neighbours. The exit code
is 1 if a figure is not as wanted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import machine
from steps import batch, our_step

MISSING = 77  # automake's exit code for a test that cannot run here
INTERFACE = "w0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CNN_BYTES, LARGE_BYTES = 1_724_320, 16_000_000
WITHOUT_HEADERS = 0.956  # 1448 of 1514 bytes of a full frame
REPEATS, WARM_UP = 15, 3
FIRST_STEP, LAST_STEP = 10, 60
OPTIONS = {"fp32": None, "sparseTopK": 0.01}  # dist_option -> spars
LIMIT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="rate, traffic, baseline (default: all)")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        WORKERS[arguments.worker[0]](*arguments.worker[1:])
        return
    unknown = set(arguments.checks) - set(CHECKS)
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}; choose of {', '.join(CHECKS)}")
    if lacks := missing():
        print(f"link_check: cannot run here: {lacks}")
        sys.exit(MISSING)
    print(machine(), flush=True)
    with namespaces() as hosts:
        results = [CHECKS[name](hosts) for name in arguments.checks or CHECKS]
    print(f"load {os.getloadavg()[0]:.1f}")
    sys.exit(0 if all(results) else 1)


def missing() -> str:
    """Why this cannot run, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs Linux and root"
    absent = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if absent:
        return f"there is no {', '.join(absent)} (packages iproute2, util-linux)"
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists() or "HYDRA" not in output_of([str(mpiexec), "--version"]):
        return "MPICH is not installed beside this Python; pip install 'mpi4py>=4.0' 'mpich>=4.2'"
    name = f"slprobe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made: {error.stderr.strip()}"
    try:
        run("ip", "link", "add", "p0", "netns", name, "type", "veth", "peer", "name", "p1", "netns", name)
        in_namespace(name, *shaped("p0", "100mbit"))
    except subprocess.CalledProcessError as error:
        return f"this kernel has no veth or no tbf: {error.stderr.strip()}"
    finally:
        run("ip", "netns", "del", name)
    return ""


# ---- checks ------------------------------------------------------------------------------------------


def check_rate(hosts: Hosts) -> bool:
    """Compare MPI over tbf with the emulated link."""
    hosts.shape("100mbit")
    real = hosts.run("reduce", str(CNN_BYTES))["ours"]
    link = f"{100 * WITHOUT_HEADERS:g}mbit,0us"
    emulated = emulate(link, "reduce", str(CNN_BYTES))["ours"]
    print(
        f"rate: all-reduce of {CNN_BYTES} B: MPI over tbf 100 Mbit/s {real:.1f} ms, --link {link} {emulated:.1f} ms"
    )
    return verdict("MPI / emulated", real / emulated, 0.9, 1.1)


def check_traffic(hosts: Hosts) -> bool:
    """Compare the interface's counter with bytes_sent, while training."""
    hosts.shape("100mbit")
    results = []
    for option, spars in OPTIONS.items():
        word = option if spars is None else f"{option}:{spars}"
        found = hosts.run("train", option, str(spars or 0))
        emulated = emulate(f"{100 * WITHOUT_HEADERS:g}mbit,0us", "train", option, str(spars or 0))
        print(
            f"traffic: {word}: {found['wire']:.0f} B on the interface, {found['sent']:.0f} B sent a step; a step takes "
            f"{found['step']:.1f} ms, emulated {emulated['step']:.1f} ms"
        )
        results.append(verdict(f"interface / bytes_sent, {word}", found["wire"] / found["sent"], 1.0, 1.1))
    return all(results)


def check_baseline(hosts: Hosts) -> bool:
    """Compare all-reduce with MPICH's own on a link that is not the only limit."""
    hosts.shape("1gbit")
    times = hosts.run("reduce", str(LARGE_BYTES))
    print(
        f"baseline: all-reduce of {LARGE_BYTES} B at 1 Gbit/s: {times['ours']:.0f} ms, "
        f"MPICH's own {times['own']:.0f} ms"
    )
    return verdict("ours / MPICH's own, median of pairs", times["ratio"], 0.0, 1.15)


def verdict(name: str, value: float, lowest: float, highest: float) -> bool:
    is_good = lowest <= value <= highest
    print(
        f"{'ok' if is_good else 'NOT'}: {name} = {value:.3f}, wanted {lowest:.2f} to {highest:.2f}",
        flush=True,
    )
    return is_good


CHECKS = {"rate": check_rate, "traffic": check_traffic, "baseline": check_baseline}


# ---- hosts -------------------------------------------------------------------------------------------


class Hosts:
    """Two namespaces with a veth between them.

    Args:
        names: of the namespaces.
        folder: for the launch agent and the host file.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names = names
        self.agent, self.hosts = folder / "agent", folder / "hosts"
        cases = "".join(f"{a}) n={n};; " for a, n in zip(ADDRESSES, names, strict=True))
        self.agent.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
            f'case $1 in {cases}*) echo "no host $1" >&2; exit 1;; esac\nshift\n'
            'exec ip netns exec $n unshare -u sh -c "hostname $n; $*"\n'
        )
        self.agent.chmod(0o755)
        self.hosts.write_text("".join(f"{address}\n" for address in ADDRESSES))

    def shape(self, rate: str) -> None:
        """Give the link between the hosts a rate, in both directions."""
        for name in self.names:
            in_namespace(name, *shaped(INTERFACE, rate))

    def run(self, *worker: str) -> dict[str, float]:
        """Run a worker on both hosts, started from the first; return what rank 0 printed."""
        launcher = [*LAUNCH, "-H", str(self.hosts), "--rsh", str(self.agent), __file__, "--worker", *worker]
        words = " ".join(map(_quoted, launcher))
        first = self.names[0]
        command = [
            "ip",
            "netns",
            "exec",
            first,
            "unshare",
            "-u",
            "sh",
            "-c",
            f"hostname {first}; exec {words}",
        ]
        return answer(command, {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE})


@contextlib.contextmanager
def namespaces() -> Iterator[Hosts]:
    """Make two hosts; nothing of them stays."""
    names = [f"sl{os.getpid()}-{number}" for number in range(2)]
    made = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                made.append(name)
            pair = ["type", "veth", "peer", "name", INTERFACE, "netns", names[1]]
            run("ip", "link", "add", INTERFACE, "netns", names[0], *pair)
            for name, address in zip(names, ADDRESSES, strict=True):
                in_namespace(name, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
                for device in ("lo", INTERFACE):
                    in_namespace(name, "ip", "link", "set", device, "up")
            for name in names:
                while "state UP" not in in_namespace(name, "ip", "link", "show", INTERFACE):
                    time.sleep(0.1)
            time.sleep(2)  # UCX takes lo of an interface that has just come up
            yield Hosts(names, Path(folder))
        finally:
            for name in made:
                run("ip", "netns", "del", name)


LAUNCH = [sys.executable, "-m", "singa_lite", "run", "-n", "2"]


def emulate(link: str, *worker: str) -> dict[str, float]:
    """Run a worker on two ranks of this host with an emulated link; return what rank 0 printed."""
    return answer([*LAUNCH, "--link", link, __file__, "--worker", *worker], {})


def answer(command: Sequence[str], variables: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    lines = [line for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not lines:
        sys.exit(f"link_check: {' '.join(command)}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(lines[0][lines[0].index("{") :])
    return found


def shaped(device: str, rate: str) -> list[str]:
    return [
        "tc",
        "qdisc",
        "replace",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        "32kb",
        "latency",
        "400ms",
    ]


def in_namespace(name: str, *command: str) -> str:
    return run("ip", "netns", "exec", name, *command)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def output_of(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S).stdout


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


# ---- in a rank ---------------------------------------------------------------------------------------


def reduce(num_bytes: str) -> None:
    """Time all-reduces, and in turn MPICH's own where there is MPI; rank 0 prints milliseconds."""
    from singa_lite.comm.rendezvous import process_communicator

    communicator = process_communicator()
    array = np.ones(int(num_bytes) // 4, np.float32)
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: communicator.all_reduce(array, "sum").wait()}
    if communicator.world.transport == "mpi":
        from mpi4py import MPI

        out = np.empty_like(array)
        calls["own"] = lambda: MPI.COMM_WORLD.Allreduce(array, out)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(WARM_UP + REPEATS):
        for name, call in calls.items():
            array[...] = 1
            communicator.barrier()
            start = time.perf_counter()
            call()
            slowest = max(communicator.all_gather_object(time.perf_counter() - start))
            if repeat >= WARM_UP:
                times[name].append(1000 * slowest)
    found = {name: statistics.median(values) for name, values in times.items()}
    if "own" in times:  # by pairs, as the load of the machine changes
        pairs = zip(times["ours"], times["own"], strict=True)
        found["ratio"] = statistics.median(ours / own for ours, own in pairs)
    report(communicator, found)


def train(option: str, spars: str) -> None:
    """Train the CNN; rank 0 prints bytes a step and milliseconds."""
    from singa_lite.comm.rendezvous import process_communicator

    communicator = process_communicator()
    step: Any = our_step("graph", "cnn", *batch("cnn", seed=communicator.rank), is_distributed=True)
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    wire, sent, times = 0, 0, []
    for number in range(LAST_STEP):
        if number == FIRST_STEP:
            wire, sent = counter_of(counter), communicator.traffic.bytes_sent
        start = time.perf_counter()
        step(option, float(spars) or None)
        times.append(1000 * (time.perf_counter() - start))
    num_steps = LAST_STEP - FIRST_STEP
    found = {"wire": (counter_of(counter) - wire) / num_steps}
    found["sent"] = (communicator.traffic.bytes_sent - sent) / num_steps
    report(communicator, {**found, "step": statistics.median(times[FIRST_STEP:])})


def counter_of(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def report(communicator: Any, found: dict[str, float]) -> None:
    if communicator.rank == 0:
        print(json.dumps(found), flush=True)
    communicator.barrier()


WORKERS: dict[str, Callable[..., None]] = {"reduce": reduce, "train": train}


if __name__ == "__main__":
    main()
