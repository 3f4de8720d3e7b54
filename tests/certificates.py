"""Certificates for tests: a CA of its own, and what it vouches for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs what it is asked to, and writes it below `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        own = _builder(self._name, self._name, self._key, _days(3650))
        signed = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = folder / f"{name}.crt"
        self.certificate.write_bytes(signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *, host: str | None = None, days: int = 30, file: str | None = None
    ) -> tuple[Path, Path]:
        """A certificate and its key; with negative days it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        new = _builder(_named(name), self._name, key, _days(days))
        if host:
            new = new.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        certificate, secret = self._folder / f"{file or name}.crt", self._folder / f"{file or name}.key"
        certificate.write_bytes(new.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        secret.touch(mode=0o600)
        secret.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, secret


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _days(count: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=count)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime
) -> x509.CertificateBuilder:
    begin = min(until, datetime.now(UTC)) - timedelta(days=30)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return made.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(until)
