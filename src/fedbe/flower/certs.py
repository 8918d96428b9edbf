"""Keys and certificates of a deployment: an authority, the server's certificate, one key for each node.

DIR/certs/ca.pem, ca.key          the authority; whoever has ca.key can pose as the server: keep it off the network
DIR/certs/server.pem, server.key  for the SuperLink
DIR/certs/node-0, node-0.pub …    elliptic-curve keys in OpenSSH's form: the private one stays at its node
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

CURVE = ec.SECP384R1()  # Flower takes NIST curves only
LOCAL = ("127.0.0.1", "localhost")
MOST_DAYS = 36_500
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
NAME = re.compile(
    rf"(?!(.*\.)?\d+$)(?=.{{1,253}}$)({LABEL}\.)*{LABEL}"
)  # one that ends in a number is a mistyped address


def make(folder: Path, nodes: int, hosts: Sequence[str] = (), days: int = 365) -> Path:
    """Write all of it into FOLDER/certs, readable by its owner only. Nothing that is there is replaced.

    A federation that grows gets the keys of its new nodes.
    """
    subjects = [_subject(host) for host in (*LOCAL, *hosts)]
    if not 1 <= days <= MOST_DAYS:
        raise SettingError(f"`days` must be from 1 to {MOST_DAYS}, got {days}")
    place = folder / "certs"
    names = [f"node-{i}" for i in range(nodes)]
    if not place.exists():
        _found(place, names, subjects, days)
        return place
    new = [name for name in names if not (place / name).exists()]
    if hosts or not new:
        raise RunError(f"{place} exists already: remove it to make new keys, which ends trust in the old ones")
    for name in new:
        node_key(place / name)
    return place


def _found(place: Path, names: Sequence[str], subjects: Sequence[x509.GeneralName], days: int) -> None:
    """Made beside its place and moved there when it is whole."""
    with _private():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".certs-", dir=place.parent) as beside:
                part = Path(beside) / "certs"
                part.mkdir()
                authority, ca = _authority(days)
                key = ec.generate_private_key(CURVE)
                server = _server(key, authority, ca, subjects, days)
                write_atomic(part / "ca.key", _private_pem(authority))
                write_atomic(part / "ca.pem", ca.public_bytes(Encoding.PEM))
                write_atomic(part / "server.key", _private_pem(key))
                write_atomic(part / "server.pem", server.public_bytes(Encoding.PEM))
                for name in names:
                    node_key(part / name)
                part.rename(place)
        except OSError as error:
            raise RunError(f"cannot create {place}: {error.strerror}") from error


def node_key(path: Path) -> None:
    """A private key at `path` and its public half at `path`.pub, which comes first: a key that is there is whole."""
    key = ec.generate_private_key(CURVE)
    with _private():
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_atomic(path.with_name(f"{path.name}.pub"), public + b"\n")
        write_atomic(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))


@contextmanager
def _private() -> Iterator[None]:
    """Files made within are readable by their owner only (0600), folders too (0700)."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


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


def _server(
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    subjects: Sequence[x509.GeneralName],
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedbe server")])
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = _builder(name, ca.subject, key.public_key(), days)
    builder = builder.add_extension(x509.SubjectAlternativeName(subjects), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.add_extension(signer, critical=False).sign(authority, hashes.SHA384())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    # From an hour ago: the clocks of several machines differ.
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
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if NAME.fullmatch(host):
            return x509.DNSName(host)
    raise SettingError(
        f"`host` must be an IP address or a name of letters, digits, dots and hyphens, without a port "
        f"(an international name in its xn-- form), got '{host}'"
    )
