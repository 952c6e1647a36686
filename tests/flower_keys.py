"""Certificates for TLS and keys for node authentication, made anew for every test."""

from __future__ import annotations

import ipaddress
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID


def certificates(folder: Path, host: str, ahead: timedelta = timedelta()) -> None:
    """Write ca.pem, and, signed by it, server.pem with server.key for this IP address. ahead: the issuing clock's offset."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = _name("secure-fed test authority"), _name(host)
    now = datetime.now(UTC) + ahead
    ca = _certificate(issuer, issuer, authority.public_key(), now)
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = ca.add_extension(usage, critical=True)
    leaf = _certificate(subject, issuer, server.public_key(), now)
    names = [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")]
    leaf = leaf.add_extension(x509.SubjectAlternativeName(names), critical=False)
    leaf = leaf.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
    )
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
    for name, made in (("ca.pem", ca), ("server.pem", leaf)):
        (folder / name).write_bytes(made.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM))
    key = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.key").write_bytes(key)


def documented_certificates(folder: Path) -> None:
    """Write them by the commands of docs/deployment.md, as they stand there."""
    page = Path(__file__).resolve().parents[1] / "docs" / "deployment.md"
    lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines()]
    recipe = [line for line in lines if line.startswith("openssl ")]
    assert len(recipe) == 4
    subprocess.run(["sh", "-ec", "\n".join(recipe)], cwd=folder, check=True, capture_output=True)


def auth_keys(path: Path) -> None:
    """Write a node's private key, and its public half beside it as .pub: P-384 in the format of OpenSSH."""
    private = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.with_suffix(".pub").write_bytes(private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=2))
