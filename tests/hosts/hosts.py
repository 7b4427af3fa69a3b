"""Several hosts on one machine: a network namespace each, joined by a bridge in one more, with limited links.

tc limits rate and delay where the kernel can delay (sch_netem). Where not, delay_switch.cc takes the bridge's place.
Nothing of the machine's own network is touched, and everything is gone with the namespaces. Needs root and iproute2.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile

# mpirun starts its daemons by this instead of ssh: host 10.77.0.3 is the namespace of that number, with its own name.
AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
exec ip netns exec {prefix}${{host##*.}} unshare -u bash -c 'hostname "$0"; eval "$@"' host${{host##*.}} "$@"
"""


def command(*words, check=True):
    return subprocess.run(list(map(str, words)), check=check, capture_output=True, text=True, timeout=60)


# A name with two addresses. What is sent to the first is lost; host 4 prefers it, as it is nearer to its own.
TWO_ADDRESSES, NOBODY = "meet.annulus", "10.77.0.6"
NAMES = f"127.0.0.1 localhost\n{NOBODY} {TWO_ADDRESSES}\n10.77.0.1 {TWO_ADDRESSES}\n"


class Refused(Exception):
    """Why this machine cannot play several hosts."""


class Hosts:
    def __init__(self, count, gbit=1, delay_us=100, delay_switch=None):
        self.count, self.gbit, self.delay_us, self.delay_switch = count, gbit, delay_us, delay_switch
        self.prefix = f"annulus{os.getpid()}h"
        self.switch = f"annulus{os.getpid()}s"
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="annulus-hosts"))
        self.process = None  # delay_switch
        self.limit = ""

    def __enter__(self):
        try:
            self.make()
        except (Refused, OSError, subprocess.SubprocessError) as error:
            self.__exit__()
            reason = getattr(error, "stderr", "") or str(error)
            raise Refused(reason.strip()) from error
        return self

    def __exit__(self, *_):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        for name in [*self.names(), self.switch]:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                command("ip", "netns", "del", name, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def names(self):
        return [f"{self.prefix}{i}" for i in range(1, self.count + 1)]

    def make(self):
        for tool in "ip", "tc", "unshare":
            if shutil.which(tool) is None:
                raise Refused(f"no {tool} here (iproute2, util-linux)")
        if os.geteuid() != 0:
            raise Refused("only root may create network namespaces")
        command("ip", "netns", "add", self.switch)
        for name in self.names():
            command("ip", "netns", "add", name)
        can_delay = self.has_netem()
        if can_delay or not self.delay_switch or not os.path.exists("/dev/net/tun"):
            self.join_by_bridge(can_delay)
        else:
            self.join_by_delay_switch()
        for i, host in enumerate(self.names(), 1):
            command("ip", "-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            for link in "lo", "eth0":
                command("ip", "-n", host, "link", "set", link, "up")
            command("ip", "-n", host, "neigh", "add", NOBODY, "lladdr", "02:00:00:00:01:00", "dev", "eth0")
        agent = self.folder / "agent"
        agent.write_text(AGENT.format(prefix=self.prefix))
        agent.chmod(0o755)
        (self.folder / "names").write_text(NAMES)
        (self.folder / "hosts").write_text("".join(f"10.77.0.{i + 1} slots=64\n" for i in range(self.count)))

    def has_netem(self):
        qdisc = ["tc", "-n", self.switch, "qdisc"]
        possible = command(*qdisc, "add", "dev", "lo", "root", "netem", "delay", "1us", check=False).returncode == 0
        if possible:
            command(*qdisc, "del", "dev", "lo", "root")
        return possible

    def join_by_bridge(self, can_delay):
        command("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        command("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for i, host in enumerate(self.names(), 1):
            port = ["link", "add", f"port{i}", "netns", self.switch, "type", "veth"]
            command("ip", *port, "peer", "name", "eth0", "netns", host)
            command("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge0", "up")
            link, rate = ["tc", "-n", host, "qdisc", "add", "dev", "eth0", "root"], f"{self.gbit}gbit"
            if can_delay:
                command(*link, "netem", "rate", rate, "delay", f"{self.delay_us}us", "limit", "10000")
            else:
                command(*link, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        self.limit = f"{self.gbit} Gbit/s, " + (f"{self.delay_us} us one way" if can_delay else "no added delay")

    def join_by_delay_switch(self):
        ports = f"an{os.getpid() % 100000}p"
        self.process = subprocess.Popen(
            [self.delay_switch, ports, str(self.count), str(self.gbit), str(self.delay_us)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self.process.stdout.readline().strip() != "ready":
            raise Refused(self.process.communicate()[1])
        for i, host in enumerate(self.names(), 1):
            command("ip", "link", "set", f"{ports}{i}", "netns", host)
            command("ip", "-n", host, "link", "set", f"{ports}{i}", "name", "eth0")
            command("ip", "-n", host, "link", "set", "eth0", "address", f"02:00:00:00:00:{i:02x}", "mtu", "9000")
        self.limit = f"{self.gbit} Gbit/s, {self.delay_us} us one way (by delay_switch)"

    def mpirun(self, mpiexec, *words):
        """The command line that starts the words from host 1, one rank a host in turn."""
        return self.on(
            1, mpiexec, "--allow-run-as-root", "--hostfile", str(self.folder / "hosts"), "--map-by", "node",
            "--bind-to", "none", "--mca", "plm_rsh_agent", str(self.folder / "agent"), "--mca", "plm_rsh_no_tree_spawn", "1",
            "--mca", "oob_tcp_if_include", "10.77.0.0/24", "--mca", "btl_tcp_if_include", "10.77.0.0/24",
            "--mca", "pml", "ob1", "--mca", "btl", "tcp,self",
            "--mca", "oob_tcp_keepalive_time", "3", "--mca", "oob_tcp_keepalive_intvl", "1",
            "--mca", "oob_tcp_keepalive_probes", "3", *words,
        )  # fmt: skip

    def on(self, host, *words):
        """The command line that starts the words on one host."""
        names = f"mount --bind {self.folder}/names /etc/hosts"  # ip netns exec has mounts of its own
        rename = ["unshare", "-u", "bash", "-c", f'hostname host{host}; {names}; exec "$@"', "bash"]
        return ["ip", "netns", "exec", f"{self.prefix}{host}", *rename, *map(str, words)]

    def cut(self, host):
        command("ip", "-n", f"{self.prefix}{host}", "link", "set", "eth0", "down")
