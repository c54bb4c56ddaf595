#!/usr/bin/env python3
"""Measures mha beside ONNX Runtime, OpenVINO, JAX and Python's torch, and prints one table.

    python3 apps/bench/peers.py [--threads 1] [--case 'module_forward 1x2048'] [--mha PATH]

Each case runs in turn on ours and on every peer, several rounds, on the same number of threads,
and each peer in the fastest form that gives the answer. A peer's packages are installed from PyPI
into build/peers-venv or the environment in --venv, if they are missing there; torch with the
arguments in MHA_TORCH_PIP_ARGS (a CPU-only index, say).
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What a peer needs besides onnx, in which the graphs are written.
PACKAGES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "jax": "jax",
            "torch": "torch==2.13.0"}

NOT_HERE = "not here"  # as peer_worker.py says it
PEERS = {"onnxruntime": "ORT", "openvino": "OpenVINO", "jax": "JAX", "torch": "torch"}
# Not 1x8192: peers that form its maps take minutes a turn.
SHAPES = [(4, 20, 512, 8), (8, 128, 768, 12), (1, 512, 768, 12), (1, 2048, 1024, 16)]
MODULE = ["module_forward", "module_forward_causal", "module_train"]
# Kind, shape, key/value heads and dtype.
CASES = [
    (kind, shape, shape[-1], dtype)
    for kinds, dtype in [(["core_forward", "core_forward_causal", *MODULE], "float32"),
                         (MODULE, "bfloat16")]
    for kind in kinds
    for shape in SHAPES
]
CASES += [
    ("decode", (batch, 4096, 4096, 32), kv_heads, "float32")
    for batch, kv_heads in [(1, 32), (1, 8), (8, 8)]
]


def name_of(case):
    kind, shape, kv_heads, dtype = case
    grouped = f" {kv_heads}kv" if kv_heads != shape[-1] else ""
    half = f" {dtype}" if dtype != "float32" else ""
    return f"{kind} {'x'.join(map(str, shape))}{grouped}{half}"


NAME_WIDTH = max(len(name_of(case)) for case in CASES)


def prepared_python(folder, peers):
    """The interpreter of an environment with the packages of these peers."""
    python = folder / "bin" / "python"
    packages = ["onnx", *(PACKAGES[peer] for peer in peers)]
    names = [package.split("==")[0] for package in packages]
    check = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    if python.exists() and subprocess.run([python, "-c", check, *names]).returncode == 0:
        return python
    print(f"installing the peers in {folder}", file=sys.stderr)
    if not python.exists():
        venv.create(folder, with_pip=True)
    # torch first: arguments for it, such as an index, are not for the others.
    for package in sorted(packages, key=lambda package: not package.startswith("torch=")):
        arguments = os.environ.get("MHA_TORCH_PIP_ARGS", "") if "torch=" in package else ""
        command = [python, "-m", "pip", "install", "--quiet", *arguments.split(), package]
        subprocess.run(command, check=True)
    return python


def environment(threads):
    """As a user would have it, but for the number of threads."""
    variables = dict(os.environ)
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # they slow OpenBLAS down
        variables.pop(name, None)
    for library in ("OMP", "MKL", "OPENBLAS"):
        variables[f"{library}_NUM_THREADS"] = str(threads)
    return variables


class Peer:
    """A peer in a process that lives for all cases."""

    def __init__(self, name, python, threads):
        worker = pathlib.Path(__file__).with_name("peer_worker.py")
        self.name = name
        self.process = subprocess.Popen(
            [python, worker, name, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(threads),
        )
        self.version = self.answer()["version"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"peers.py: error: {self.name} ended; its message stands above")
        return json.loads(line)

    def measure(self, case, seconds):
        kind, shape, kv_heads, dtype = case
        request = {"case": kind, "shape": [*shape, kv_heads], "dtype": dtype, "seconds": seconds}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()


def measure_ours(program, case, threads):
    command = [program, "bench", "--json", "--threads", str(threads), "--case", name_of(case)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment(threads), check=True
    )
    report = json.loads(done.stdout)
    return report["machine"], report["results"][0]


def compare(program, case, peers, arguments):
    """Times of one case: ours from `mha bench`, then {peer: times}, and what it says of the machine."""
    ours, machines = [], []
    theirs = {peer.name: [] for peer in peers}
    forms = {}
    for _ in range(arguments.rounds):
        machine, result = measure_ours(program, case, arguments.threads)
        machines.append(machine)
        ours.append(result)
        for peer in peers:
            answer = peer.measure(case, arguments.seconds)
            theirs[peer.name] += answer["ms"]
            forms[peer.name] = answer["form"]
    return ours, theirs, forms, machines


def table_line(case, ours, theirs, forms, statistic):
    pick = {"median": statistics.median, "min": min}[statistic]
    our_ms = pick([result[f"ms_{statistic}"] for result in ours])
    # Of the FMA peak, for decode of the read bandwidth, each measured around its case.
    limit = statistics.median(r["fraction_of_peak"] * r["ms_median"] for r in ours) / our_ms
    cells = [f"{name_of(case):<{NAME_WIDTH}}{our_ms:>10.4g}{100 * limit:>6.0f}%"]
    for peer in PEERS:
        ratio = f"{pick(theirs[peer]) / our_ms:.2f}x" if theirs.get(peer) else "-"
        if forms.get(peer) == NOT_HERE:
            ratio = NOT_HERE
        cells.append(f"{ratio:>10}")
    for peer in ("builtin", "sdpa"):
        ratios = [result[f"ratio_to_{peer}"] for result in ours]
        ratio = "-" if None in ratios else f"{statistics.median(ratios):.2f}x"
        cells.append(f"{ratio:>10}")
    return "".join(cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mha", default=ROOT / "build" / "release" / "apps" / "mha",
                        help="the program; default: that of the release build")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "build" / "peers-venv",
                        help="the Python environment of the peers; made if there is none")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="turns of ours and all peers")
    parser.add_argument("--seconds", type=float, default=0.5, help="a peer's time in each round")
    parser.add_argument("--statistic", choices=("median", "min"), default="median",
                        help="min is steadier on a machine that others use too")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.case in name_of(case)]
    if not cases:
        parser.error(f"--case: expected a part of a name like {name_of(CASES[0])!r}, "
                     f"found {arguments.case!r}")
    if not pathlib.Path(arguments.mha).exists():
        parser.error(f"--mha: expected the built program, found no {arguments.mha}")

    python = prepared_python(arguments.venv, arguments.peers)
    peers = [Peer(name, python, arguments.threads) for name in arguments.peers]
    versions = ", ".join(f"{PEERS[peer.name]} {peer.version}" for peer in peers)
    lines, forms, machines = [], [], []
    for index, case in enumerate(cases):
        print(f"{index + 1}/{len(cases)} {name_of(case)}", file=sys.stderr)
        ours, theirs, used, seen = compare(arguments.mha, case, peers, arguments)
        machines += seen
        lines.append(table_line(case, ours, theirs, used, arguments.statistic))
        forms.append(f"{name_of(case)}: " + ", ".join(
            f"{PEERS[peer]} {form}" for peer, form in used.items()))

    machine = machines[0]
    peaks = [machine["fma_peak_gflops"] for machine in machines]
    plural = "" if arguments.threads == 1 else "s"
    print(f"{machine['cpu']}, {machine['isa']} kernels, {arguments.threads} thread{plural}, "
          f"FMA peak {min(peaks):.0f} to {max(peaks):.0f} GFLOP/s")
    loads = [machine["load_average"] for machine in machines]
    print(f"load average {min(loads):.1f} to {max(loads):.1f}; {versions}")
    scaling = max(machines, key=lambda machine: machine["two_thread_scaling"])
    if not scaling["two_threads_scale"]:
        print(f"two threads reach only {scaling['two_thread_scaling']:.2f} times one's peak here")
    print(f"\n{'case (BxTxDxH)':<{NAME_WIDTH}}{'ms ' + arguments.statistic:>10}{'limit':>7}"
          + "".join(f"{name:>10}" for name in [*PEERS.values(), "built-in", "SDPA"]))
    print("\n".join(lines))
    print("\nlimit: our share of the float32 FMA peak, for decode of the read bandwidth. Then a "
          "peer's time\nover ours: above 1 mha is faster; not here: it would compute in another "
          "precision on this CPU.\nbuilt-in and SDPA are LibTorch's in C++, in the process of "
          "ours. The form of each peer that was\nfastest:")
    print("\n".join(forms))


if __name__ == "__main__":
    main()
