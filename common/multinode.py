"""The program behind ddp_multinode.sh: its options, SLURM, machines that meet, torchrun. Imports torch when it must."""

import argparse
import functools
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SCRIPT = HERE / "ddp_multinode.sh"


def fail(line, status=2):
    if line.startswith("unrecognized"):
        line += "; what belongs to the script comes after --, see --help"
    sys.stderr.write(f"error: {line}\n")
    sys.exit(status)


def options(arguments):
    """The options, and in `command` the script with its arguments."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog=SCRIPT.name, add_help=False, allow_abbrev=False)
    parser.error = fail
    for name in ("--nnodes", "--nproc-per-node", "--simulate", "--master-port"):
        parser.add_argument(name, type=number)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--master-addr")
    parser.add_argument("--timeout", type=number, default=600)
    parser.add_argument("--elastic", type=elastic)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--simulated", action="store_true")  # one of the machines of --simulate
    args = parser.parse_args(arguments[:end])
    args.command = arguments[end + 1 :]
    if not args.command or args.command[0].startswith("-"):
        args.command.insert(0, "ddp_torchrun.py")
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--snapshot", nargs="?")
    known.add_argument("--batch-size", nargs="?")
    known.parse_known_args(args.command[1:], args)
    script = args.command[0]
    if not Path(script).is_file() and not Path(HERE, script).is_file():
        fail(f"there is no script {Path(script).name} here")
    args.command[0] = script if Path(script).is_file() else str(HERE / script)
    if not importlib.util.find_spec("torch"):
        fail(f"{sys.executable} has no torch: activate the environment in which it is installed")
    return args


def number(text):
    if not 1 <= int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to 65535")
    return int(text)


def elastic(text):
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text} is not MIN:MAX, such as 1:2, with MIN from 1 to MAX")
    return text


def wait_for(children, stop, until_all):
    """Wait for processes; returns the exit status of the first that failed, or that of a signal received.

    stop: called once, when a signal comes; unless `until_all` also when the first one fails.
    """
    stop, signals, status, running = functools.cache(stop), [], 0, True
    # Set for SIGINT as well: a shell that starts a script in the background lets it ignore SIGINT.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: (signals.append(number), stop()))
    while running:
        time.sleep(0.05)
        codes = [child.poll() for child in children]
        status, running = status or next(filter(None, codes), 0), None in codes
        if status and not until_all:
            stop()
    if signals and status:
        return 128 + signals[0]
    return status if status >= 0 else 128 - status  # as shells have it


def simulate(args):
    """Run this program once for each of several machines, all on this one; returns the exit status."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = args.master_port or probe.getsockname()[1]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # they would all take the same devices
    same = ["--simulated", f"--nnodes={args.simulate}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    same += [f"--nproc-per-node={args.nproc_per_node or 1}", f"--timeout={args.timeout}"]
    same += [f"--elastic={args.elastic}"] * bool(args.elastic) + ["--check"] * args.check
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mark = 'exec "$@" > >(exec sed -u "s/^/[$0] /") 2> >(exec sed -u "s/^/[$0] /" >&2)'
    running = []
    for rank in range(args.simulate):
        if cores:  # a share of them for each, which its processes inherit
            os.sched_setaffinity(0, cores[rank :: args.simulate] or cores)
        command = [sys.executable, "-m", "common.multinode", *same, f"--node-rank={rank}", "--", *args.command]
        marked = ["bash", "-c", mark, f"node {rank}", *command]
        running.append(subprocess.Popen(marked, stdin=subprocess.DEVNULL, start_new_session=True))
    return wait_for(running, lambda: [machine.terminate() for machine in running], until_all=bool(args.elastic))


def slurm(args, arguments):
    """Take the place from SLURM's step; in a batch script start the step, this program on each node, and exit."""
    env = os.environ
    nodes = int(env.get("SLURM_STEP_NUM_NODES") or env["SLURM_JOB_NUM_NODES"])
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1"))
    if tasks > nodes or env.get("SLURM_NTASKS_PER_NODE", "1") != "1":
        fail(f"SLURM has {tasks} tasks for {nodes} nodes, and torchrun starts all processes: take --ntasks-per-node=1")
    if "SLURM_STEP_NUM_TASKS" in env:
        hosts = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        args.master_addr = subprocess.run(hosts, capture_output=True, text=True, check=True).stdout.split()[0]
        args.nnodes, args.node_rank = nodes, int(env["SLURM_NODEID"])
        gpus = env.get("SLURM_GPUS_ON_NODE", "")
        args.nproc_per_node = args.nproc_per_node or (int(gpus) if gpus.isdecimal() else None)
        args.master_port = args.master_port or 20000 + int(env["SLURM_JOB_ID"]) % 10000  # two jobs may share a node
        return
    array = "SLURM_ARRAY_JOB_ID" in env  # whose last task has the array's own id, which stands for all tasks
    job = f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}" if array else env["SLURM_JOB_ID"]
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    srun = subprocess.Popen([*srun, "--kill-on-bad-exit=0", "bash", str(SCRIPT), *arguments], start_new_session=True)
    # At SIGTERM srun would kill the tasks before they have saved.
    status = wait_for([srun], lambda: subprocess.run(["scancel", "--signal=TERM", job]), until_all=True)
    if status == 143 and args.snapshot:
        state = ["squeue", "-h", "-j", job, "-o", "%T"]
        if subprocess.run(state, capture_output=True, text=True).stdout.strip() == "RUNNING":  # it is not cancelled
            there = Path(args.snapshot).exists()
            print("requeued:", "goes on from the snapshot" if there else "starts anew, there is none yet", flush=True)
            subprocess.run(["scontrol", "requeue", job])
    sys.exit(status)


def torchrun(args):
    """Meet the other machines; returns torchrun's command, and the store of the machines."""
    for name in ["master_addr"] if args.elastic else ["nnodes", "node_rank", "master_addr"]:
        if getattr(args, name) is None:
            fail(f"--{name.replace('_', '-')} is missing, see --help")
    if not args.elastic and not 0 <= args.node_rank < args.nnodes:
        fail(f"--node-rank {args.node_rank} must be from 0 to {args.nnodes - 1}: machines are counted from 0")
    from common import meeting, network, place, start, store
    from common.errors import RunError

    import torch

    if args.simulated:
        start.die_with_parent()
    args.master_port = args.master_port or 29500
    args.nproc_per_node = args.nproc_per_node or torch.accelerator.device_count() or 1
    if args.elastic and args.batch_size and args.batch_size.isdecimal():
        low, high = map(int, args.elastic.split(":"))
        for count in range(low * args.nproc_per_node, high * args.nproc_per_node + 1, args.nproc_per_node):
            if int(args.batch_size) % count:  # the run would end once a machine has come or gone
                fail(f"--batch-size {args.batch_size} does not divide into {count} processes: --elastic allows these")
    try:
        is_master = network.is_master_here(args)
        rank = int(not is_master) if args.elastic else args.node_rank
        here = place.Ranks(rank, args.nnodes or 2, node=rank, launcher=meeting.MACHINES)
        machines = store.connect(args.master_addr, args.master_port, here, args.timeout, is_master)
        if not args.elastic:
            meeting.exchange(machines, "machines", here, {}, args.timeout)
    except RunError as error:
        fail(str(error), error.exit_status)
    command = ["torchrun", f"--nproc-per-node={args.nproc_per_node}"]
    if args.elastic:
        # After a restart the processes meet at a new port: in torchrun's own store they would find the attempt before.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command += [f"--nnodes={args.elastic}", "--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-id=ddp"]
        conf = f"is_host={int(is_master)},join_timeout={args.timeout},last_call_timeout=15"
        endpoint, local = f"{args.master_addr}:{args.master_port}", network.address_towards(args.master_addr)
        command += [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}", f"--local-addr={local}"]
    else:
        command += [f"--nnodes={args.nnodes}", f"--node-rank={rank}", f"--master-addr={args.master_addr}"]
        command += [f"--master-port={args.master_port}", f"--rdzv-conf=timeout={args.timeout}"]
    if args.check:
        command += ["-m", "common.check", f"--timeout={args.timeout}", *args.command[1:]]
    else:
        command += args.command
    return command, machines


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stacks of torch's above the one line of a lost rank
    arguments = sys.argv[1:]
    args = options(arguments)
    if args.simulate:
        sys.exit(simulate(args))
    placed = args.nnodes or args.node_rank is not None or args.master_addr
    scheduled = bool(os.environ.get("SLURM_JOB_ID") and not placed)
    if scheduled and args.elastic:
        fail("--elastic is not for SLURM, whose jobs keep their machines: leave it out; a lost node needs a new job")
    if scheduled:
        slurm(args, arguments)
    command, machines = torchrun(args)
    print("+", shlex.join(["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"] * bool(args.elastic) + command), flush=True)
    from common import agent, errors

    errors.leave(agent.start(command, None if args.elastic else machines, scheduled))


if __name__ == "__main__":
    main()
