"""Between payload and bytes: which codec writes, which reads, and what a body is decoded into."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Mapping
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast, overload, runtime_checkable

import msgspec

from acemq.errors import ClaimStoreError, ConfigurationError, DecodeError, EncodeError, HandlerTypeError

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

OCTETS = "application/octet-stream"


class Codec(Protocol):
    """What writes and reads one kind of body.

    `encode` raises `EncodeError`, `decode` raises `DecodeError`; anything else that they raise counts as that.
    """

    @property
    def content_type(self) -> str: ...
    def can_decode(self, content_type: str | None) -> bool: ...
    def encode(self, payload: object) -> bytes: ...
    def decode(self, body: bytes, into: Any) -> Any: ...


class AsyncCodec(Protocol):
    """The same for what has to wait, such as for a store. It may also raise `ClaimStoreError`, which is retried."""

    @property
    def content_type(self) -> str: ...
    def can_decode(self, content_type: str | None) -> bool: ...
    async def encode(self, payload: object) -> bytes: ...
    async def decode(self, body: bytes, into: Any) -> Any: ...


AnyCodec: TypeAlias = Codec | AsyncCodec


@runtime_checkable
class Wrapping(Protocol):
    """What a codec that wraps another one has besides: it is given `bytes` payloads too, which others never see."""

    def unwraps(self, content_type: str | None) -> bool:
        """Whether a body of this content type is given to it where the payload class is `bytes`."""
        ...

    def label(self, content_type: str) -> str:
        """The content type of what it has made of a `bytes` payload of this content type."""
        ...


class JsonCodec:
    """`application/json` by msgspec. Also reads `text/json`, `application/*+json` and a missing content type."""

    content_type = "application/json"

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder(enc_hook=_from_foreign)
        self._decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

    def can_decode(self, content_type: str | None) -> bool:
        kind = media_type(content_type)
        return kind in (None, "application/json", "text/json") or (
            kind.startswith("application/") and kind.endswith("+json")
        )

    def encode(self, payload: object) -> bytes:
        try:
            return self._encoder.encode(payload)
        except Exception as error:  # an encoding hook of the payload's own class may raise anything
            raise EncodeError(f"{type(payload).__name__} cannot be written as JSON: {error}") from error

    def decode(self, body: bytes, into: Any) -> Any:
        decoder = self._decoders.get(into)
        if decoder is None:
            decoder = self._decoders[into] = msgspec.json.Decoder(into, dec_hook=_into_foreign)
        try:
            return decoder.decode(body)
        except (ValueError, RecursionError) as error:  # ValueErrors are those of msgspec, of pydantic and of bad UTF-8
            raise DecodeError(str(error), content_type=self.content_type) from error


class MsgpackCodec:
    """`application/msgpack`, also read as `application/x-msgpack`, by msgspec."""

    content_type = "application/msgpack"

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_from_foreign)
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    def can_decode(self, content_type: str | None) -> bool:
        return media_type(content_type) in ("application/msgpack", "application/x-msgpack")

    def encode(self, payload: object) -> bytes:
        try:
            return self._encoder.encode(payload)
        except Exception as error:  # as in JsonCodec
            raise EncodeError(f"{type(payload).__name__} cannot be written as MessagePack: {error}") from error

    def decode(self, body: bytes, into: Any) -> Any:
        decoder = self._decoders.get(into)
        if decoder is None:
            decoder = self._decoders[into] = msgspec.msgpack.Decoder(into, dec_hook=_into_foreign)
        try:
            return decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise DecodeError(str(error), content_type=self.content_type) from error


class TextCodec:
    """`text/plain` in UTF-8; `str` only."""

    content_type = "text/plain; charset=utf-8"

    def can_decode(self, content_type: str | None) -> bool:
        return media_type(content_type) == "text/plain"

    def encode(self, payload: object) -> bytes:
        if not isinstance(payload, str):
            raise EncodeError(f"text/plain carries str, not {type(payload).__name__}")
        try:
            return payload.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"no UTF-8 can carry this text: {error}") from error

    def decode(self, body: bytes, into: Any) -> Any:
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise DecodeError(f"not valid UTF-8: {error}", content_type=self.content_type) from error
        if into in (str, object, Any):
            return text
        try:
            return msgspec.convert(text, into, strict=False)
        except ValueError as error:
            raise DecodeError(str(error), content_type=self.content_type) from error


class BytesCodec:
    """`application/octet-stream`: the body itself. Reads anything."""

    content_type = OCTETS

    def can_decode(self, content_type: str | None) -> bool:
        return True

    def encode(self, payload: object) -> bytes:
        body = as_bytes(payload)
        if body is None:
            raise EncodeError(f"{OCTETS} carries bytes, not {type(payload).__name__}")
        return body

    def decode(self, body: bytes, into: Any) -> Any:
        if into in (bytes, object, Any):
            return body
        raise DecodeError(f"{OCTETS} gives bytes, not {_name_of(into)}", content_type=self.content_type)


class Codecs:
    """Writes with one codec, reads with several: the content type picks the first that reads it."""

    def __init__(self, write: AnyCodec, *also_read: AnyCodec) -> None:
        self._write, self._read = write, (write, *also_read)
        self.content_type = write.content_type
        self.is_async = any(map(is_async, self._read))
        """Some codec of them has to be awaited."""
        self._wrapping = cast("Wrapping", write) if _wraps(type(write)) else None

    @staticmethod
    def default() -> Codecs:
        """Writes JSON; reads JSON, text, MessagePack and bytes."""
        return Codecs(JsonCodec(), TextCodec(), MsgpackCodec(), BytesCodec())

    @staticmethod
    def of(codec: AnyCodec | Codecs) -> Codecs:
        return codec if isinstance(codec, Codecs) else Codecs(codec)

    def with_codec(self, codec: AnyCodec) -> Codecs:
        """Also reads what `codec` reads, before the others."""
        return Codecs(self._write, codec, *self._read[1:])

    def can_decode(self, content_type: str | None) -> bool:
        return any(codec.can_decode(content_type) for codec in self._read)

    def encode(self, payload: object) -> bytes:
        return cast("bytes", _at_once(self._write.encode(payload)))

    def decode(self, body: bytes, into: Any) -> Any:
        return _at_once(self._write.decode(body, into))

    def write(self, payload: object, content_type: str | None = None) -> tuple[bytes, str]:
        """The body and its content type. Bytes travel as they are, whatever the codec, unless it is one that wraps."""
        codec, label = self._writer(payload, content_type)
        if codec is None:
            raw = as_bytes(payload)
            assert raw is not None
            return raw, label
        return _at_once(codec.encode(payload)), label

    async def write_async(self, payload: object, content_type: str | None = None) -> tuple[bytes, str]:
        """The same where a codec has to be awaited."""
        codec, label = self._writer(payload, content_type)
        if codec is None or not _waits(type(codec)):
            return self.write(payload, content_type)
        try:
            return await cast("AsyncCodec", codec).encode(payload), label
        except (EncodeError, ClaimStoreError):
            raise
        except Exception as error:
            raise EncodeError(f"{type(payload).__name__} cannot be written: {type(error).__name__}: {error}") from error

    def _writer(self, payload: object, content_type: str | None) -> tuple[AnyCodec | None, str]:
        """What writes it, and the content type to be; `None` for bytes, which are their own body."""
        if isinstance(payload, (bytes, bytearray, memoryview)):  # a tuple: three times as fast as a union
            label = content_type or OCTETS
            return (None, label) if self._wrapping is None else (self._write, self._wrapping.label(label))
        if content_type is None:
            return self._write, self.content_type
        return self._writer_of(content_type), content_type

    def _writer_of(self, content_type: str) -> AnyCodec:
        for codec in self._read:
            if media_type(codec.content_type) != OCTETS and codec.can_decode(content_type):
                return codec
        raise ConfigurationError(f"content_type={content_type!r}: no codec of this connection writes it")

    def reader_of(self, content_type: str | None) -> AnyCodec:
        """The codec that reads this content type; `DecodeError` when none does, or its charset is not UTF-8."""
        charset = _charset_of(content_type)
        if charset not in (None, "utf-8", "utf8", "us-ascii"):
            raise DecodeError(f"charset {charset!r} is not read; send UTF-8", content_type=content_type)
        for codec in self._read:
            if codec.can_decode(content_type) and (content_type is None or media_type(codec.content_type) != OCTETS):
                return codec
        for codec in self._read:
            if media_type(content_type) == OCTETS and codec.can_decode(content_type):
                return codec
        raise DecodeError(f"no codec reads {content_type!r}", content_type=content_type)

    def unwrapper_of(self, content_type: str | None) -> AnyCodec | None:
        """What has to take a body apart before it is the sender's bytes."""
        for codec in self._read:
            if _wraps(type(codec)) and cast("Wrapping", codec).unwraps(content_type):
                return codec
        return None


def is_async(codec: AnyCodec | Codecs) -> bool:
    """Whether it has to be awaited."""
    return codec.is_async if isinstance(codec, Codecs) else _waits(type(codec))


@lru_cache(256)
def _waits(kind: type[AnyCodec]) -> bool:
    return inspect.iscoroutinefunction(kind.encode) or inspect.iscoroutinefunction(kind.decode)


@lru_cache(256)
def _wraps(kind: type[AnyCodec]) -> bool:
    return issubclass(kind, Wrapping)


def _at_once(made: Any) -> Any:
    """What a codec made, which cannot be waited for here."""
    if type(made) is not bytes and inspect.iscoroutine(made):
        made.close()
        raise ConfigurationError("this codec has to be awaited, and is used where nothing awaits it")
    return made


class PayloadType(Generic[T]):
    """One of several payload classes, made by `one_of`."""

    def __init__(self, into: Any, names: Mapping[str, Any] | None) -> None:
        self.into, self.names = into, names

    def __repr__(self) -> str:
        return f"one_of({_name_of(self.into)})"


Payload: TypeAlias = type[T] | PayloadType[T]


@overload
def one_of(
    first: type[A], second: type[B], /, *, names: Mapping[str, type[Any]] | None = None
) -> PayloadType[A | B]: ...
@overload
def one_of(
    first: type[A], second: None, /, *, names: Mapping[str, type[Any]] | None = None
) -> PayloadType[A | None]: ...
@overload
def one_of(
    first: type[A], second: type[B], third: type[C], /, *, names: Mapping[str, type[Any]] | None = None
) -> PayloadType[A | B | C]: ...
@overload
def one_of(
    first: type[A], second: type[B], third: type[C], fourth: type[D], /, *, names: Mapping[str, type[Any]] | None = None
) -> PayloadType[A | B | C | D]: ...
def one_of(*kinds: Any, names: Mapping[str, type[Any]] | None = None) -> PayloadType[Any]:
    """A payload that is one of several classes: optional with `None`, tagged structs, or told apart by envelope type.

    Two or more classes that look alike on the wire need `names`, a map from envelope type to class; a type that is
    missing there is a `DecodeError`.
    """
    if names is not None and not set(names.values()) <= set(kinds):
        raise ConfigurationError("names= of one_of() gives a class that is not one of them")
    return PayloadType(typing.Union[kinds], names)  # noqa: UP007 - made at run time


class Reader(Generic[T]):
    """Decodes bodies into one payload class; built once, when the consumer is made."""

    def __init__(self, codecs: Codecs, payload: Payload[T]) -> None:
        self._codecs = codecs
        self._payload = payload
        self._names: Mapping[str, Any] | None = None
        self._into: Any = payload
        if isinstance(payload, PayloadType):
            self._into, self._names = payload.into, payload.names
        if self._into is object:
            self._into = Any  # what the codec makes by itself: dicts, lists, numbers
        for into in self._names.values() if self._names else (self._into,):
            check_payload(into)
        self._by_type: dict[str | None, AnyCodec | None] = {}
        self.is_async = codecs.is_async
        """Then `read_async` is to be asked."""

    @property
    def by_name(self) -> bool:
        """Whether `read` has to be told the envelope's type."""
        return self._names is not None

    def read(self, body: bytes, content_type: str | None, envelope_type: str = "") -> T:
        """The payload. Raises `DecodeError`, and nothing else, whatever the bytes are."""
        into = self._into if self._names is None else self._named(envelope_type)
        codec = self._by_type[content_type] if content_type in self._by_type else self._choose(content_type)
        if codec is None:
            return body  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
        try:
            return cast("T", codec.decode(body, into))
        except DecodeError:
            raise
        except Exception as error:  # a codec from outside: whatever it raises, the message is the one at fault
            raise DecodeError(f"{type(error).__name__}: {error}", content_type=content_type) from error

    async def read_async(self, body: bytes, content_type: str | None, envelope_type: str = "") -> T:
        """The same where a codec has to be awaited. `ClaimStoreError`: its store could not be reached."""
        into = self._into if self._names is None else self._named(envelope_type)
        codec = self._by_type[content_type] if content_type in self._by_type else self._choose(content_type)
        if codec is None or not _waits(type(codec)):
            return self.read(body, content_type, envelope_type)
        try:
            return await cast("Awaitable[T]", codec.decode(body, into))
        except (DecodeError, ClaimStoreError):
            raise
        except Exception as error:
            raise DecodeError(f"{type(error).__name__}: {error}", content_type=content_type) from error

    def _named(self, envelope_type: str) -> Any:
        assert self._names is not None
        into = self._names.get(envelope_type)
        if into is None:
            raise DecodeError(f"envelope type {envelope_type!r} is none of {sorted(self._names)}")
        return into

    def _choose(self, content_type: str | None) -> AnyCodec | None:
        """What decodes it; `None`: the body is the payload."""
        raw = self._into is bytes
        codec = self._codecs.unwrapper_of(content_type) if raw else self._codecs.reader_of(content_type)
        if len(self._by_type) < 64:  # a sender that invents content types must not fill our memory
            self._by_type[content_type] = codec
        return codec


def check_payload(into: Any) -> None:
    """Refuse a payload class that no decoder can be built for, naming class and field."""
    if into is bytes or _is_pydantic(into):
        return
    try:
        msgspec.json.Decoder(into, dec_hook=_into_foreign)
    except NameError as error:
        raise HandlerTypeError(_unresolved(into, error)) from error
    except TypeError as error:
        advice = "; give one_of() names=, a map from envelope type to class" if "union" in str(error).lower() else ""
        raise HandlerTypeError(f"no decoder can be built for {_name_of(into)}: {error}{advice}") from error


def _unresolved(into: Any, error: NameError) -> str:
    for kind in getattr(into, "__mro__", (into,)):
        for name, annotation in getattr(kind, "__annotations__", {}).items():
            if isinstance(annotation, str) and error.name and error.name in annotation:
                return (
                    f"field {name!r} of {_name_of(into)} is of type {annotation!r}, which can not be imported at run "
                    f"time; move the import of {error.name!r} out of `if TYPE_CHECKING`"
                )
    return f"{_name_of(into)} names a type that can not be imported at run time: {error}"


def as_bytes(payload: object) -> bytes | None:
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, bytearray):
        return bytes(payload)
    return payload.tobytes() if isinstance(payload, memoryview) else None


def media_type(content_type: str | None) -> str | None:
    return content_type.partition(";")[0].strip().lower() or None if content_type else None


def _charset_of(content_type: str | None) -> str | None:
    for part in (content_type or "").split(";")[1:]:
        name, _, value = part.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"').lower()
    return None


# msgspec knows dataclasses, structs, TypedDicts, attrs classes and builtins. A pydantic model reads and writes itself.


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__pydantic_validator__")


def _from_foreign(value: Any) -> Any:
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"a {type(value).__name__} is no type that a body can carry")


def _into_foreign(kind: type, value: Any) -> Any:
    if _is_pydantic(kind):
        return cast("Any", kind).model_validate(value)
    raise TypeError(f"{kind.__name__} is no type that a body can be read into")


def _name_of(into: Any) -> str:
    name: object = getattr(into, "__name__", None)
    return str(name or into)
