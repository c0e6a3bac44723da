"""TLS as each driver takes it, and what it says of a certificate that it refuses."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any

from acemq.errors import SecurityError
from acemq.security import Tls, check_presented, untrusted


def context_of(tls: Tls, endpoint: str) -> ssl.SSLContext:
    """Reads the files; blocks for as long as that takes. `SecurityError` names the setting at fault."""
    context = tls.context()

    class Checked(ssl.SSLObject):
        """Also looks at what OpenSSL does not, before a driver says a word."""

        def do_handshake(self) -> None:
            super().do_handshake()
            try:
                check_presented(self, endpoint)
            except SecurityError as error:
                raise ssl.SSLError(str(error)) from error  # what is to come of a handshake

    context.sslobject_class = Checked
    if tls.server_name is not None:
        _expect(context, tls.server_name)
    return context


def _expect(context: ssl.SSLContext, name: str) -> None:
    """No driver can be told a name to check in place of its host's: it is put in where asyncio hands that on."""
    wrap: Any = context.wrap_bio

    def wrap_bio(incoming: object, outgoing: object, server_side: bool = False, **options: Any) -> object:
        return wrap(incoming, outgoing, server_side=server_side, **{**options, "server_hostname": name})

    setattr(context, "wrap_bio", wrap_bio)  # noqa: B010 - a checker knows it as a method, which is not to be replaced


def for_libpq(tls: Tls) -> dict[str, str]:
    """For psycopg, which has OpenSSL of its own and takes no context."""
    said = {
        "sslmode": "verify-full" if tls.is_verified else "require",
        "sslrootcert": tls.ca_file or ("system" if tls.is_verified else None),
        "sslcert": tls.cert_file,
        "sslkey": tls.key_file or tls.cert_file,
        "sslpassword": tls.key_password,
        "ssl_min_protocol_version": f"TLSv{tls.minimum}",
    }
    return {option: value for option, value in said.items() if value is not None}


def distrust(endpoint: str, error: BaseException) -> SecurityError | None:
    """The server's certificate was refused; `None`: something else has happened."""
    for each in _causes(error):
        if isinstance(each, SecurityError):
            return each
        if isinstance(each, ssl.SSLCertVerificationError):
            return untrusted(endpoint, each)
    said = str(error)
    if "certificate verify failed" in said:  # in the words of libpq
        return SecurityError(
            f"the certificate of {endpoint} is refused. Its authority may be given as Tls(ca_file=…)", setting="ca_file"
        )
    if "does not match host name" in said:
        return SecurityError(
            f"the certificate of {endpoint} is refused: it has another name. Connect to it by the name that it has",
            setting="server_name",
        )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Itself, what its driver raised, and what that came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "orig", None) or error.__cause__
