"""Keys and certificates of a deployment: an authority, the server's certificate, one key for each node.

DIR/certs/ca.pem, ca.key          the authority; whoever has ca.key can pose as the server: keep it off the network
DIR/certs/server.pem, server.key  for the SuperLink
DIR/certs/node-0, node-0.pub …    elliptic-curve keys in OpenSSH's form: the private one stays at its node
"""

import datetime
import ipaddress
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbe.errors import RunError
from fedbe.files import write_whole

CURVE = ec.SECP384R1()  # Flower takes NIST curves only
LOCAL = ("127.0.0.1", "localhost")


def make(folder: Path, nodes: int, hosts: Sequence[str] = (), days: int = 365) -> Path:
    """Write all of it into FOLDER/certs, readable by its owner only. Nothing that is there is replaced.

    A federation that grows gets the keys of its new nodes.
    """
    place = folder / "certs"
    new = [path for i in range(nodes) if not (path := place / f"node-{i}").exists()]
    if place.exists() and (hosts or not new):
        raise RunError(f"{place} exists already: remove it to make new keys, which ends trust in the old ones")
    if not place.exists():
        _found(place, hosts, days)
    for path in new:
        node_key(path)
    return place


def _found(place: Path, hosts: Sequence[str], days: int) -> None:
    with _private():
        try:
            place.mkdir(parents=True)
        except OSError as error:
            raise RunError(f"cannot create {place}: {error.strerror}") from error
        authority, ca = _authority(days)
        write_whole(place / "ca.key", _private_pem(authority))
        write_whole(place / "ca.pem", ca.public_bytes(Encoding.PEM))
        key = ec.generate_private_key(CURVE)
        write_whole(place / "server.key", _private_pem(key))
        write_whole(
            place / "server.pem", _server(key, authority, ca, [*LOCAL, *hosts], days).public_bytes(Encoding.PEM)
        )


def node_key(path: Path) -> None:
    """A private key at `path` and its public half at `path`.pub."""
    key = ec.generate_private_key(CURVE)
    with _private():
        write_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_whole(path.with_name(f"{path.name}.pub"), public + b"\n")


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
    hosts: Sequence[str],
    days: int,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[-1])])
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = _builder(name, ca.subject, key.public_key(), days)
    builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
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


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
