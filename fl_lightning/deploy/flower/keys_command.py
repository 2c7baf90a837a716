"""``fl-lightning deploy keys`` writes certificates and keys of a server and its sites."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from fl_lightning.errors import UserError, cannot_write
from fl_lightning.lab.cli.arguments import ArgumentParser

DESCRIPTION = """Write certificates and keys for a server and its sites: TLS, a key per site, and a
proxy's configuration that lets only the sites' calls through. The folder's README.md has the
commands in order. The keys are for trying and for small studies."""

_DAYS = 365
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PORTS = range(1, 65536)


def main(argv: Sequence[str]) -> int:
    """Write the folder that ``argv`` asks for.

    Raises:
        UserError: an argument is not accepted, the folder exists, or cryptography is missing.
    """
    parser = ArgumentParser("deploy keys", DESCRIPTION)
    parser.add_argument("--sites", type=int, required=True, metavar="N", help="how many sites")
    parser.add_argument(
        "--address", required=True, help="the server's IP address or name, as the sites reach it"
    )
    parser.add_argument(
        "--port", type=int, default=8443, help="the port that the sites reach (default: 8443)"
    )
    parser.add_argument(
        "--link-port",
        type=int,
        default=8000,
        help="the link's port, which only the server's own machine reaches (default: 8000)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("keys"), help="a new folder (default: keys)"
    )
    given = parser.parse_args(list(argv))
    address = _checked(given)
    try:
        _write(given, address)
    except OSError as error:
        raise cannot_write(given.out, error) from None
    print(f"→ {given.out}: {given.out / 'README.md'} has the commands in order")
    return 0


def _checked(given: Namespace) -> str:
    """Return the server's address.

    Raises:
        UserError: an argument is not accepted.
    """
    if not 1 <= given.sites <= 1000:
        raise UserError(f"deploy keys --sites {given.sites}: give a number from 1 to 1000.")
    for name, port in (("--port", given.port), ("--link-port", given.link_port)):
        if port not in _PORTS:
            raise UserError(f"deploy keys {name} {port}: give a port from 1 to 65535.")
    if given.port == given.link_port:
        raise UserError(
            f"deploy keys --port {given.port}: --link-port is {given.link_port}, too. Give another "
            "one: sites reach the first port, and only the server's own machine the second."
        )
    address = _address(given.address)
    if os.path.lexists(given.out):
        raise UserError(
            f"deploy keys --out {given.out}: this folder exists already, and was not changed. Give "
            "another folder, because keys that are in use are never written over."
        )
    return address


def _address(text: str) -> str:
    """Return the server's address, an IP address in its usual form.

    Raises:
        UserError: it is neither an IP address nor a name.
    """
    refused = UserError(
        f"deploy keys --address {text[:100]!r}: give only the server's IP address or name, as the "
        "sites reach it, without https://, port or path: --address 10.0.0.5 or "
        "--address server.example.org."
    )
    try:
        number = ipaddress.ip_address(text)
    except ValueError:
        # A name that ends in a number is a mistyped IP address.
        is_name = re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", text) and len(text) <= 253
        if not is_name or text.rpartition(".")[2].isdigit():
            raise refused from None
        return text
    if number.is_unspecified or number.is_multicast or "%" in text:
        raise refused
    return str(number)


def _write(given: Namespace, address: str) -> None:
    try:
        from fl_lightning.deploy.flower.certificates import node_keys, server_files
    except ImportError:
        raise UserError(
            "deploy keys: the package cryptography, which makes the keys, is not installed. It "
            "comes with Flower: pip install 'fl-lightning[flower]'."
        ) from None
    server = given.out / "server"
    made = server_files(address, _DAYS)
    _put(server / "ca.pem", made.authority)
    _put(server / "server.pem", made.certificate)
    _put(server / "server.key", made.key, private=True)
    sites = [f"site-{number}" for number in range(1, given.sites + 1)]
    for site in sites:
        private, public = node_keys()
        _put(given.out / site / "ca.pem", made.authority)
        _put(given.out / site / "node-key", private, private=True)
        _put(server / f"{site}.pub", public)
    place = server.resolve()
    folder = shlex.quote(str(place))
    words = {
        "SITES": str(given.sites),
        "ADDRESS": f"[{address}]" if ":" in address else address,
        "LISTEN": f"[::]:{given.port}" if ":" in address else str(given.port),
        "PORT": str(given.port),
        "LINK": str(given.link_port),
        "SERVER": folder,
        "CERTIFICATE": json.dumps(str(place / "ca.pem"), ensure_ascii=False),
        "REGISTER": "\n".join(
            f"flwr supernode register {folder}/{site}.pub sites" for site in sites
        ),
        "UNTIL": made.until.isoformat(),
    }
    _fill("nginx.conf", server / "nginx.conf", words)
    _fill("keys.md", given.out / "README.md", words)
    for site in sites:
        _fill("keys_site.md", given.out / site / "README.md", {**words, "SITE": site})


def _fill(template: str, path: Path, words: Mapping[str, str]) -> None:
    """Write a template's text with these words in the places of their names."""
    text = (files("fl_lightning.deploy.flower") / "templates" / f"{template}.txt").read_text(
        "utf-8"
    )
    _put(path, re.sub("@([A-Z]+)@", lambda match: words[match[1]], text).encode("utf-8"))


def _put(path: Path, content: bytes, private: bool = False) -> None:
    """Write a new file; if it is private, only its owner may read it, from the beginning."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if private else 0o644
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    print(f"  {path}")
