"""``fl-lightning deploy keys`` writes what TLS and keys need, and refuses what would not work."""

from __future__ import annotations

import ipaddress
import os
import shutil
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fl_lightning.__main__ import main

pytest.importorskip("cryptography", reason="cryptography is not installed (extra flower)")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from tests.deploy.flower_keys import NGINX, commands


def write(folder: Path, *options: str) -> Path:
    given = ["--sites", "2", "--address", "10.0.0.5", *options]
    assert main(["deploy", "keys", *given, "--out", str(folder)]) == 0
    return folder


def test_only_private_keys_are_private_and_each_is_in_one_place(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        keys = write(tmp_path / "keys")
    finally:
        os.umask(mask)
    files = {str(p.relative_to(keys)): p for p in keys.rglob("*") if p.is_file()}
    private = {name for name, path in files.items() if b"PRIVATE KEY" in path.read_bytes()}
    assert private == {"server/server.key", "site-1/node-key", "site-2/node-key"}
    modes = {name: path.stat().st_mode & 0o777 for name, path in files.items()}
    assert {name for name, mode in modes.items() if mode == 0o600} == private
    assert len({files[name].read_bytes() for name in private}) == 3
    assert not [name for name, path in files.items() if b"@" in path.read_bytes()]


@pytest.mark.parametrize("address", ["10.0.0.5", "2001:db8::1", "server.example.org", "127.0.0.1"])
def test_the_certificate_names_the_address_and_the_servers_own_machine(
    address: str, tmp_path: Path
) -> None:
    server = write(tmp_path / "keys", "--address", address) / "server"
    certificate = x509.load_pem_x509_certificate((server / "server.pem").read_bytes())
    named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    texts = [str(name.value) for name in named]
    assert sorted(texts) == sorted({address, "localhost", "127.0.0.1", "::1"})
    for name in named:
        is_number = isinstance(name, x509.IPAddress)
        assert is_number == isinstance(name.value, ipaddress.IPv4Address | ipaddress.IPv6Address)


@pytest.mark.parametrize(
    ("name", "authority", "accepted"),
    [("10.0.0.5", "keys", True), ("10.0.0.6", "keys", False), ("10.0.0.5", "other", False)],
)
def test_python_accepts_the_server_by_its_authority_and_name_only(
    name: str, authority: str, accepted: bool, tmp_path: Path
) -> None:
    """Strictly, as Python from 3.13 on does by default."""
    keys = write(tmp_path / "keys")
    write(tmp_path / "other")
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(keys / "server" / "server.pem", keys / "server" / "server.key")
    trusted = ssl.create_default_context(cafile=tmp_path / authority / "site-1" / "ca.pem")
    trusted.verify_flags |= ssl.VERIFY_X509_STRICT
    sides = [ssl.MemoryBIO() for _ in range(2)]
    client = trusted.wrap_bio(*sides, server_hostname=name)
    server = served.wrap_bio(*reversed(sides), server_side=True)
    try:
        for _ in range(4):
            for side in (client, server):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError:
        assert not accepted
    else:
        assert accepted and client.version() == "TLSv1.3"


def test_each_site_has_the_private_key_of_its_public_one(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys")
    for site in ("site-1", "site-2"):
        private = load_ssh_private_key((keys / site / "node-key").read_bytes(), None)
        public = load_ssh_public_key((keys / "server" / f"{site}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        assert private.public_key() == public


def test_the_pages_name_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from another folder, and with a blank in the folder's name."""
    monkeypatch.chdir(tmp_path)
    write(Path("my keys"), "--port", "4443", "--link-port", "4000")
    keys = tmp_path / "my keys"
    monkeypatch.chdir(keys)
    (link,) = commands(keys / "README.md", "flower-superlink")
    (proxy,) = commands(keys / "README.md", "nginx")
    registered = commands(keys / "README.md", "flwr supernode register")
    places = [
        Path(word) for word in [*link, proxy[2], *registered[0], *registered[1]] if "/" in word
    ]
    assert len(places) == 6 and all(place.exists() for place in places)
    assert link[link.index("--port") + 1] == "4000"
    for site in ("site-1", "site-2"):
        (node,) = commands(keys / site / "README.md", "flower-supernode")
        assert node[node.index("--superlink") + 1] == "10.0.0.5:4443"
        assert all((keys / word).exists() for word in node if word.startswith("site-"))


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)")
@pytest.mark.parametrize("address", ["10.0.0.5", "::1"])
def test_nginx_accepts_its_configuration(address: str, tmp_path: Path) -> None:
    keys = write(tmp_path / "my keys", "--address", address)
    (command,) = commands(keys / "README.md", "nginx")
    done = subprocess.run([str(NGINX), "-t", *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_key_that_a_site_makes_itself_is_of_the_same_kind(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys")
    ours = (keys / "server" / "site-1.pub").read_text().split()
    for program in ("rm", "ssh-keygen"):
        (command,) = commands(keys / "site-1" / "README.md", program)
        subprocess.run(command, cwd=keys, check=True)
    theirs = (keys / "site-1" / "node-key.pub").read_text().split()
    assert theirs[0] == ours[0] and theirs[1] != ours[1]
    assert load_ssh_private_key((keys / "site-1" / "node-key").read_bytes(), None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sites 0 --address 10.0.0.5", "--sites 0: give a number from 1 to 1000"),
        ("--sites two --address 10.0.0.5", "--sites: invalid int value: 'two'"),
        ("--sites 2", "the following arguments are required: --address"),
        ("--sites 2 --address https://10.0.0.5", "--address 'https://10.0.0.5': give only the"),
        ("--sites 2 --address 10.0.0.5:8000", "--address '10.0.0.5:8000': give only the server's"),
        ("--sites 2 --address [::1]:8000", "--address '[::1]:8000': give only the server's IP"),
        ("--sites 2 --address 10.0.0.256", "--address '10.0.0.256': give only the server's IP"),
        ("--sites 2 --address 0.0.0.0", "--address '0.0.0.0': give only the server's IP address"),
        ("--sites 2 --address a_b/c", "--address 'a_b/c': give only the server's IP address"),
        ("--sites 2 --address h --port 0", "--port 0: give a port from 1 to 65535"),
        ("--sites 2 --address h --port 8000", "--port 8000: --link-port is 8000, too"),
        ("--sites 2 --address h --out there", "--out there: this folder exists already"),
        ("--sites 2 --address h --out there/file/keys", "there/file/keys"),
    ],
)
def test_what_is_wrong_is_one_paragraph_and_writes_nothing(
    options: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert main(["deploy", "keys", *options.split()]) == 2
    text = capsys.readouterr().err.strip()
    assert said in text
    assert "\n" not in text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "there"]


def test_without_cryptography_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "fl_lightning.deploy.flower.certificates", raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    out = tmp_path / "keys"
    assert main(["deploy", "keys", "--sites", "2", "--address", "h", "--out", str(out)]) == 2
    text = capsys.readouterr().err.strip()
    assert "pip install 'fl-lightning[flower]'" in text and "\n" not in text
    assert not out.exists()
