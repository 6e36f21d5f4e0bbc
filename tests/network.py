"""Several machines: network namespaces with their own names and /etc/hosts, joined to a switch by veth pairs."""

import os
import shutil
import subprocess
import uuid

ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def missing():
    """Why there can be no network here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [program for program in ("ip", "unshare", "mount") if not shutil.which(program)]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Network:
    """`count` machines: number n has the name hn and, on interface en, the address 10.0.0.(n + 1).

    As Debian writes it, a machine's own name leads to 127.0.1.1 in its /etc/hosts.
    """

    def __init__(self, count, directory):
        mark = uuid.uuid4().hex[:6]
        self.switch, self.names = f"kit-{mark}", [f"kit-{mark}-{number}" for number in range(count)]
        self.hosts = [directory / f"hosts.{number}" for number in range(count)]
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for number, name in enumerate(self.names):
            others = [f"10.0.0.{other + 1} h{other}\n" for other in range(count) if other != number]
            self.hosts[number].write_text(f"127.0.0.1 localhost\n127.0.1.1 h{number}\n{''.join(others)}")
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", f"e{number}", "type", "veth", "peer", f"p{number}", "netns", self.switch)
            ip("-n", name, "address", "add", f"10.0.0.{number + 1}/24", "dev", f"e{number}")
            ip("-n", name, "link", "set", f"e{number}", "up")
            ip("-n", self.switch, "link", "set", f"p{number}", "master", "switch", "up")

    def on(self, number, *command):
        """The command that runs another one on a machine."""
        enter = ["unshare", "--uts", "--mount", "sh", "-euc", ENTER, "sh", f"h{number}", self.hosts[number]]
        return ["ip", "netns", "exec", self.names[number], *enter, *command]

    def cable(self, number, state):
        """Pull a machine's cable ("down"), or plug it in ("up")."""
        ip("-n", self.switch, "link", "set", f"p{number}", state)

    def jumbo_frames(self):
        """Let the machines send frames of 9,000 bytes, which the switch takes from h0 alone."""
        ip("-n", self.switch, "link", "set", "p0", "mtu", 9000)
        for number, name in enumerate(self.names):
            # As a real interface does it: packets are cut before the cable, not handed over in one.
            ip("-n", name, "link", "set", f"e{number}", "mtu", 9000, "gso_max_segs", 1)

    def remove(self):
        for name in (*self.names, self.switch):
            ip("netns", "delete", name)
