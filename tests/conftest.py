import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import Kit, free_port

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests of single functions import `common`

# A shell without job control lets what it starts in the background ignore SIGINT, and so would all that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def kit(tmp_path):
    kit = Kit(tmp_path)
    yield kit
    kit.kill_all()
    kit.directory.cleanup()


@pytest.fixture
def slurm(tmp_path, kit):
    """A real SLURM of two nodes on this machine, with keys, ports and directories of its own; its environment."""
    for program in ("munged", "slurmctld", "slurmd", "srun"):
        if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"):
            pytest.skip(f"{program} is not installed")
    if os.geteuid() != 0:
        pytest.skip("starting a SLURM needs root")
    try:
        socket.getaddrinfo("n1", None), socket.getaddrinfo("n2", None)
    except OSError:
        pytest.skip("the nodes' names n1 and n2 have no line in /etc/hosts: 127.0.0.1 n1 n2")
    # The paths of munge's socket and of its parents must be closed to others, and short enough for a socket.
    home = Path(subprocess.check_output(["mktemp", "-d", "/run/kit-slurm-XXXXXX"], text=True).strip())
    home.chmod(0o755)
    key = home / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN"
        for name in ("n1", "n2")
    )
    (home / "slurm.conf").write_text(
        f"""ClusterName=kit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket,cred_expire=5
StateSaveLocation={home}
SlurmdSpoolDir={home}/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
{nodes}
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""
    )
    files = [f"--{name}-file={home}/munge.{name}" for name in ("pid", "log", "seed")]
    munged = ["munged", "--force", "--foreground", f"--socket={home}/munge.socket", f"--key-file={key}", *files]
    env = {"SLURM_CONF": str(home / "slurm.conf"), "PATH": f"{kit.env['PATH']}:/usr/sbin"}
    daemons = []
    try:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            log = (home / f"{command[0]}.out").open("a")
            daemons.append(subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log))
            log.close()
            while command is munged and not (home / "munge.socket").exists():
                assert daemons[0].poll() is None, (home / "munged.out").read_text()
                time.sleep(0.05)
        end = time.monotonic() + 30
        while (idle := kit.start("sinfo", "-h", "-t", "idle", "-o", "%D", env=env).result()).out.strip() != "2":
            assert time.monotonic() < end, idle
            time.sleep(0.3)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)
        shutil.rmtree(home)


def pytest_xdist_auto_num_workers(config):
    """For `-n auto`: more workers than cores, since many tests wait for a while."""
    return os.cpu_count() + max(1, os.cpu_count() // 2)


def pytest_collection_modifyitems(items):
    import torch  # not above: what hands the tests to the workers does not need it

    if not torch.accelerator.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU here"))
