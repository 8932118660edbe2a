"""Flower's own processes: the simulator's bits, `fedpmt deploy`, who is let in, and sums in place of replies."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from deployments import (
    BITS,
    FIVE,
    HERE,
    NARROW,
    PARTS,
    RUN,
    assert_close,
    deploy,
    digest,
    finished,
    left_of,
    model_of,
    rounds_done,
    simulated,
    until,
    written,
)
from flwr.app import Error, Message

from fedpmt.flower.loopback import Loopback, Tls, node_configs
from fedpmt.records import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = pytest.mark.flower

SHORT = {"method": "scaffold", "devices": 2, "samples": 20, "cohort": 2, "batch": 10, "rounds": 2, "lr": 0.1}
SHORT |= {"levels": "1/2,1", "executor": "plain", "eval_every": 2}
SHORT |= {"momentum": 0.5, "server_optimizer": "momentum", "server_lr": 0.3}


def test_a_deployment_has_the_bits_of_the_simulator_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(2, tmp_path / "nodes"):
            federation.start_node(config)
        assert len(left_of(federation.port)) >= 3
        deployed = finished(federation, federation.submit(written(tmp_path, SHORT)), tmp_path)
    assert digest(deployed) == simulated(tmp_path, SHORT)
    assert [one.outcome for step in deployed.rounds for one in step.devices] == ["arrived"] * 4
    assert all(one.seconds > 0 for step in deployed.rounds for one in step.devices)
    # What a device keeps is in its node's own folder: the accepted state and the one of the last round.
    for device in (0, 1):
        kept = sorted(path.name for path in (tmp_path / "nodes" / f"node-{device}").rglob("*.safetensors"))
        assert kept == [f"{device}-0.safetensors", f"{device}-1.safetensors"]
    assert left_of(federation.port) == []


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("deployment")
    with Loopback(folder / "processes") as federation:
        for config in node_configs(4, folder / "nodes"):
            federation.start_node(config)
        yield federation
    assert left_of(federation.port) == []


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("ray")
    with Loopback(folder / "processes", simulation=True) as federation:
        yield federation
    assert left_of(federation.port) == []


TRADED = {"method": "fedpmt", "plan": "traded", "server_optimizer": "momentum", "server_lr": 0.3}
"""Fedpmt's own method, as a user switches it on."""


@pytest.mark.parametrize("given", [*({"method": name} for name in FIVE), TRADED], ids=[*FIVE, "traded"])
def test_a_deployment_has_the_bits_of_the_simulator(
    given: dict[str, object], deployed: Loopback, tmp_path: Path
) -> None:
    given = BITS | given
    run = finished(deployed, deployed.submit(written(tmp_path, given)), tmp_path)
    assert digest(run) == simulated(tmp_path, given)
    assert all(one.outcome == "arrived" for step in run.rounds for one in step.devices)


@pytest.mark.parametrize("method", FIVE)
def test_ray_has_the_bits_of_the_simulator(method: str, on_ray: Loopback, tmp_path: Path) -> None:
    given = {**BITS, "method": method}
    app = written(tmp_path, given, state_dir=str(tmp_path / "nodes"))
    nodes = {"num-supernodes": 4, "client-resources-num-cpus": 1, "init-args-num-cpus": 2}
    run = finished(on_ray, on_ray.submit(app, federation_config=nodes), tmp_path)
    assert digest(run) == simulated(tmp_path, given)
    assert all(one.outcome == "arrived" for step in run.rounds for one in step.devices)


COMMANDED = {
    "method": "scaffold",
    "devices": 2,
    "samples": 20,
    "cohort": 2,
    "batch": 10,
    "rounds": 3,
    "lr": 0.1,
}
COMMANDED |= {"levels": "1/2,1", "executor": "plain"}


def command(out: Path, *more: str) -> list[str]:
    flags = [text for key, value in COMMANDED.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "fedpmt", "deploy", *flags, "--out", str(out), *more]


def port_of(out: Path) -> int:
    """The SuperLink's port, as in Flower's configuration."""
    config = tomllib.loads((out / "processes" / "flower" / "config.toml").read_text())
    return int(config["superlink"]["loopback"]["address"].rpartition(":")[2])


def deploying(out: Path, *more: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(out, *more), stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def test_ctrl_c_stops_everything_and_a_resume_has_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "deployment"
    with deploying(out) as running:
        until(lambda: rounds_done(out) >= 1)
        assert len(left_of(port_of(out))) >= 4  # the ServerApp too
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert f"continue with fedpmt deploy --resume --out {out}" in said
    assert left_of(port_of(out)) == []
    with deploying(out, "--resume", "--json") as resumed:
        printed, said = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, said
    assert json.loads(printed.splitlines()[-1])["rounds"] == 3
    assert digest(read_run(out / "run")) == simulated(tmp_path, COMMANDED)
    assert left_of(port_of(out)) == []


def test_a_sigkill_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "deployment"
    with deploying(out) as running:
        until(lambda: rounds_done(out) >= 1)
        port = port_of(out)
        assert len(left_of(port)) >= 4
        running.kill()
        running.communicate(timeout=60)
    until(lambda: left_of(port) == [], seconds=60)


def test_a_request_to_end_stops_everything_too(tmp_path: Path) -> None:
    out = tmp_path / "deployment"
    with deploying(out) as running:
        until(lambda: (out / "processes" / "supernode-1.log").exists() and len(left_of(port_of(out))) >= 3)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == 130
    assert left_of(port_of(out)) == []


GUARDED = {"method": "fedpmt", "devices": 4, "samples": 20, "cohort": 4, "batch": 10, "rounds": 2}
GUARDED |= {"levels": "1/2,1", "executor": "plain"}


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
        app = written(tmp_path, GUARDED, min_nodes=2)
        deployed = finished(federation, federation.submit(app), tmp_path)
        assert unregistered.wait(60)
        assert unregistered.code() != 0
        log = in_clear.log.read_text(errors="replace")
    assert [[one.device for one in step.devices] for step in deployed.rounds] == [[0, 1], [0, 1]]
    assert all(one.outcome == "arrived" for step in deployed.rounds for one in step.devices)
    assert "Activated" not in log


LOST = NARROW[0]


def test_four_nodes_and_then_a_narrow_one_dies_while_it_trains(tmp_path: Path) -> None:
    """It has dealt its secrets and never sends its vector: the others take its masks out of the sum."""
    given = {**RUN, "rounds": 2}
    app, stuck = written(tmp_path, given, secagg=True, wait_seconds=600.0), tmp_path / "stuck"
    shutil.copy(HERE / "troubled_app.py", app / "fedpmt_app.py")
    with Loopback(tmp_path / "processes") as federation:
        for config in node_configs(4, tmp_path / "nodes"):
            troubled = {"stuck-file": str(stuck)} if config["partition-id"] == LOST else {}
            federation.start_node({**config, **troubled})
        run = federation.submit(app)
        until(stuck.exists, seconds=900)
        federation.nodes[LOST].kill()
        deployed = finished(federation, run, tmp_path, seconds=900)

    def lost(question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "train":
            return answer
        task = question.content.config_records["task"]
        gone = (task["round"], task["device"]) == (1, LOST)
        return Message(Error(2, "gone"), reply_to=question) if gone else answer

    first, second = deployed.rounds
    assert [one.part for one in first.devices] == PARTS
    assert [one.outcome for one in first.devices] == ["arrived"] * 4
    assert [one.outcome for one in second.devices] == ["arrived", "failed", "arrived", "arrived"]
    assert list(first.layers.values()) == [2, 2, 4, 4, 4]
    assert list(second.layers.values()) == [2, 2, 3, 3, 3]
    replayed, _ = deploy(tmp_path / "replayed", given, lost, secagg=True)
    assert digest(deployed) == digest(replayed)
    deploy(tmp_path / "plain", given, lost)
    assert_close(model_of(tmp_path), model_of(tmp_path / "plain"), rounds=2)
