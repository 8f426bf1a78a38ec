"""Several hosts on one machine: network namespaces, each with an address, a loopback and a cable of
its own into one bridge. They share the disk, as the nodes of a cluster do."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest


def can_make_networks() -> bool:
    """Root with the capability, and iproute2."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    made = subprocess.run(["ip", "netns", "add", "stapo_probe"], capture_output=True)
    subprocess.run(["ip", "netns", "del", "stapo_probe"], capture_output=True)
    return made.returncode == 0


needs_networks = pytest.mark.skipif(
    not can_make_networks(), reason="makes network namespaces, which takes root and iproute2"
)


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str

    @property
    def option(self) -> str:
        """What `stapo launch --host` is given."""
        return f"{self.address}=ip netns exec {self.name}"

    def plug(self, is_in: bool) -> None:
        """Connect it, or cut it off: nothing reaches it then, and nothing of it reaches others."""
        _ip(f"link set {_name_cable(self.name)} {'up' if is_in else 'down'}")


@contextmanager
def connected_hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts that reach one another, and this process them; where `needs_networks` is met."""
    number = os.getpid() % 10_000
    bridge, subnet = f"stapo{number}", f"10.{200 + number % 50}.{number % 250}"
    with ExitStack() as stack:

        def make(command: str, undo: str) -> None:
            _ip(command)
            stack.callback(_ip, undo)

        make(f"link add {bridge} type bridge", f"link del {bridge}")
        _ip(f"addr add {subnet}.254/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        hosts = []
        for i in range(num_hosts):
            host = Host(f"{bridge}h{i}", f"{subnet}.{i + 1}")
            hosts.append(host)
            make(f"netns add {host.name}", f"netns del {host.name}")
            cable = _name_cable(host.name)
            # A namespace may outlive its name for a while, and would keep its cable.
            make(
                f"link add {cable} type veth peer name eth0 netns {host.name}", f"link del {cable}"
            )
            _ip(f"link set {cable} master {bridge} up")
            for command in (
                f"addr add {host.address}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
                f"route add default via {subnet}.254",
            ):
                _ip(f"-n {host.name} {command}")
        yield hosts


def _name_cable(host: str) -> str:
    return f"v{host}"


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
