"""A relay through TLS with certificates of both sides, as Zenoh's configuration names them."""

from __future__ import annotations

import datetime
import ipaddress
import json

import numpy as np
import pytest

pytest.importorskip("zenoh", reason="a relay needs the extra `relay`")
x509 = pytest.importorskip("cryptography.x509", reason="certificates are made with `cryptography`")

from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

import shmtensor  # noqa: E402

from ..waiting import PATIENCE, wait_until  # noqa: E402
from .hosts import endpoint, is_open, state_of  # noqa: E402


class Authority:
    """Signs certificates, which lie in a directory."""

    def __init__(self, directory, name):
        self.directory, self.name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = self._build(self._subject, self._key.public_key(), is_authority=True)
        self.certificate = directory / f"{name}.pem"
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def _build(self, subject, key, *, is_authority, days=1):
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._subject).public_key(key)
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )  # fmt: skip
        if not is_authority:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, name, days=1):
        """Paths of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = self._build(subject, key.public_key(), is_authority=False, days=days)
        paths = self.directory / f"{self.name}-{name}.pem", self.directory / f"{self.name}-{name}.key"
        paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths


def configuration(directory, name, side, authority, issued=None):
    """A configuration file of Zenoh: whom to trust, and what to show."""
    settings = {"root_ca_certificate": str(authority.certificate), "enable_mtls": True}
    if issued is not None:
        settings |= {f"{side}_certificate": str(issued[0]), f"{side}_private_key": str(issued[1])}
    path = directory / f"{name}.json5"
    path.write_text(json.dumps({"transport": {"link": {"tls": settings}}}))
    return path


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "authority")


def test_both_sides_show_certificates(channel, tmp_path, authority):
    where = endpoint().replace("tcp/", "tls/")
    far = configuration(tmp_path, "far", "listen", authority, authority.issue("far"))
    near = configuration(tmp_path, "near", "connect", authority, authority.issue("near"))
    with (
        shmtensor.Publisher(channel) as tx,
        shmtensor.Subscriber(f"{channel}-far") as rx,
        shmtensor.Relay(f"{channel}-far", listen=where, config=far),
        shmtensor.Relay(channel, to=where, remote=f"{channel}-far", config=near) as relay,
    ):
        relay.wait(PATIENCE)
        for size in (10, 3_000_000):
            tx.send(np.arange(size))
            with rx.recv(timeout=PATIENCE) as message:
                assert (message.value == np.arange(size)).all()


def test_who_has_no_certificate_of_theirs_stays_out(channel, tmp_path, authority):
    """None, one by another authority, one that has expired, and no TLS; meanwhile one with a good one is served."""
    where = endpoint().replace("tcp/", "tls/")
    other = Authority(tmp_path, "other")
    far = configuration(tmp_path, "far", "listen", authority, authority.issue("far"))
    bad = {
        "none": (where, configuration(tmp_path, "none", "connect", authority)),
        "other": (where, configuration(tmp_path, "other", "connect", authority, other.issue("near"))),
        "expired": (where, configuration(tmp_path, "expired", "connect", authority, authority.issue("old", days=-1))),
        "distrusts": (where, configuration(tmp_path, "distrusts", "connect", other, authority.issue("near"))),
        "plain": (where.replace("tls/", "tcp/"), None),
    }
    good = configuration(tmp_path, "near", "connect", authority, authority.issue("good"))
    with shmtensor.Publisher(channel), shmtensor.Relay(f"{channel}-far", listen=where, config=far) as there:
        for to, config in bad.values():
            with (
                shmtensor.Relay(channel, to=to, remote=f"{channel}-far", config=config) as relay,
                shmtensor.Relay(channel, to=where, remote=f"{channel}-far", config=good) as friend,
            ):
                friend.wait(PATIENCE)
                with pytest.raises(shmtensor.TimedOut, match="no far relay has answered"):
                    relay.wait(0.5)
                assert not is_open(relay)
        wait_until(lambda: state_of(there).state == "listening")
        assert state_of(there).connections == len(bad)  # of the friends
