"""``fl-lightning deploy keys`` writes what TLS and keys need, and refuses what would not work."""

from __future__ import annotations

import os
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from tests.deploy.flower_runs import NGINX, commands


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


@pytest.mark.parametrize(
    ("address", "name", "authority", "accepted"),
    [
        *(("10.0.0.5", name, "keys", True) for name in ("10.0.0.5", "localhost", "::1")),
        *((name, name, "keys", True) for name in ("2001:db8::1", "server.example.org")),
        *(("10.0.0.5", name, "keys", False) for name in ("10.0.0.6", "server.example.org")),
        ("10.0.0.5", "10.0.0.5", "other", False),
    ],
)
def test_python_accepts_the_server_by_its_authority_and_name_only(
    address: str, name: str, authority: str, accepted: bool, tmp_path: Path
) -> None:
    """Strictly, as Python from 3.13 on does by default."""
    keys = write(tmp_path / "keys", "--address", address)
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
        command = ["ssh-keygen", "-y", "-f", str(keys / site / "node-key")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        kind, key = (keys / "server" / f"{site}.pub").read_text().split()
        assert done.stdout.split()[:2] == [kind, key] and kind == "ecdsa-sha2-nistp384"


def test_the_pages_name_real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--sites 0 --address 10.0.0.5",
            "--sites=0 is not accepted; it has to be an integer from 1 up to 1000",
        ),
        ("--sites two --address 10.0.0.5", "--sites: invalid int value: 'two'"),
        ("--sites 2", "the following arguments are required: --address"),
        ("--sites 2 --address https://10.0.0.5", "--address 'https://10.0.0.5': give only the"),
        ("--sites 2 --address 10.0.0.5:8000", "--address '10.0.0.5:8000': give only the server's"),
        ("--sites 2 --address 10.0.0.256", "--address '10.0.0.256': give only the server's IP"),
        ("--sites 2 --address 0.0.0.0", "--address '0.0.0.0': give only the server's IP address"),
        ("--sites 2 --address a_b/c", "--address 'a_b/c': give only the server's IP address"),
        ("--sites 2 --address h --out there", "Cannot write there: File exists"),
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


def test_without_openssl_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "keys"
    assert main(["deploy", "keys", "--sites", "2", "--address", "h", "--out", str(out)]) == 2
    assert "the program openssl is not installed" in capsys.readouterr().err
    assert not out.exists()
