"""A server's TLS certificate, signed by an authority of its own, and the key pair of a node."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_PLAIN = serialization.NoEncryption()


@dataclass
class ServerFiles:
    """The files of a server, in PEM.

    Args:
        authority: the certificate by which sites check the server's; not secret.
        certificate: the server's.
        key: the server's private key.
        until: the day on which both certificates end.
    """

    authority: bytes
    certificate: bytes
    key: bytes
    until: datetime.date


def server_files(address: str, days: int) -> ServerFiles:
    """Make certificates that name ``address``, localhost, 127.0.0.1 and ::1.

    The authority's private key is thrown away, so it signs no further certificate.

    Args:
        address: the server's IP address or name.
        days: how long the certificates are valid.
    """
    own, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    until = now + datetime.timedelta(days=days)

    def started(name: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        identifier = x509.SubjectKeyIdentifier.from_public_key
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier
        return (
            x509.CertificateBuilder()
            .issuer_name(_name("fl-lightning authority"))
            .subject_name(_name(name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # A site's clock may be behind.
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(until)
            .add_extension(identifier(key.public_key()), critical=False)
            .add_extension(issuer(identifier(own.public_key())), critical=False)
        )

    authority = (
        started("fl-lightning authority", own)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_only("key_cert_sign"), critical=True)
        .sign(own, hashes.SHA384())
    )
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = (
        started("fl-lightning server", key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_only("digital_signature"), critical=True)
        .add_extension(server, critical=False)
        .add_extension(x509.SubjectAlternativeName(_named(address)), critical=False)
        .sign(own, hashes.SHA384())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, _PLAIN)
    return ServerFiles(
        authority.public_bytes(pem), certificate.public_bytes(pem), private, until.date()
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _only(usage: str) -> x509.KeyUsage:
    """Return an extension that allows a key this one usage."""
    every = [
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ]
    return x509.KeyUsage(**{name: name == usage for name in every})


def _named(address: str) -> list[x509.GeneralName]:
    """Return ``address`` and the names of the server's own machine, each once."""
    names: list[x509.GeneralName] = []
    for text in dict.fromkeys([address, "localhost", "127.0.0.1", "::1"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(text)))
        except ValueError:
            names.append(x509.DNSName(text))
    return names


def node_keys() -> tuple[bytes, bytes]:
    """Return a private key for a node and its public key, in OpenSSH's format, which Flower reads.

    The curve is P-384, as that of ``ssh-keygen -t ecdsa -b 384``.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    pem, ssh = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
    private = key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, _PLAIN)
    public = key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH)
    return private, public + b"\n"
