"""Keys and certificates of a deployment: a certificate authority, the server's certificate, one key for each node.

DIR/certs/ca.pem, ca.key          the authority; ca.key can be used to impersonate the server: keep it offline
DIR/certs/server.pem, server.key  for the SuperLink
DIR/certs/node-0, node-0.pub …    elliptic-curve keys in OpenSSH format; the private key stays at its node
"""

import datetime
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbe.core.files import write_atomic
from fedbe.errors import RunError, SettingError

CURVE = ec.SECP384R1()  # Flower accepts only NIST curves
LOCAL_HOSTS = ("127.0.0.1", "localhost")
MAX_DAYS = 36_500
DNS_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
# A name whose last label is a number is a mistyped address.
DNS_NAME = re.compile(rf"(?!(.*\.)?\d+$)(?=.{{1,253}}$)({DNS_LABEL}\.)*{DNS_LABEL}")


def create(folder: Path, nodes: int, hosts: Sequence[str] = (), days: int = 365) -> Path:
    """Create the keys and certificates of a federation in FOLDER/certs, readable by their owner only.

    Existing files are never replaced. If the folder exists, the keys of new nodes are added.

    Args:
        folder: the folder of the app.
        nodes: the number of nodes.
        hosts: names or addresses by which nodes on other machines reach the server; 127.0.0.1 and localhost are
            always included.
        days: how long the certificates are valid, 1 to 36,500.

    Returns:
        The folder of the keys and certificates.

    Raises:
        SettingError: a host or `days` is not valid.
        RunError: nothing is new, or the folder cannot be written.
    """
    subjects = [_subject(host) for host in (*LOCAL_HOSTS, *hosts)]
    if not 1 <= days <= MAX_DAYS:
        raise SettingError(f"`days` must be from 1 to {MAX_DAYS}, got {days}")
    certs = folder / "certs"
    names = [f"node-{i}" for i in range(nodes)]
    if not certs.exists():
        _create_all(certs, names, subjects, days)
        return certs
    new = [name for name in names if not (certs / name).exists()]
    if hosts or not new:
        raise RunError(f"{certs} exists already: remove it to create new keys; the old keys will no longer be trusted")
    for name in new:
        create_node_key(certs / name)
    return certs


def _create_all(certs: Path, names: Sequence[str], subjects: Sequence[x509.GeneralName], days: int) -> None:
    """Create everything in a temporary folder and rename it at the end, so that it exists whole or not at all."""
    with _owner_only():
        try:
            certs.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".certs-", dir=certs.parent) as temporary:
                part = Path(temporary) / "certs"
                part.mkdir()
                ca_key, ca = _authority(days)
                server_key = ec.generate_private_key(CURVE)
                server = _server_certificate(server_key, ca_key, ca, subjects, days)
                write_atomic(part / "ca.key", _private_pem(ca_key))
                write_atomic(part / "ca.pem", ca.public_bytes(Encoding.PEM))
                write_atomic(part / "server.key", _private_pem(server_key))
                write_atomic(part / "server.pem", server.public_bytes(Encoding.PEM))
                for name in names:
                    create_node_key(part / name)
                part.rename(certs)
        except OSError as error:
            raise RunError(f"cannot create {certs}: {error.strerror}") from error


def create_node_key(path: Path) -> None:
    """Write a private key to `path` and its public key to `path`.pub.

    The public key is written first: if a private key exists, its public key does too.
    """
    key = ec.generate_private_key(CURVE)
    with _owner_only():
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_atomic(path.with_name(f"{path.name}.pub"), public + b"\n")
        write_atomic(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))


@contextmanager
def _owner_only() -> Iterator[None]:
    """Files created within are readable by their owner only (0600), folders too (0700)."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _authority(days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedbe federation")])
    usage = _key_usage(signs_certificates=True)
    builder = _builder(name, name, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return key, builder.add_extension(usage, critical=True).sign(key, hashes.SHA384())


def _server_certificate(
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    subjects: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedbe server")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = _builder(name, ca.subject, key.public_key(), days)
    builder = builder.add_extension(x509.SubjectAlternativeName(subjects), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.add_extension(issuer, critical=False).sign(ca_key, hashes.SHA384())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    # Valid from an hour ago, because the clocks of machines differ.
    begin = now - datetime.timedelta(hours=1)
    return builder.not_valid_before(begin).not_valid_after(now + datetime.timedelta(days=days))


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(host: str) -> x509.GeneralName:
    """A host as a certificate names it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if DNS_NAME.fullmatch(host):
            return x509.DNSName(host)
    raise SettingError(
        f"`host` must be an IP address or a name of letters, digits, dots and hyphens, without a port "
        f"(an international name in its xn-- form), got '{host}'"
    )
