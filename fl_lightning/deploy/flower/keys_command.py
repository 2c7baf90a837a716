"""``fl-lightning deploy keys`` writes certificates and keys of a server and its sites."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from fl_lightning.errors import UserError, cannot_write
from fl_lightning.introspection.accepted import AtLeast, AtMost, check
from fl_lightning.lab.cli.arguments import ArgumentParser

DESCRIPTION = """Write certificates and keys for a server and its sites: TLS, a key per site, and a
proxy's configuration that lets only the sites' calls through. The folder's README.md has the
commands in order. The keys are for trying and for small studies. openssl and ssh-keygen make them.
"""

_DAYS = 365
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"


def main(argv: Sequence[str]) -> int:
    """Write the folder that ``argv`` asks for."""
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
    check("deploy keys --sites", given.sites, Annotated[int, AtLeast(1), AtMost(1000)])
    address = _address(given.address)
    for program in ("openssl", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UserError(f"deploy keys: the program {program} is not installed, or not in PATH.")
    try:
        given.out.mkdir(parents=True)  # keys that are in use are never written over
        _write(given, address)
    except OSError as error:
        raise cannot_write(given.out, error) from None
    print(f"→ {given.out}: {given.out / 'README.md'} has the commands in order")
    return 0


def _address(text: str) -> str:
    """Return the server's address, an IP address in its usual form."""
    try:
        number = ipaddress.ip_address(text)
    except ValueError:
        # A name that ends in a number is a mistyped IP address.
        if re.fullmatch(rf"({_LABEL}\.)*{_LABEL}", text) and not text.rpartition(".")[2].isdigit():
            return text
    else:
        if not number.is_unspecified:
            return str(number)
    raise UserError(
        f"deploy keys --address {text[:100]!r}: give only the server's IP address or name, as the "
        "sites reach it, without https://, port or path: --address 10.0.0.5 or "
        "--address server.example.org."
    )


def _write(given: Namespace, address: str) -> None:
    place = (given.out / "server").resolve()
    place.mkdir()
    sites = [f"site-{number}" for number in range(1, given.sites + 1)]
    _certificates(place, address)
    for site in sites:
        folder = given.out / site
        folder.mkdir()
        shutil.copy(place / "ca.pem", folder)
        kind = ["-t", "ecdsa", "-b", "384", "-N", "", "-C", ""]
        _run("ssh-keygen", "-q", *kind, "-f", str(folder / "node-key"))
        shutil.move(folder / "node-key.pub", place / f"{site}.pub")
    server = shlex.quote(str(place))
    words = {
        "SITES": str(given.sites),
        "ADDRESS": f"[{address}]" if ":" in address else address,
        "LISTEN": f"[::]:{given.port}" if ":" in address else str(given.port),
        "PORT": str(given.port),
        "LINK": str(given.link_port),
        "SERVER": server,
        "CERTIFICATE": json.dumps(str(place / "ca.pem"), ensure_ascii=False),
        "REGISTER": "\n".join(
            f"flwr supernode register {server}/{site}.pub sites" for site in sites
        ),
        "UNTIL": (date.today() + timedelta(days=_DAYS)).isoformat(),
    }
    _fill("nginx.conf", place / "nginx.conf", words)
    _fill("keys.md", given.out / "README.md", words)
    for site in sites:
        _fill("keys_site.md", given.out / site / "README.md", {**words, "SITE": site})


def _certificates(server: Path, address: str) -> None:
    """Make the server's certificate, which also names its own machine, and that of its authority.

    The authority's private key is thrown away, so it signs no further certificate.
    """
    # The last label of a host's name is no number.
    is_number = ":" in address or address.rpartition(".")[2].isdigit()
    names = [f"{'IP' if is_number else 'DNS'}:{address}"]
    names += ["DNS:localhost", "IP:127.0.0.1", "IP:::1"]
    with TemporaryDirectory() as folder:
        config, key = f"{folder}/openssl.cnf", f"{folder}/ca.key"
        _fill("openssl.cnf", Path(config), {"NAMES": ",".join(dict.fromkeys(names))})
        make = ["req", "-x509", "-config", config, "-sha384", "-days", str(_DAYS), "-nodes"]
        make += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:secp384r1"]
        ca, signed = str(server / "ca.pem"), str(server / "server.pem")
        of_authority = ["-extensions", "authority", "-subj", "/CN=fl-lightning authority"]
        _run("openssl", *make, *of_authority, "-keyout", key, "-out", ca)
        of_server = ["-extensions", "server", "-subj", "/CN=fl-lightning server"]
        own_key = str(server / "server.key")
        signer = ["-CA", ca, "-CAkey", key]
        _run("openssl", *make, *of_server, *signer, "-keyout", own_key, "-out", signed)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"deploy keys: {command[0]} failed: {' '.join(done.stderr.split())[-300:]}")


def _fill(template: str, path: Path, words: Mapping[str, str]) -> None:
    """Write a template's text with these words in the places of their names."""
    text = files("fl_lightning.deploy.flower") / "templates" / f"{template}.txt"
    filled = re.sub("@([A-Z]+)@", lambda match: words[match[1]], text.read_text("utf-8"))
    path.write_text(filled, "utf-8")
