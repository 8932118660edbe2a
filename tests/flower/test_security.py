"""TLS and node authentication: who is not registered, or does not use TLS, stays outside."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from real_processes import finished, written

from fedpmt.flower.loopback import Loopback, Tls, node_configs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.flower

RUN = {"method": "fedpmt", "devices": 4, "samples": 20, "cohort": 4, "batch": 10, "rounds": 2}
RUN |= {"levels": "1/2,1", "executor": "plain"}


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def certificates(folder: Path) -> Tls:
    """An authority, and a certificate of it for this machine."""
    now = datetime.datetime.now(datetime.UTC)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])

    def builder(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number()).not_valid_before(
            now - datetime.timedelta(days=1)
        )
        return made.not_valid_after(now + datetime.timedelta(days=1))

    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    root = builder(issuer, authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    root = root.add_extension(usage, critical=True)
    root = root.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    leaf = builder(subject, server).add_extension(x509.SubjectAlternativeName(names), critical=False)
    leaf = leaf.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
    )
    folder.mkdir(parents=True)
    tls = Tls(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    for made, path in ((root, tls.authority), (leaf, tls.certificate)):
        path.write_bytes(made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    tls.key.write_bytes(pem(server))
    return tls


def node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """What `ssh-keygen -t ecdsa -b 384` writes."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    plain = serialization.NoEncryption()
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    )
    private.chmod(0o600)
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(*form))
    return private, public


def test_only_registered_nodes_with_tls_take_part(tmp_path: Path) -> None:
    tls = certificates(tmp_path / "keys")
    with Loopback(tmp_path / "processes", tls=tls, authenticate=True) as federation:
        configs = node_configs(4, tmp_path / "nodes")
        for number in (0, 1):
            private, public = node_key(tmp_path / "keys", f"node-{number}")
            federation.register(public)
            federation.start_node(configs[number], private)
        stranger, _ = node_key(tmp_path / "keys", "stranger")
        unregistered = federation.start_node(configs[2], stranger)
        in_clear = federation.start_node(configs[3], insecure=True)
        app = written(tmp_path, RUN, min_nodes=2)
        deployed = finished(federation, federation.submit(app), tmp_path)
        assert unregistered.wait(60)
        assert unregistered.code() != 0
        log = in_clear.log.read_text(errors="replace")
    assert [[one.device for one in step.devices] for step in deployed.rounds] == [[0, 1], [0, 1]]
    assert all(one.outcome == "arrived" for step in deployed.rounds for one in step.devices)
    assert "Activated" not in log
