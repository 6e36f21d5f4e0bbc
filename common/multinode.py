"""The program behind ddp_multinode.sh: its options, SLURM, the machines that meet. Standard library only."""

import argparse
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import machines
from common.machines import MeetingError

HERE = Path(__file__).resolve().parent.parent
SCRIPT = HERE / "ddp_multinode.sh"


def options(arguments):
    """The options, and in `command` the script with its arguments. Raises `MeetingError` for what is wrong."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog=SCRIPT.name, add_help=False, allow_abbrev=False)
    parser.error = fail
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--simulate", "--master-port"):
        parser.add_argument(name, type=int)
    parser.add_argument("--master-addr")
    parser.add_argument("--timeout", type=int, default=600)
    parser.add_argument("--elastic", type=elastic)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--simulated", action="store_true")  # one of the machines of --simulate
    args = parser.parse_args(arguments[:end])
    for name, value in vars(args).items():
        if type(value) is int and not (name != "node_rank") <= value < 2**16:
            fail(f"--{name.replace('_', '-')} {value} must be from {int(name != 'node_rank')} to 65535")
    args.command = arguments[end + 1 :]
    if not args.command or args.command[0].startswith("-"):
        args.command.insert(0, "ddp_torchrun.py")
    if not Path(args.command[0]).is_file():
        args.command[0] = str(HERE / args.command[0])
    if not Path(args.command[0]).is_file():
        fail(f"there is no script {Path(args.command[0]).name} here")
    if not importlib.util.find_spec("torch"):
        fail(f"{sys.executable} has no torch: activate the environment in which it is installed")
    return args


def fail(line):
    hint = "; what belongs to the script comes after --, see --help" if line.startswith("unrecognized") else ""
    raise MeetingError(f"{line}{hint}")


def elastic(text):
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"{text} is not MIN:MAX, such as 1:2, with MIN from 1 to MAX")
    return text


# --------------------------------------------------------------------------------------------------- processes


def wait_for(children, stop, until_all):
    """Wait for processes; returns the exit status of the first that failed, or that of a signal received.

    stop: called once, when a signal comes; unless `until_all` also when the first one fails.
    """
    status, signals, running = 0, [], True

    def receive(number, frame):
        signals.append(number)
        if len(signals) == 1:
            stop()

    # Set for SIGINT as well: a shell that starts a script in the background lets it ignore SIGINT.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)
    while running:
        time.sleep(0.05)
        running = any(child.poll() is None for child in children)
        failed = [child.returncode for child in children if child.returncode]
        if failed and not status:
            status = failed[0] if failed[0] > 0 else 128 - failed[0]  # as shells have it
            if not until_all and not signals:
                stop()
    return 128 + signals[0] if signals and status else status


def simulate(args):
    """Run this program once for each of several machines, all on this one; returns the exit status."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = args.master_port or probe.getsockname()[1]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # they would all take the same devices
    same = ["--simulated", f"--nnodes={args.simulate}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    same += [f"--nproc-per-node={args.nproc_per_node or 1}", f"--timeout={args.timeout}"]
    same += [f"--elastic={args.elastic}"] * bool(args.elastic) + ["--check"] * args.check
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    running, threads = [], []
    for rank in range(args.simulate):
        if cores:  # a share of them for each, which its processes inherit
            os.sched_setaffinity(0, cores[rank :: args.simulate] or cores)
        command = [sys.executable, "-m", "common.multinode", *same, f"--node-rank={rank}", "--", *args.command]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        running.append(subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **pipes))
        for source, target in [(running[-1].stdout, sys.stdout), (running[-1].stderr, sys.stderr)]:
            threads.append(threading.Thread(target=copy_lines, args=(f"[node {rank}] ", source, target)))
            threads[-1].start()
    status = wait_for(running, lambda: [machine.terminate() for machine in running], until_all=bool(args.elastic))
    for thread in threads:
        thread.join()
    return status


def copy_lines(prefix, source, target):
    for line in source:
        target.write(prefix + line)
        target.flush()


# ------------------------------------------------------------------------------------------------------- SLURM


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
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--snapshot", type=Path)
    snapshot = parser.parse_known_args(args.command)[0].snapshot
    if status == 143 and snapshot:
        state = ["squeue", "-h", "-j", job, "-o", "%T"]
        if subprocess.run(state, capture_output=True, text=True).stdout.strip() == "RUNNING":  # it is not cancelled
            how = "goes on from the snapshot" if snapshot.exists() else f"starts anew, there is no {snapshot} yet"
            print(f"requeued: {how}", flush=True)
            subprocess.run(["scontrol", "requeue", job])
    sys.exit(status)


# ----------------------------------------------------------------------------------------------------- torchrun


def torchrun(args):
    """Meet the other machines; returns torchrun's command, and connections to the others."""
    for name in ["master_addr"] if args.elastic else ["nnodes", "node_rank", "master_addr"]:
        if getattr(args, name) is None:
            fail(f"--{name.replace('_', '-')} is missing, see --help")
    if not args.elastic and args.node_rank >= args.nnodes:
        fail(f"--node-rank {args.node_rank} must be below --nnodes {args.nnodes}: machines are counted from 0")
    args.master_port = args.master_port or 29500
    if not args.nproc_per_node:
        import torch

        args.nproc_per_node = torch.accelerator.device_count() or 1
    if args.elastic:
        machines.check_batch_size(args)
    is_master = machines.is_master_here(args)
    master, own, others = machines.meet(args, is_master)
    if args.elastic:
        # After a restart the processes meet at a new port: in torchrun's own store they would find the attempt before.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = ["torchrun", f"--nnodes={args.elastic}", "--max-restarts=10", "--rdzv-backend=c10d", "--rdzv-id=ddp"]
        conf = f"is_host={int(is_master)},join_timeout={args.timeout},last_call_timeout=15"
        command += [f"--rdzv-endpoint={master}:{args.master_port}", f"--rdzv-conf={conf}"]
    else:
        command = ["torchrun", f"--nnodes={args.nnodes}", f"--node-rank={args.node_rank}", f"--master-addr={master}"]
        command += [f"--master-port={args.master_port}", f"--rdzv-conf=timeout={args.timeout}"]
    command += [f"--nproc-per-node={args.nproc_per_node}", f"--local-addr={own}"]
    if args.check:
        return [*command, "-m", "common.check", f"--timeout={args.timeout}", *args.command[1:]], others
    return command + args.command, others


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stacks of torch's above the one line of a lost rank
    arguments = sys.argv[1:]
    try:
        args = options(arguments)
        if args.simulate:
            sys.exit(simulate(args))
        if os.environ.get("SLURM_JOB_ID") and args.elastic and not args.master_addr:
            fail(
                "--elastic is not for SLURM, whose jobs keep their machines: leave it out; a lost node needs a new job"
            )
        placed = args.nnodes or args.node_rank is not None or args.master_addr or args.elastic
        scheduled = bool(os.environ.get("SLURM_JOB_ID") and not placed)
        if scheduled:
            slurm(args, arguments)
        command, others = torchrun(args)
    except MeetingError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    shown = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"] * bool(args.elastic) + command
    print("+", shlex.join(shown), flush=True)
    from common import agent, errors  # which import torch

    errors.leave(agent.start(command, others, scheduled))


if __name__ == "__main__":
    main()
