"""Credentials and TLS: read when they are needed, refused by the name of the setting, never shown."""

from __future__ import annotations

import pickle
import ssl
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

import acemq
from acemq import ConfigurationError, Credentials, CredentialsSource, SecurityError, Tls
from acemq.security import ALLOW_DEVELOPMENT, DEVELOPMENT, is_for_development, is_loopback

SECRET = "s3cret/@:#?%"


def ask(source: CredentialsSource) -> Credentials:
    assert callable(source)
    answer = source()
    assert isinstance(answer, Credentials)
    return answer


def shows(error: BaseException) -> str:
    """Everything that a log with the traceback would hold, and the facts."""
    return "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error)) + repr(error.__context__)


# Credentials


def test_m004_a_variable_that_is_unset_or_empty_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Credentials.env("Q_USER", "Q_PASS")
    monkeypatch.setenv("Q_USER", "svc")
    for value in (None, ""):
        monkeypatch.delenv("Q_PASS", raising=False)
        if value is not None:
            monkeypatch.setenv("Q_PASS", value)
        with pytest.raises(SecurityError, match="Q_PASS") as refused:
            ask(source)
        assert refused.value.setting == "credentials"
    monkeypatch.setenv("Q_PASS", SECRET)
    assert ask(source) == Credentials("svc", SECRET)


def test_m004_a_file_holds_user_and_password_and_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "login"
    file.write_text(f"svc:{SECRET}\n")
    source = Credentials.file(file)
    assert ask(source) == Credentials("svc", SECRET)
    file.write_text("svc:another \t\r\n\n")
    assert ask(source) == Credentials("svc", "another")


def test_with_a_user_the_whole_file_is_the_password(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(" a:b \n")
    assert ask(Credentials.file(str(file), user="svc")) == Credentials("svc", " a:b")


@pytest.mark.parametrize(
    ("content", "user", "match"),
    [
        (None, None, "cannot be read"),
        (SECRET.encode().replace(b":", b""), None, "user:password"),
        (b"svc:", None, "no password"),
        (b":" + SECRET.encode(), None, "no user"),
        (b" \n", "svc", "no password"),
        (b"svc:" + SECRET.encode() + b"\xff", None, "UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_not_quoted(
    tmp_path: Path, content: bytes | None, user: str | None, match: str
) -> None:
    file = tmp_path / "login"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SecurityError, match=match) as refused:
        ask(Credentials.file(file, user=user))
    assert str(file) in str(refused.value)
    assert "s3cret" not in shows(refused.value)


def test_no_text_of_credentials_shows_them() -> None:
    given = Credentials("svc-user", SECRET)
    for text in (repr(given), str(given), f"{given}", f"{given!r:>5}", repr([given]), "%s" % given):  # noqa: UP031
        assert "s3cret" not in text
        assert "svc-user" not in text
    assert pickle.loads(pickle.dumps(given)) == given


@pytest.mark.parametrize("wrong", [SECRET, ("svc", SECRET), {"user": SECRET}, SECRET.encode()])
def test_credentials_of_another_kind_are_refused_without_being_shown(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"type {type(wrong).__name__}") as refused:
        acemq.connect("amqp://localhost", credentials=wrong)
    assert "s3cret" not in shows(refused.value)


# Where they have a use


@pytest.mark.parametrize("url", ["amqp://h", "memory://", "memory://shop", "redis://h"])
def test_m007_tls_is_refused_where_the_scheme_says_plain_text_before_its_file_is_read(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        acemq.connect(url, tls=Tls(ca_file="x"))
    if isinstance(refused.value, SecurityError):
        assert refused.value.setting == "tls"
    assert "cannot be read" not in str(refused.value)


def test_credentials_have_no_use_in_memory() -> None:
    with pytest.raises(SecurityError, match="credentials=") as refused:
        acemq.connect("memory://", credentials=Credentials("svc", SECRET))
    assert "s3cret" not in shows(refused.value)


def test_tls_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Tls"):
        acemq.connect("amqps://h", tls=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_no_bool_of_ours_turns_verification_off() -> None:
    with pytest.raises(TypeError):
        Tls(_is_verified=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    assert Tls() != Tls.unverified_for_testing()


# TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ours(authority: trustme.CA) -> trustme.LeafCert:
    return authority.issue_cert("svc.example")


Write = Callable[[str, bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


def encrypted(key: bytes, password: str) -> bytes:
    private = load_pem_private_key(key, None)
    how = BestAvailableEncryption(password.encode())
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)


def test_nothing_said_is_everything_checked() -> None:
    context = Tls().context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_newer_least_version() -> None:
    assert Tls(minimum="1.3").context().minimum_version is ssl.TLSVersion.TLSv1_3


def test_an_authority_replaces_the_systems(authority: trustme.CA, write: Write) -> None:
    context = Tls(ca_file=write("ca.pem", authority.cert_pem.bytes())).context()
    assert len(context.get_ca_certs()) == 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_only_one_name_turns_verification_off_and_it_is_shown() -> None:
    tls = Tls.unverified_for_testing()
    context = tls.context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert repr(tls) == "Tls.unverified_for_testing()"
    mq = acemq.AceMQ("amqps://h", tls=tls)
    assert any("unverified_for_testing" in note for note in mq.capabilities.notes)


def test_our_certificate_with_its_key_in_one_file_or_two(ours: trustme.LeafCert, write: Write) -> None:
    cert, key = ours.cert_chain_pems[0].bytes(), ours.private_key_pem.bytes()
    Tls(cert_file=write("both.pem", key + cert)).context()
    Tls(cert_file=write("cert.pem", cert), key_file=write("key.pem", key)).context()
    locked = write("locked.pem", encrypted(key, SECRET))
    Tls(cert_file=write("cert.pem", cert), key_file=locked, key_password=SECRET).context()


def test_a_key_without_its_certificate_is_refused_when_it_is_said() -> None:
    for options in ({"key_file": "key.pem"}, {"key_password": SECRET}):
        with pytest.raises(SecurityError, match="without cert_file") as refused:
            Tls(**options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        assert refused.value.setting in options
        assert "s3cret" not in shows(refused.value)


@pytest.mark.parametrize("setting", ["ca_file", "cert_file", "key_file"])
@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_file_that_cannot_be_read_or_parsed_is_named(
    setting: str, content: bytes | None, ours: trustme.LeafCert, write: Write, tmp_path: Path
) -> None:
    path = write("x.pem", content) if content is not None else str(tmp_path / "missing.pem")
    options: dict[str, Any] = {setting: path}
    if setting == "key_file":
        options["cert_file"] = write("cert.pem", ours.cert_chain_pems[0].bytes())
    with pytest.raises(SecurityError, match=setting) as refused:
        Tls(**options).context()
    assert refused.value.setting == setting
    assert path in str(refused.value)


def test_the_key_of_another_certificate(authority: trustme.CA, ours: trustme.LeafCert, write: Write) -> None:
    other = write("key.pem", authority.issue_cert("other.example").private_key_pem.bytes())
    with pytest.raises(SecurityError, match="is not that of cert_file") as refused:
        Tls(cert_file=write("cert.pem", ours.cert_chain_pems[0].bytes()), key_file=other).context()
    assert refused.value.setting == "key_file"


@pytest.mark.parametrize(
    ("given", "match"), [(None, "missing"), ("wr0ng", "does not open"), ("w" * 2000, "does not open")]
)
def test_a_key_password_that_is_missing_or_wrong_is_refused_and_nobody_is_asked(
    given: str | None, match: str, ours: trustme.LeafCert, write: Write
) -> None:
    cert = write("cert.pem", ours.cert_chain_pems[0].bytes())
    key = write("key.pem", encrypted(ours.private_key_pem.bytes(), SECRET))
    tls = Tls(cert_file=cert, key_file=key, key_password=given)
    with pytest.raises(SecurityError, match=match) as refused:
        tls.context()
    assert refused.value.setting == "key_password"
    text = shows(refused.value) + repr(tls)
    assert "s3cret" not in text
    assert "wr0ng" not in text
    assert "wwww" not in text


@pytest.mark.parametrize("setting", ["ca_file", "cert_file", "server_name", "key_password"])
def test_an_empty_setting_is_refused(setting: str) -> None:
    with pytest.raises(SecurityError, match=f"{setting} is empty"):
        Tls(**{setting: ""})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_least_version_that_is_too_old_is_refused() -> None:
    with pytest.raises(SecurityError, match=r"1\.2, 1\.3"):
        Tls(minimum="1.1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# Certificates for development


def der(certificate: trustme.Blob) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.bytes().decode())


def test_the_organisation_of_the_subject_decides() -> None:
    for_all, plain = trustme.CA(organization_name=DEVELOPMENT), trustme.CA()
    assert is_for_development(der(for_all.cert_pem))
    assert not is_for_development(der(plain.cert_pem))
    leaf = plain.issue_cert("h", organization_name=DEVELOPMENT)
    assert is_for_development(der(leaf.cert_chain_pems[0]))
    # Another's word about the issuer is no word about the subject.
    assert not is_for_development(der(for_all.issue_cert("h", organization_name="real").cert_chain_pems[0]))
    assert not is_for_development(der(plain.issue_cert("h", common_name=DEVELOPMENT).cert_chain_pems[0]))


@pytest.mark.parametrize("cut", [0, 1, 5, 60, 200])
def test_bytes_that_are_no_certificate_are_no_development_certificate(cut: int) -> None:
    assert not is_for_development(der(trustme.CA(organization_name="x").cert_pem)[:cut])


def test_m008_a_development_certificate_is_refused_wherever_it_stands_in_a_file(
    write: Write, monkeypatch: pytest.MonkeyPatch, ours: trustme.LeafCert
) -> None:
    monkeypatch.delenv(ALLOW_DEVELOPMENT, raising=False)
    for_all, plain = trustme.CA(organization_name=DEVELOPMENT), trustme.CA()
    bundle = write("bundle.pem", plain.cert_pem.bytes() + for_all.cert_pem.bytes())
    chain = b"".join(blob.bytes() for blob in (ours.private_key_pem, ours.cert_chain_pems[0], for_all.cert_pem))
    for tls, setting in ((Tls(ca_file=bundle), "ca_file"), (Tls(cert_file=write("chain.pem", chain)), "cert_file")):
        with pytest.raises(SecurityError, match=DEVELOPMENT) as refused:
            tls.context()
        assert refused.value.setting == setting
        assert f"{ALLOW_DEVELOPMENT}=1" in str(refused.value)
        monkeypatch.setenv(ALLOW_DEVELOPMENT, "yes")
        with pytest.raises(SecurityError):
            tls.context()
        monkeypatch.setenv(ALLOW_DEVELOPMENT, "1")
        tls.context()
        monkeypatch.delenv(ALLOW_DEVELOPMENT)


@pytest.mark.parametrize(
    ("host", "stays"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("rabbit", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("localhost.example.com", False),
    ],
)
def test_what_is_sent_to_loopback_stays_on_this_machine(host: str, stays: bool) -> None:
    assert is_loopback(host) is stays
